"""The typer application of the ``gem`` command."""

from typing import Annotated, cast

import typer

from gem_core import __version__
from gem_core.cli.lazy import LazyGroup
from gem_core.spec import RequestError

app = typer.Typer(cls=LazyGroup, help="Train recommendation models; see which kernels run, and why.")

UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""Base of what typer raises for a wrong command line; the class moved between modules over its releases."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"gem-core {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version of gem-core.")] = False,
) -> None:
    """Train recommendation models; see which kernels run, and why."""


def invoke(arguments: list[str]) -> int:
    """Run one command line and return its exit code.

    Raises:
        RequestError: the command line itself is wrong.
        GemError: whatever the command raises.
    """
    try:
        code = typer.main.get_command(app)(args=arguments, prog_name="gem", standalone_mode=False)
    except UsageError as error:
        where = getattr(getattr(error, "ctx", None), "command_path", "gem")
        said = error.format_message()  # type: ignore[attr-defined]
        raise RequestError(where, said, f"`{where} --help` shows what it takes.") from error
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    return code if isinstance(code, int) else 0
