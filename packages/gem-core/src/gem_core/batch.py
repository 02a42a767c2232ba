"""The jagged batch that flows through sources, engines and models.

All id columns of a batch lie in one ``values`` tensor with one running ``offsets`` tensor, feature by feature, which is the layout of a
torchrec ``KeyedJaggedTensor``: a converter copies nothing. Offsets are int64 throughout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

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
        raise RequestError(asked, f"offsets are {offsets.dtype} of shape {list(offsets.shape)}", "Give one-dimensional int64 offsets with rows + 1 entries.")
    if int(offsets[0]) != 0:
        raise RequestError(asked, f"the first offset is {int(offsets[0])}", "Offsets start at 0.")
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        index = int(falls[0])
        raise RequestError(asked, f"offsets fall from {int(offsets[index])} to {int(offsets[index + 1])} at index {index}", "Offsets never fall.")
    if int(offsets[-1]) != total:
        raise RequestError(asked, f"last offset {int(offsets[-1])} but {total} values", "The last offset is the number of values.")


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
    """

    keys: tuple[str, ...]
    values: Tensor
    offsets: Tensor
    rows: int
    starts: tuple[int, ...]
    max_lengths: tuple[int, ...]

    @classmethod
    def from_columns(cls, columns: Mapping[str, Jagged], rows: int) -> Self:
        """Pack CPU columns, checking each one."""
        values, offsets, starts, longest, base = [], [torch.zeros(1, dtype=torch.int64)], [0], [], 0
        for key, column in columns.items():
            check_offsets(column.offsets, column.values.shape[0], key)
            if column.rows != rows:
                raise RequestError(f"column {key!r}", f"it has {column.rows} rows, the batch has {rows}", "Give every column the same rows.")
            values.append(column.values.to(torch.int64))
            offsets.append(column.offsets[1:] + base)
            base += column.values.shape[0]
            starts.append(base)
            longest.append(int(column.offsets.diff().max()) if rows else 0)
        packed = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
        return cls(tuple(columns), packed, torch.cat(offsets), rows, tuple(starts), tuple(longest))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.keys)}

    def __contains__(self, key: str) -> bool:
        return key in self._index

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
        )

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

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        """A copy on ``device``."""

        def move(value: Any) -> Any:
            if isinstance(value, Tensor | KeyedJagged):
                return value.to(device, non_blocking=non_blocking)
            if isinstance(value, Jagged):
                return Jagged(move(value.values), move(value.offsets), value.max_length)
            if isinstance(value, dict):
                return {key: move(item) for key, item in value.items()}
            return value

        return Batch(**{f.name: move(getattr(self, f.name)) for f in fields(self)})

    def check_labels(self) -> None:
        """Raise RequestError unless every observed label is 0 or 1 and every weight is finite and not negative. For CPU batches."""
        for task, label in self.labels.items():
            seen = label if task not in self.masks else label[self.masks[task]]
            bad = ((seen != 0) & (seen != 1)).nonzero()
            if bad.numel():
                value = float(seen[int(bad[0])])
                raise RequestError(f"label {task!r}", f"it holds {value}", "Labels are 0 or 1; mask out rows whose label is unknown.")
        for task, weight in self.weights.items():
            if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
                raise RequestError(f"weight of {task!r}", "it holds a negative or non-finite value", "Weights are finite and not negative.")
