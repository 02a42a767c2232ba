"""Declaration of a sub-command that a plugin adds to ``gem``."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CliCommand:
    """A sub-command.

    Args:
        name: the word after ``gem``, or two: a group of core's (``bench``, ``kernels``) and the word after it.
        load: ``module:app`` of a ``typer.Typer`` application, or a function with typer annotations, imported only when the command is used.
        summary: one line for ``gem --help``.
    """

    name: str
    load: str
    summary: str
