"""A group of sub-commands that imports one only when it is used, so that help and quick commands never pay for torch."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from gem_core.plugins.nearest import nearest
from gem_core.spec import RequestError, load_object

OWN = {
    "train": ("gem_core.cli.train:train", "Train a model from a configuration file or a recipe."),
    "eval": ("gem_core.cli.eval:evaluate", "Evaluate a finished run on its test split."),
    "checkpoint": ("gem_core.cli.checkpoint:app", "What a checkpoint holds, whether it is whole, how two differ; export."),
    "plugins": ("gem_core.cli.plugins:app", "What is installed: plugins and what each one declares."),
    "kernels": ("gem_core.cli.kernels:app", "Which backend runs each op here, and why the others do not."),
    "bench": ("gem_core.cli.bench:app", "Measure this machine: training steps, layers, collectives."),
    "plan": ("gem_core.cli.plan:plan", "Where tables would lie on any number of ranks: placement, memory, communication."),
    "config": ("gem_core.cli.config:app", "Every value of a configuration with its origin; the JSON schema."),
    "recipes": ("gem_core.cli.recipes:app", "The configurations that are shipped."),
    "doctor": ("gem_core.cli.doctor:doctor", "Check this machine: versions, native libraries, devices, plugins."),
}
"""Core's own sub-commands: where they live, and the line for ``gem --help``."""


def as_command(loaded: Any, name: str) -> Any:
    """A command from a ``typer.Typer`` application or a plain function with typer annotations."""
    app = loaded if isinstance(loaded, typer.Typer) else _single(loaded)
    command = typer.main.get_command(app)
    command.name = name
    return command


def _single(function: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return app


def find(name: str) -> Any:
    """Load a sub-command: core's own, else a plugin's.

    Raises:
        RequestError: there is no such command; the nearest is offered.
        PluginError: two plugins declare it, or it cannot be loaded; owners are named.
    """
    if name in OWN:
        return as_command(load_object(OWN[name][0]), name)
    from gem_core.plugins.manager import host

    plugins = host()
    names = plugins.names("cli_commands")
    if name not in names:
        raise RequestError(f"gem {name}", "there is no such command", nearest(name, [*OWN, *names]))
    return as_command(plugins.load("cli_commands", name), name)


class NearestGroup(TyperGroup):
    """A group that offers the nearest name for a sub-command that does not exist."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise RequestError(f"{ctx.command_path} {args[0]}", "there is no such command", nearest(args[0], self.commands))
        return super().resolve_command(ctx, args)


class SharedGroup(NearestGroup):
    """A group of core's to which plugins add commands, declared under the name ``GROUP NAME``; core's own cannot be taken over."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *sorted(self._added().keys() - self.commands)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Core's command, or a stand-in with the summary of a plugin's."""
        own = self.commands.get(cmd_name)
        return own or (TyperCommand(cmd_name, help=self._added()[cmd_name]) if cmd_name in self._added() else None)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        if name not in self._added():
            raise RequestError(f"{ctx.command_path} {name}", "there is no such command", nearest(name, self.list_commands(ctx)))
        return name, find(f"{self.name} {name}"), args[1:]

    def _added(self) -> dict[str, str]:
        """Summary of each command that plugins add here."""
        from gem_core.plugins.manager import host

        prefix = f"{self.name} "
        commands = [command for _, command in host().collect("gem_cli_commands")]
        return {command.name.removeprefix(prefix): command.summary for command in commands if command.name.startswith(prefix)}


class LazyGroup(TyperGroup):
    """Lists sub-commands from their one-line summaries; loads the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*OWN, *sorted(_from_plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in with the summary, for help and completion."""
        summaries = {name: summary for name, (_, summary) in OWN.items()}
        if cmd_name not in summaries:
            summaries |= _from_plugins()
        return TyperCommand(cmd_name, help=summaries[cmd_name]) if cmd_name in summaries else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return args[0], find(args[0]), args[1:]


def _from_plugins() -> dict[str, str]:
    """Summaries of plugins' commands, those of core's groups left to them; core's own names cannot be taken over."""
    from gem_core.plugins.manager import host

    return {command.name: command.summary for _, command in host().collect("gem_cli_commands") if command.name.split()[0] not in OWN}
