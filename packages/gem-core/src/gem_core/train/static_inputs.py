"""A batch and its looked-up vectors in tensors of fixed size and place, for computation that is recorded once and repeated: CUDA graphs.

Batches differ in how many events and ids their rows have. Room that a batch leaves is given to ``DUMMIES`` rows after the real ones, as evenly as
whole numbers allow, so that whatever reads the batch finds a sound one. No task observes a dummy row: it adds nothing to a loss, nor to a gradient.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_core.batch import Batch, Jagged, KeyedJagged
from gem_core.spec import DataSchema, Task

DUMMIES = 32
"""Rows that hold what is left of a capacity, at most so many times the longest row; whole eights keep 16-bit matmuls over rows aligned."""
_FIELDS = ("labels", "masks", "weights", "dense", "event_dense", "event_time", "id_weights")
ROWS = ""
"""The extent of what has one entry a row; other extents are names of groups and of features with any number of ids a row."""


@dataclass(frozen=True)
class Extents:
    """What counts the entries of each tensor of a batch: its rows, a group's events, or a feature's ids.

    Args:
        schema: of the data set.
        pooled: features whose table gives one vector a row.
    """

    schema: DataSchema
    pooled: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        """All but the rows: what a capacity is given for."""
        return (*(group.name for group in self.schema.sequences), *(feature.name for feature in self.schema.ids if feature.multi))

    def of_column(self, key: str) -> str:
        """Of an id column."""
        for group in self.schema.sequences:
            if any(key == f"{group.name}.{feature.name}" for feature in group.ids):
                return group.name
        return key if any(feature.name == key and feature.multi for feature in self.schema.ids) else ROWS

    def of_vectors(self, key: str) -> str:
        """Of what a column's look-up gives."""
        return ROWS if key in self.pooled else self.of_column(key)

    def longest(self, name: str) -> int | None:
        """The most entries of a row; None for no limit."""
        return next((group.max_length for group in self.schema.sequences if group.name == name), None)

    def sizes(self, batch: Batch) -> dict[str, int]:
        """Entries of a batch by extent, known to the host."""
        found = {ROWS: batch.rows}
        for key, start, end in zip(batch.ids.keys, batch.ids.starts, batch.ids.starts[1:], strict=False):
            found.setdefault(self.of_column(key), end - start)
        for group in self.schema.sequences:
            if group.name not in found:
                others = (batch.event_dense[f"{group.name}.{feature.name}"] for feature in group.dense)
                found[group.name] = next(iter((*others, *(batch.event_time[g] for g in (group.name,) if group.time)))).shape[0]
        return found

    def lengths(self, batch: Batch, name: str) -> Tensor:
        """``[rows]`` entries of each row, of one of ``names``."""
        return (batch.event_offsets[name] if name in batch.event_offsets else batch.ids[name]).lengths()

    def parts(self, batch: Batch) -> Iterator[tuple[tuple[str, str], Tensor, str]]:
        """``(place, tensor, extent)`` of every tensor that a model or a loss reads, but for ids and offsets."""
        for field in ("labels", "masks", "weights", "dense"):
            for key, tensor in getattr(batch, field).items():
                yield (field, key), tensor, ROWS
        for group in self.schema.sequences:
            for feature in group.dense:
                yield ("event_dense", f"{group.name}.{feature.name}"), batch.event_dense[f"{group.name}.{feature.name}"], group.name
            if group.time:
                yield ("event_time", group.name), batch.event_time[group.name], group.name
        for key, tensor in batch.id_weights.items():
            yield ("id_weights", key), tensor, self.of_column(key)
        if batch.time is not None:
            yield ("time", ""), batch.time, ROWS


