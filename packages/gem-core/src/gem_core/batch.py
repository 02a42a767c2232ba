"""The jagged batch that flows through sources, engines and models.

All id columns of a batch lie in one ``values`` tensor with one running ``offsets`` tensor, feature by feature, which is the layout of a
torchrec ``KeyedJaggedTensor``: a converter copies nothing. Offsets are int64 throughout.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from gem_core.spec.data import Shard
from gem_core.spec.errors import RequestError


@dataclass(frozen=True, slots=True)
class Jagged:
    """Rows of different lengths, packed: ``values`` ``[total, ...]``, ``offsets`` ``[rows + 1]`` int64, ``max_length`` known on the host."""

    values: Tensor
    offsets: Tensor
    max_length: int

    @property
    def rows(self) -> int:
        return self.offsets.numel() - 1

    def lengths(self) -> Tensor:
        """``[rows]`` int64."""
        return self.offsets.diff()


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Running int64 offsets ``[rows + 1]`` of ``lengths`` ``[rows]`` of any integer dtype.

    Raises:
        RequestError: a length is negative; the message names the first bad index.
    """
    wide = lengths.to(torch.int64)
    if wide.numel() and int(wide.min()) < 0:
        index = int((wide < 0).nonzero()[0])
        raise RequestError("offsets from lengths", f"length {int(wide[index])} at index {index} is negative", "Lengths count values and start at 0.")
    return torch.cat([wide.new_zeros(1), wide.cumsum(0)])


def check_offsets(offsets: Tensor, total: int, what: str) -> None:
    """Raise RequestError unless ``offsets`` starts at 0, never falls and ends at ``total``. Synchronises; for CPU tensors and checked mode."""
    asked = f"jagged tensor {what!r}"
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or offsets.numel() < 1:
        raise RequestError(
            asked, f"offsets are {offsets.dtype} of shape {list(offsets.shape)}", "Give one-dimensional int64 offsets with rows + 1 entries."
        )
    host = offsets.cpu().numpy()  # half the time of torch's operators on a small batch
    if host[0] != 0:
        raise RequestError(asked, f"the first offset is {host[0]}", "Offsets start at 0.")
    falls = host[1:] < host[:-1]
    if falls.any():
        index = int(falls.argmax())
        raise RequestError(asked, f"offsets fall from {host[index]} to {host[index + 1]} at index {index}", "Offsets never fall.")
    if host[-1] != total:
        raise RequestError(asked, f"last offset {host[-1]} but {total} values", "The last offset is the number of values.")


def _as_ids(values: Tensor, what: str) -> Tensor:
    """``values`` as int64. An empty tensor may have any dtype: a rank without ids often holds torch's default, float32."""
    if values.numel() and (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool):
        raise RequestError(f"ids of {what}", f"they are {values.dtype}", "Ids are integers; put numbers into a dense feature.")
    return values.to(torch.int64)


