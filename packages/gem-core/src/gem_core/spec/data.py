"""Schema of a data set, and the declaration and protocol of a data source."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gem_core.spec.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class IdFeature:
    """A categorical feature: one id a row, or many when ``multi``.

    Ids lie in ``[0, cardinality)``; row 0 is reserved for unknown values.
    ``table`` names the embedding table, so that features of one meaning share it (the candidate item and the items of a history).
    A ``weighted`` multi-valued feature has a weight for each id, in ``Batch.id_weights``; models take the weighted mean of its vectors.

    Raises:
        RequestError: ``weighted`` without ``multi``.
    """

    name: str
    cardinality: int
    multi: bool = False
    table: str | None = None
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.weighted and not self.multi:
            raise RequestError(
                f"id feature {self.name!r}", "it is weighted but has one id a row", "Weights tell the ids of a multi-valued feature apart."
            )

    @property
    def table_name(self) -> str:
        return self.table or self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFeature:
    """A float vector a row: ``width`` 1 for a plain number, more for a pretrained embedding."""

    name: str
    width: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFeature:
    """A group of aligned event columns: the user's history of one event type, oldest event first.

    Args:
        name: the group's name.
        ids: one id feature for each side column; batch keys are ``{group}.{feature}``.
        dense: float columns for each event; batch keys are ``{group}.{feature}``.
        time: whether the group carries ``{group}.time``, the event times in seconds (int64).
        max_length: the longest history that the source yields.
    """

    name: str
    ids: tuple[IdFeature, ...] = ()
    dense: tuple[DenseFeature, ...] = ()
    time: bool = False
    max_length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A binary label. ``condition`` names the task that must be positive for this label to be observed (conversion given click)."""

    name: str
    condition: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSchema:
    """Everything a model and a trainer need to know of a data set."""

    ids: tuple[IdFeature, ...] = ()
    dense: tuple[DenseFeature, ...] = ()
    sequences: tuple[SequenceFeature, ...] = ()
    tasks: tuple[Task, ...]
    group: bool = False
    """Whether batches carry ``groups`` (user or request ids), for group AUC."""

    def sequence(self, name: str) -> SequenceFeature:
        """The sequence group of that name; KeyError if there is none."""
        return {s.name: s for s in self.sequences}[name]

    def all_id_features(self) -> dict[str, IdFeature]:
        """Every id column by its batch key, histories included (``{group}.{feature}``), in batch order."""
        out = {f.name: f for f in self.ids}
        for group in self.sequences:
            out.update({f"{group.name}.{f.name}": f for f in group.ids})
        return out


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """A named source of batches.

    Args:
        name: the name used in ``[data] source = ...``.
        summary: one line for tables.
        load: ``module:callable``; called with the options as keyword arguments, returns a ``Source``.
        options: optional ``module:class`` of the pydantic model that validates the options.
    """

    name: str
    summary: str
    load: str
    options: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The part of each global batch that one rank reads."""

    rank: int = 0
    world: int = 1


class Source(Protocol):
    """What a data source loads.

    Splits are ``train`` and ``test``. A *global* batch holds ``batch_size`` rows; the rank gets its contiguous share of each one, so that the rows a
    step trains on do not depend on the number of ranks. A source that streams files may deal other rows to a rank, as many of them, so that each rank
    reads its own part of the files.
    """

    def schema(self) -> DataSchema:
        """The schema, available before any batch is read."""
        ...

    def rows(self, split: str) -> int:
        """How many rows the split has over all ranks."""
        ...

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Any]:
        """Yield ``gem_core.batch.Batch`` on the CPU.

        Args:
            split: ``train`` or ``test``.
            batch_size: rows of the global batch; the last one may be short.
            shard: this rank's share.
            seed: shuffle seed; None keeps the source's own order.
            epoch: changes the shuffle.
            start: number of global batches of this epoch to skip, for resuming.
        """
        ...

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """Reference figures on the test split: ``{baseline: {task: {"auc": .., "ne": ..}}}``; empty where none is known."""
        ...

    def ledger(self) -> dict[str, int]:
        """Rows read, kept by split and dropped by reason; ``read`` equals the sum of the rest."""
        ...


@runtime_checkable
class CountsUnknownIds(Protocol):
    """A source that counts the ids it had to give row 0; what it counts goes into the run log and the summary."""

    def unknown_ids(self, split: str) -> Mapping[str, int]:
        """``{feature: ids}`` of a split, known so far; features without any are left out."""
        ...


@runtime_checkable
class ResumableSource(Source, Protocol):
    """A source that knows which rows were trained, so that a run goes on without losing or repeating one, whatever the number of ranks.

    The trainer calls ``trained`` after each step, puts every rank's ``cursor`` into checkpoints and hands all of them to every rank's ``restore``
    before the first batch. ``batches("train", ...)`` of the restored epoch then yields the rows that are left; ``start`` stays 0.
    """

    def trained(self, batches: Sequence[Any]) -> None:
        """These batches of this rank, in the order in which they were yielded, have been trained on. Batches without rows count for nothing."""
        ...

    def cursor(self) -> Mapping[str, Any]:
        """Plain values (numbers, strings, None, lists, mappings): what this rank has trained of the epoch."""
        ...

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the cursors of all ranks that wrote the checkpoint, in the order of their ranks.

        Raises:
            RequestError: they were written over other data.
        """
        ...
