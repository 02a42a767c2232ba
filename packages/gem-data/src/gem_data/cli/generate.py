"""``gem data generate``."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gem_core.spec import RequestError
from gem_data.options import GeneratedOptions


def generate_command(
    out: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    rows: Annotated[int, typer.Option(help="Training rows.")] = GeneratedOptions.model_fields["rows"].default,
    test_rows: Annotated[int, typer.Option(help="Test rows.")] = GeneratedOptions.model_fields["test_rows"].default,
    seed: Annotated[int, typer.Option(help="Seed of everything.")] = GeneratedOptions.model_fields["seed"].default,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Another option of the source `generated`, as NAME=VALUE.")] = None,
) -> None:
    """Write generated impressions with histories, whose best possible AUC and NE are known, as a prepared folder."""
    from gem_data.generate.writer import write_folder

    options = _options({"rows": rows, "test_rows": test_rows, "seed": seed}, settings or [])
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("rows", total=options.rows + options.test_rows)
        found = write_folder(options, out, lambda done: progress.advance(task, done))
    table = Table("BEST POSSIBLE", "TASK", "AUC", "NE", box=None)
    for bound, tasks in found.items():
        for name, figures in tasks.items():
            table.add_row(bound, name, f"{figures['auc']:.4f}", f"{figures['ne']:.4f}")
    Console().print(table)
    print(f"{options.rows} training rows and {options.test_rows} test rows in {out}")


def _options(given: dict[str, Any], settings: list[str]) -> GeneratedOptions:
    for setting in settings:
        name, _, value = setting.partition("=")
        try:
            given[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise RequestError(f"--set {setting}", f"{value!r} is no TOML value", "Write NAME=VALUE, as in --set items=500.") from error
    try:
        return GeneratedOptions(**given)
    except ValidationError as error:
        first = error.errors()[0]
        asked = f"--set {'.'.join(map(str, first['loc']))}" if first["loc"] else "options of the generated data"
        raise RequestError(asked, first["msg"], f"The options are {', '.join(GeneratedOptions.model_fields)}.") from error