@dataclass(frozen=True)
class KeyedJagged:
    """Several jagged id columns over the same rows, packed one after the other.

    Args:
        keys: column names, in packing order.
        values: ``[total]`` int64.
        offsets: ``[len(keys) * rows + 1]`` int64, running over all columns.
        rows: number of rows of each column.
        starts: where each column begins in ``values``, as host integers, with the total at the end: slicing synchronises nothing.
        max_lengths: the longest row of each column, as host integers.
        sound: whether the offsets have been checked; ``check_ids`` then looks at the ids alone.
    """

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    rows: int
    starts: tuple[int, ...]
    max_lengths: tuple[int, ...]
    sound: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _as_ids(self.values, "a keyed jagged tensor"))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Jagged], rows: int) -> Self:
        """Pack CPU columns, checking each one."""
        values, offsets, starts, longest, base = [], [torch.zeros(1, dtype=torch.int64)], [0], [], 0
        for key, column in columns.items():
            check_offsets(column.offsets, column.values.shape[0], key)
            if column.rows != rows:
                raise RequestError(f"column {key!r}", f"it has {column.rows} rows, the batch has {rows}", "Give every column the same rows.")
            values.append(_as_ids(column.values, repr(key)))
            offsets.append(column.offsets[1:] + base)
            base += column.values.shape[0]
            starts.append(base)
            longest.append(int(column.offsets.diff().max()) if rows else 0)
        packed = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
        return cls(tuple(columns), packed, torch.cat(offsets), rows, tuple(starts), tuple(longest), sound=True)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.keys)}

    def __contains__(self, key: str) -> bool:
        return key in self._index

    def ids(self, key: str) -> Tensor:
        """The ids of the column ``key``, a view ``[ids]``."""
        i = self._index[key]
        return self.values[self.starts[i] : self.starts[i + 1]]

    def __getitem__(self, key: str) -> Jagged:
        """The column ``key``: its values are a view, its offsets start at 0."""
        i = self._index[key]
        offsets = self.offsets[i * self.rows : (i + 1) * self.rows + 1] - self.starts[i]
        return Jagged(self.values[self.starts[i] : self.starts[i + 1]], offsets, self.max_lengths[i])

    def select(self, keys: Sequence[str]) -> "KeyedJagged":
        """A copy with only ``keys``, in that order."""
        columns = {key: self[key] for key in keys}
        values = [c.values for c in columns.values()]
        sizes = [c.values.shape[0] for c in columns.values()]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        offsets = [c.offsets[1:] + s for c, s in zip(columns.values(), starts, strict=False)]
        return KeyedJagged(
            tuple(keys),
            torch.cat(values) if values else self.values[:0],
            torch.cat([self.offsets.new_zeros(1), *offsets]),
            self.rows,
            tuple(starts),
            tuple(c.max_length for c in columns.values()),
            self.sound,
        )

    def check_ids(self, limits: Mapping[str, tuple[str, int]]) -> None:
        """Raise RequestError unless each feature of ``limits`` is here, the offsets are sound and every id has a row in its table.

        Ids and offsets are read on the host, so on a device only the presence of the features is checked.

        Args:
            limits: ``{feature: (table, rows)}``.
        """
        for key in limits:
            if key not in self:
                so = f"the batch has {', '.join(self.keys) or 'no id columns'}"
                raise RequestError(f"look-up of feature {key!r}", so, "Let the data source and the model use one schema.")
        if self.values.device.type != "cpu":
            return
        if not self.sound:
            if self.offsets.numel() != len(self.keys) * self.rows + 1:
                so = f"{self.offsets.numel()} offsets for {len(self.keys)} columns of {self.rows} rows"
                raise RequestError("keyed jagged tensor", so, "Give columns * rows + 1 offsets.")
            check_offsets(self.offsets, self.values.shape[0], ", ".join(self.keys))
        self._check_range(limits)

    def _check_range(self, limits: Mapping[str, tuple[str, int]]) -> None:
        """Every id against its table, in one pass: read as unsigned, a negative id is larger than any table."""
        filled = [(key, start) for key, start, end in zip(self.keys, self.starts, self.starts[1:], strict=False) if end > start]
        if not filled:
            return
        values = self.values.numpy().view(np.uint64)[: self.starts[-1]]
        highest = np.maximum.reduceat(values, [start for _, start in filled]).tolist()
        for (key, _), high in zip(filled, highest, strict=True):
            if key in limits and high >= limits[key][1]:
                table, rows = limits[key]
                ids = self.ids(key)
                so = f"id {int(ids[(ids < 0) | (ids >= rows)][0])} is not a row of table {table!r}, which has {rows}"
                raise RequestError(f"ids of feature {key!r}", so, "Map unknown values to row 0, or declare the feature's true cardinality.")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJagged":
        return replace(self, values=self.values.to(device, non_blocking=non_blocking), offsets=self.offsets.to(device, non_blocking=non_blocking))


