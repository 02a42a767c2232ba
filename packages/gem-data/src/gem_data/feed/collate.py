"""Batches gathered from decoded parts: one copy of each value, straight into the batch's packed tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec import DataSchema
from gem_data.feed.part import Ints, Part

Picked = Sequence[tuple[Part, Ints]]
"""Parts, and the rows wanted of each."""


class Collator:
    """Builds batches of one schema.

    Args:
        schema: what the batches hold.
        times: ``{group: name of its time column}``.
        pin: whether batches lie in page-locked memory, for asynchronous copies to a GPU.
    """

    def __init__(self, schema: DataSchema, times: dict[str, str], *, pin: bool = False) -> None:
        self.schema, self.times, self.pin = schema, times, pin

    def batch(self, picked: Picked, global_rows: int) -> Batch:
        """The rows of ``picked``, part after part."""
        at = [torch.from_numpy(rows) for _, rows in picked]
        rows = sum(index.numel() for index in at)
        spans = {name: _Span(picked, at, name) for name in self._list_names()}
        roles = {role: self._scalars(picked, at, role) for role in ("dense", "label", "mask", "weight", "row")}
        groups = self.schema.sequences
        return Batch(
            rows=rows,
            ids=self._ids(picked, at, spans, rows),
            labels=roles["label"],
            dense={f.name: roles["dense"][f.name] for f in self.schema.dense},
            event_dense={f"{g.name}.{f.name}": self._values(spans[g.name], f.name)[:, None] for g in groups for f in g.dense},
            event_time={g.name: self._values(spans[g.name], self.times[g.name]) for g in groups if g.time},
            event_offsets={g.name: Jagged(torch.empty(0), self._pinned(spans[g.name].offsets), spans[g.name].longest) for g in groups},
            masks=roles["mask"],
            weights=roles["weight"],
            time=roles["row"].get("time"),
            groups=roles["row"].get("group"),
            global_rows=global_rows,
            id_weights={f.name: self._values(spans[f.name], "weights") for f in self.schema.ids if f.weighted},
            origin=torch.cat([part.origin[index] for (part, _), index in zip(picked, at, strict=True)]),
        )

    def _list_names(self) -> list[str]:
        return [*(f.name for f in self.schema.ids if f.multi), *(group.name for group in self.schema.sequences)]

    def _scalars(self, picked: Picked, at: Sequence[Tensor], role: str) -> dict[str, Tensor]:
        names = [name for kind, name in picked[0][0].scalars if kind == role]
        out = {}
        for name in names:
            columns = [part.scalars[role, name] for part, _ in picked]
            out[name] = self._empty(sum(i.numel() for i in at), columns[0])
            _fill(out[name], columns, at)
        return out

    def _values(self, span: "_Span", column: str) -> Tensor:
        columns = [lists.values[column] for lists in span.lists]
        out = self._empty(span.total, columns[0])
        _fill(out, columns, span.positions)
        return out

    def _ids(self, picked: Picked, at: Sequence[Tensor], spans: dict[str, "_Span"], rows: int) -> KeyedJagged:
        """All id columns, written into one tensor of values."""
        sources: dict[str, tuple[list[Tensor], Sequence[Tensor], Tensor, int]] = {}
        one_each = torch.arange(rows + 1)
        for f in self.schema.ids:
            if f.multi:
                span = spans[f.name]
                sources[f.name] = ([lists.values[f.name] for lists in span.lists], span.positions, span.offsets, span.longest)
            else:
                sources[f.name] = ([part.scalars["id", f.name] for part, _ in picked], at, one_each, min(rows, 1))
        for group in self.schema.sequences:
            span = spans[group.name]
            for f in group.ids:
                sources[f"{group.name}.{f.name}"] = ([lists.values[f.name] for lists in span.lists], span.positions, span.offsets, span.longest)
        starts = [0]
        for _, _, offsets, _ in sources.values():
            starts.append(starts[-1] + int(offsets[-1]))
        values = torch.empty(starts[-1], dtype=torch.int64, pin_memory=self.pin)
        packed = torch.zeros(len(sources) * rows + 1, dtype=torch.int64, pin_memory=self.pin)
        for i, (columns, positions, offsets, _) in enumerate(sources.values()):
            _fill(values[starts[i] : starts[i + 1]], columns, positions)
            torch.add(offsets[1:], starts[i], out=packed[i * rows + 1 : (i + 1) * rows + 1])
        return KeyedJagged(tuple(sources), values, packed, rows, tuple(starts), tuple(longest for *_, longest in sources.values()))

    def _empty(self, rows: int, like: Tensor) -> Tensor:
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, pin_memory=self.pin)

    def _pinned(self, value: Tensor) -> Tensor:
        return value.pin_memory() if self.pin else value


class _Span:
    """Where the values of the wanted rows lie in each part, and the batch's offsets."""

    def __init__(self, picked: Picked, at: Sequence[Tensor], name: str) -> None:
        self.lists = [part.lists[name] for part, _ in picked]
        lengths, self.positions = [], []
        for lists, index in zip(self.lists, at, strict=True):
            begin, length = lists.begin.index_select(0, index), lists.length.index_select(0, index)
            lengths.append(length)
            self.positions.append(_positions(begin, length))
        together = torch.cat(lengths)
        self.offsets = lengths_to_offsets(together)
        self.total = int(self.offsets[-1])
        self.longest = int(together.max()) if together.numel() else 0


def _positions(begin: Tensor, length: Tensor) -> Tensor:
    """``begin[r] .. begin[r] + length[r] - 1``, row after row."""
    ends = length.cumsum(0)
    total = int(ends[-1]) if ends.numel() else 0
    shift = torch.repeat_interleave(begin - ends + length, length, output_size=total)
    return shift.add_(torch.arange(total))


def _fill(out: Tensor, columns: Sequence[Tensor], at: Sequence[Tensor]) -> None:
    """Gather the entries ``at`` of each column into ``out``, one after the other."""
    done = 0
    for column, index in zip(columns, at, strict=True):
        torch.index_select(column, 0, index, out=out[done : done + index.numel()])
        done += index.numel()