class StaticInputs:
    """Tensors that hold any batch of ``rows`` rows which does not exceed the capacity.

    Fresh ones hold zeros in rows of equal length.

    Args:
        extents: of the data set.
        tasks: every one gets a mask, which no dummy row passes.
        rows: of a batch, without dummies.
        capacity: the most entries by extent.
        batch: one on the device, whose tensors give widths and dtypes.
    """

    def __init__(self, extents: Extents, tasks: Sequence[Task], rows: int, capacity: Mapping[str, int], batch: Batch) -> None:
        self.extents, self.rows, self.keys = extents, rows, batch.ids.keys
        self.capacity = {ROWS: rows + DUMMIES, **{name: capacity[name] for name in extents.names}}
        device = batch.ids.values.device
        self._whole = {place: self._room(tensor, extent) for place, tensor, extent in extents.parts(batch)}
        for task in tasks:
            mask = self._whole.setdefault(("masks", task.name), torch.zeros(rows + DUMMIES, dtype=torch.bool, device=device))
            mask[:rows] = True  # what a batch without a mask means; a batch with one overwrites it
        widths = [self.capacity[extents.of_column(key)] for key in self.keys]
        self._starts = (0, *torch.tensor(widths).cumsum(0).tolist())
        self._values = batch.ids.values.new_zeros(self._starts[-1])
        self.scales = torch.zeros(len(tasks), device=device)
        even = {name: torch.linspace(0, total, rows + DUMMIES + 1, dtype=torch.float64).long() for name, total in self.capacity.items()}
        columns = [even[extents.of_column(key)][:-1] + start for key, start in zip(self.keys, self._starts, strict=False)]
        self._offsets = torch.cat([*columns, torch.tensor(self._starts[-1:])]).to(device)
        self._events = {group.name: even[group.name].to(device) for group in extents.schema.sequences}
        self.batch = self._batch()

    def fits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a batch of these sizes has room, and leaves no more than the dummy rows can hold."""
        if sizes[ROWS] != self.rows:
            return False
        for name in self.extents.names:
            left, longest = self.capacity[name] - sizes[name], self.extents.longest(name)
            if left < 0 or (longest is not None and left > DUMMIES * longest):
                return False
        return True

    @torch.no_grad()
    def fill(self, batch: Batch, scales: Sequence[float]) -> None:
        """Take a batch that fits, on the device, and ``[tasks]`` factors of the loss."""
        sizes, rows = self.extents.sizes(batch), self.rows
        for place, tensor, extent in self.extents.parts(batch):
            self._whole[place][: sizes[extent]].copy_(tensor)
        for key, start in zip(self.keys, self._starts, strict=False):
            ids = batch.ids.ids(key)
            self._values[start : start + ids.shape[0]].copy_(ids)
        ends = {name: _ends(sizes[name], total) for name, total in self.capacity.items()}
        extents = [self.extents.of_column(key) for key in self.keys]
        shifts = [new - old for new, old in zip(self._starts, batch.ids.starts, strict=False)][: len(self.keys)]
        # dummy rows of a column start where the rows before them end; only the last end is no start
        begins = [start + end for start, name in zip(self._starts, extents, strict=False) for end in (sizes[name], *ends[name][:-1])]
        groups = [end for name in self._events for end in ends[name]]
        told = self._tell([*shifts, *begins, *groups], scales)
        shift, begin, group = torch.split(told, [len(shifts), len(begins), len(groups)])
        table = self._offsets[:-1].view(len(self.keys), rows + DUMMIES)
        torch.add(batch.ids.offsets[:-1].view(len(self.keys), rows), shift[:, None], out=table[:, :rows])
        table[:, rows:].copy_(begin.view(len(self.keys), DUMMIES))
        for (name, offsets), last in zip(self._events.items(), torch.split(group, DUMMIES), strict=True):
            offsets[: rows + 1].copy_(batch.event_offsets[name].offsets)
            offsets[rows + 1 :].copy_(last)

    def room_for(self, embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Zeros in the place of looked-up vectors."""
        return {key: self._room(vectors, self.extents.of_vectors(key)) for key, vectors in embedded.items()}

    def padded(self, embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Looked-up vectors and zeros after them, through which gradients flow."""
        left = {key: self.capacity[self.extents.of_vectors(key)] - vectors.shape[0] for key, vectors in embedded.items()}
        return {key: pad(vectors, (0, 0) * (vectors.dim() - 1) + (0, left[key])) for key, vectors in embedded.items()}

    def _room(self, tensor: Tensor, extent: str) -> Tensor:
        return torch.zeros((self.capacity[extent], *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    def _tell(self, numbers: Sequence[int], scales: Sequence[float]) -> Tensor:
        """Whole numbers of the host on the device, and the factors in their place, by one copy."""
        host = torch.cat([torch.tensor(numbers, dtype=torch.int64), torch.tensor(scales, dtype=torch.float64).view(torch.int64)])
        device = self._values.device
        told = (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)
        self.scales.copy_(told[len(numbers) :].view(torch.float64))
        return told[: len(numbers)]

    def _batch(self) -> Batch:
        fields: Any = {name: {} for name in _FIELDS}
        for (field, key), tensor in self._whole.items():
            if field != "time":
                fields[field][key] = tensor
        total = self.rows + DUMMIES
        longest = tuple(self._longest(self.extents.of_column(key)) for key in self.keys)
        groups = {name: Jagged(self._values[:0], offsets, self._longest(name)) for name, offsets in self._events.items()}
        ids = KeyedJagged(self.keys, self._values, self._offsets, total, self._starts, longest, sound=True)
        return Batch(rows=total, ids=ids, event_offsets=groups, time=self._whole.get(("time", "")), **fields)

    def _longest(self, name: str) -> int:
        limit = 1 if name == ROWS else self.extents.longest(name)
        return self.capacity[name] if limit is None else limit


def _ends(used: int, total: int) -> list[int]:
    """Where each dummy row ends, if ``used`` of ``total`` entries come before them."""
    return [used + (total - used) * (i + 1) // DUMMIES for i in range(DUMMIES)]