@dataclass(frozen=True)
class Batch:
    """One rank's rows of one step.

    Args:
        rows: number of rows; may be 0 on a rank that has run out.
        ids: every id column, single, multi and per-event ones (``{group}.{feature}``).
        dense: ``{feature: [rows, width]}`` float32.
        event_dense: ``{group.feature: [events, width]}`` float32, aligned with the group's id columns.
        event_time: ``{group: [events]}`` int64 seconds.
        event_offsets: ``{group: Jagged}`` whose ``values`` is empty: offsets ``[rows + 1]`` and longest history of each group.
        time: ``[rows]`` int64 seconds of the impression, or None.
        labels: ``{task: [rows]}`` float32, each 0 or 1; meaningless where masked out.
        masks: ``{task: [rows]}`` bool, True where the label is observed; tasks without an entry are observed everywhere.
        weights: ``{task: [rows]}`` float32; tasks without an entry weigh 1.
        groups: ``[rows]`` int64 user or request ids for group AUC, or None.
        id_weights: ``{feature: [ids]}`` float32 weights of the ids of the weighted features, aligned with their ids.
        origin: ``[rows]`` int64 number of each row in its source, or None: accounts for every row.
        global_rows: rows of this step over all ranks.
    """

    rows: int
    ids: KeyedJagged
    labels: dict[str, Tensor]
    dense: dict[str, Tensor]
    event_dense: dict[str, Tensor]
    event_time: dict[str, Tensor]
    event_offsets: dict[str, Jagged]
    masks: dict[str, Tensor]
    weights: dict[str, Tensor]
    time: Tensor | None = None
    groups: Tensor | None = None
    global_rows: int = 0
    id_weights: dict[str, Tensor] = field(default_factory=dict)
    origin: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """A copy on ``device``."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """A copy in page-locked host memory, from which ``to`` can copy while the host goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if isinstance(value, KeyedJagged):
                return replace(value, values=change(value.values), offsets=change(value.offsets))
            if isinstance(value, Jagged):
                return Jagged(change(value.values), change(value.offsets), value.max_length)
            if isinstance(value, dict):
                return {key: changed(item) for key, item in value.items()}
            return value

        return Batch(**{f.name: changed(getattr(self, f.name)) for f in fields(self)})

    def check_labels(self) -> None:
        """Raise RequestError unless every observed label is 0 or 1 and every weight is finite and not negative. For CPU batches."""
        for task, label in self.labels.items():
            seen = label if task not in self.masks else label[self.masks[task]]
            bad = ((seen != 0) & (seen != 1)).nonzero()
            if bad.numel():
                value = float(seen[int(bad[0])])
                raise RequestError(f"label {task!r}", f"it holds {value}", "Labels are 0 or 1; mask out rows whose label is unknown.")
        for name, weight in (*self.weights.items(), *self.id_weights.items()):
            if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
                raise RequestError(f"weight of {name!r}", "it holds a negative or non-finite value", "Weights are finite and not negative.")


def range_index(begin: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Positions ``begin[r] .. begin[r] + lengths[r] - 1`` of every row, row after row, and the offsets ``[rows + 1]`` of the packed result; int64.

    Indexing packed columns with the positions gathers any rows of a jagged table at once.
    """
    offsets = lengths_to_offsets(lengths)
    shift = torch.repeat_interleave(begin - offsets[:-1], lengths)
    return torch.arange(shift.numel(), device=begin.device) + shift, offsets


def epoch_batches(
    rows: int, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
) -> Iterator[tuple[Tensor, int]]:
    """The row numbers that one rank reads at each step of an epoch, by the rules of ``gem_core.spec.data.Source``.

    The order depends on ``seed`` and ``epoch`` alone. Each global batch is cut into one contiguous share a rank, whose sizes differ by one row at
    most; every rank sees the same number of steps, and the last one may leave a rank without rows.

    Yields:
        ``(index, global_rows)``: int64 row numbers of this rank, and the rows of the step over all ranks.

    Raises:
        RequestError: a count is out of range; raised by the call, before the first batch.
    """
    if batch_size < 1:
        raise RequestError("batches", f"batch_size is {batch_size}", "Give a batch of one row or more.")
    if not 0 <= shard.rank < shard.world:
        raise RequestError("batches", f"rank {shard.rank} of {shard.world}", "Give a rank from 0 to world - 1.")
    for name, value in (("seed", seed or 0), ("epoch", epoch), ("start", start)):
        if value < 0:
            raise RequestError("batches", f"{name} is {value}", "Give 0 or more.")
    return _epoch_batches(rows, batch_size, shard, seed, epoch, start)


def _epoch_batches(rows: int, batch_size: int, shard: Shard, seed: int | None, epoch: int, start: int) -> Iterator[tuple[Tensor, int]]:
    order = torch.arange(rows) if seed is None else torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(rows))
    for first in range(start * batch_size, rows, batch_size):
        count = min(batch_size, rows - first)
        low, high = (first + count * r // shard.world for r in (shard.rank, shard.rank + 1))
        yield order[low:high], count
