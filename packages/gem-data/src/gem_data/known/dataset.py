"""What is known of a public data set, and short forms for its schema and definition."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem_core.spec import RequestError
from gem_data.known.tables import KnownTable
from gem_data.schema.declare import Id, MultiId, Number, Schema, Sequence, Task

Choices = Mapping[str, str]
Tables = Mapping[str, KnownTable]


@dataclass(frozen=True, kw_only=True)
class KnownDataSet:
    """A public data set.

    Args:
        name: as on the command line.
        summary: one line.
        terms: whose it is and what may be done with it.
        files: the raw files that are looked for.
        quirks: what is unusual in them and is taken care of.
        open: ``(folder, choices) -> {table: KnownTable}``; only looks for the files, rows are read later.
        schema: what the columns of prepared rows mean.
        definition: for ``gem data prepare``, without the paths of tables, made when all rows of the tables have been read.
        choices: ``{name: (default, other, ...)}``.
    """

    name: str
    summary: str
    terms: str
    files: tuple[str, ...]
    quirks: tuple[str, ...]
    open: Callable[[Path, Choices], dict[str, KnownTable]]
    schema: Schema
    definition: Callable[[Tables], dict[str, Any]]
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def tables(self, folder: Path, **chosen: str) -> dict[str, KnownTable]:
        """The canonical tables of the raw files in a folder.

        Raises:
            RequestError: the folder or a file is missing, or a choice is none of the data set's.
        """
        if not folder.exists():
            raise RequestError(f"data set {self.name!r} in {folder}", "there is no such folder", "Check the path.")
        for name, value in chosen.items():
            if value not in self.choices.get(name, ()):
                offered = "; ".join(f"{key} = {', '.join(values)}" for key, values in self.choices.items()) or "none"
                raise RequestError(f"choice {name}={value} of {self.name!r}", f"the choices are: {offered}", "Choose one of them.")
        return self.open(folder, {name: chosen.get(name, values[0]) for name, values in self.choices.items()})


def vocabulary(*names: str) -> list[Id]:
    """Features with a vocabulary of the training values."""
    return [Id(name=name, encode="vocabulary") for name in names]


def hashed(*names: str, rows: int) -> list[Id]:
    """Features hashed into as many rows each."""
    return [Id(name=name, encode="hash", rows=rows) for name in names]


def numbers(*names: str) -> tuple[Number, ...]:
    return tuple(Number(name=name) for name in names)


def sequence(name: str, *features: Id, number: tuple[Number, ...] = (), length: int = 100) -> Sequence:
    """A history with times of at most ``length`` events."""
    return Sequence(name=name, max_length=length, time="time", id=features, number=number)


def tasks(*names: str, **conditions: str) -> tuple[Task, ...]:
    """Tasks whose label column is called as the task."""
    return tuple(Task(name=name, label=name, condition=conditions.get(name)) for name in names)


__all__ = ["Choices", "KnownDataSet", "MultiId", "Tables", "hashed", "numbers", "sequence", "tasks", "vocabulary"]
