"""Models of ``schema.toml``. They are strict: an unknown key, a wrong type, a name used twice and columns that contradict each other are refused."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gem_data.schema.conflicts import conflicts

Column = Annotated[str, Field(min_length=1)]
Name = Annotated[str, Field(pattern=r"^[^./\\\s][^/\\\x00-\x1f]*$")]
"""Names are parts of file names and of batch keys."""
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def many(**about: Any) -> Any:
    """A tuple that may be given as a list, as TOML does; its entries stay strict."""
    return Field((), strict=False, **about)


class Feature(Strict):
    """A feature and the column that it is read from.

    Args:
        name: the feature's name in batches.
        column: the column; by default the name, and inside a sequence ``SEQUENCE.NAME``.
    """

    name: Name
    column: Column | None = None


class Id(Feature):
    """A categorical feature: integers or strings that become rows of an embedding table.

    Args:
        encode: ``hash`` into the rows, a ``vocabulary`` of training values, or ``pass``: the ids are rows already.
        rows: rows of the table, with row 0 for unknown and missing values; a vocabulary that is not built yet may leave it out.
        table: table shared with other features; by default the feature's name.
        min_count: values seen more rarely are not admitted to the vocabulary.
        unknown: values outside the vocabulary, or outside ``0 .. rows - 1`` for ``pass``: count them and give them row 0, or refuse them.
    """

    encode: Literal["hash", "vocabulary", "pass"]
    rows: Annotated[int, Field(ge=2)] | None = None
    table: Name | None = None
    min_count: Count = 1
    unknown: Literal["row0", "error"] = "row0"

    @property
    def table_name(self) -> str:
        return self.table or self.name


class MultiId(Id):
    """A list column of ids.

    Args:
        weights: list column of as many floats, one for each id; the feature is then pooled as a weighted mean.
    """

    weights: Column | None = None


class Number(Feature):
    """A float a row (inside a sequence: an event)."""


class Embedding(Feature):
    """A list column of ``width`` floats a row."""

    width: Count


class Sequence(Strict):
    """Aligned list columns of one history, oldest event first.

    Args:
        name: the group's name; its columns are called ``NAME.FEATURE``.
        max_length: events kept of each history.
        time: name of the event times, int64 seconds, whose column is ``NAME.TIME``; None where events have no time.
        time_column: that column, where it is called otherwise.
        truncate: which events of a longer history are kept, or ``error``: it is refused.
    """

    name: Name
    max_length: Count
    time: Name | None = None
    time_column: Column | None = None
    truncate: Literal["newest", "oldest", "error"] = "newest"
    id: tuple[Id, ...] = many()
    number: tuple[Number, ...] = many()

    def column_of(self, feature: Feature) -> str:
        return feature.column or f"{self.name}.{feature.name}"

    @property
    def time_source(self) -> str | None:
        """The column of the event times."""
        return self.time_column or (f"{self.name}.{self.time}" if self.time else None)

    def columns(self) -> list[str]:
        """The list columns, all of the same lengths."""
        times = [] if self.time_source is None else [self.time_source]
        return [*(self.column_of(f) for f in (*self.id, *self.number)), *times]


class Task(Strict):
    """A binary label.

    Args:
        label: column of 0 and 1.
        mask: column that is true where the label is observed.
        weight: column of row weights.
        delay: column of seconds from the impression to the positive event.
        condition: task that must be positive for this label to be observed.
        loss_weight: factor of this task in the loss.
    """

    name: Name
    label: Column
    mask: Column | None = None
    weight: Column | None = None
    delay: Column | None = None
    condition: Name | None = None
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] = 1.0

    def columns(self) -> list[str]:
        return [c for c in (self.label, self.mask, self.weight, self.delay) if c is not None]


class Schema(Strict):
    """What the columns of a data set mean.

    Args:
        user: column of the user.
        request: column of the request, whose rows share a history.
        time: column of the impression time; int64 seconds in prepared data.
    """

    user: Column | None = None
    request: Column | None = None
    time: Column | None = None
    id: tuple[Id, ...] = many()
    multi_id: tuple[MultiId, ...] = many()
    number: tuple[Number, ...] = many()
    embedding: tuple[Embedding, ...] = many()
    sequence: tuple[Sequence, ...] = many()
    task: tuple[Task, ...] = many()

    @model_validator(mode="after")
    def _consistent(self) -> "Schema":
        for conflict in conflicts(self):
            raise ValueError(conflict)
        return self

    def id_columns(self) -> Iterator[tuple[str, str, Id]]:
        """``(batch key, column, feature)`` of every id feature, in batch order; keys of a sequence's are ``SEQUENCE.FEATURE``."""
        for feature in (*self.id, *self.multi_id):
            yield feature.name, feature.column or feature.name, feature
        for group in self.sequence:
            for feature in group.id:
                yield f"{group.name}.{feature.name}", group.column_of(feature), feature

    def columns(self) -> list[str]:
        """Every column that the schema needs, each once."""
        single = [c for c in (self.user, self.request, self.time) if c is not None]
        features = [f.column or f.name for f in (*self.id, *self.multi_id, *self.number, *self.embedding)]
        weights = [f.weights for f in self.multi_id if f.weights is not None]
        groups = [c for group in self.sequence for c in group.columns()]
        labels = [c for task in self.task for c in task.columns()]
        return list(dict.fromkeys([*single, *features, *weights, *groups, *labels]))
