"""Batches gathered from decoded parts: one copy of each value, straight into the batch's packed tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged
from gem_core.spec import DataSchema
from gem_data.feed.part import WEIGHTS, Column, Ints, Picked

DTYPES = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


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
        at = [rows for _, rows in picked]
        rows = sum(index.size for index in at)
        spans = {name: _Span(picked, name) for name in self._list_names()}
        roles = {role: self._scalars(picked, at, role) for role in ("dense", "label", "mask", "weight", "row")}
        groups = self.schema.sequences
        return Batch(
            rows=rows,
            ids=self._ids(picked, at, spans, rows),
            labels=roles["label"],
            dense={f.name: roles["dense"][f.name] for f in self.schema.dense},
            event_dense={f"{g.name}.{f.name}": self._values(spans[g.name], f.name)[:, None] for g in groups for f in g.dense},
            event_time={g.name: self._values(spans[g.name], self.times[g.name]) for g in groups if g.time},
            event_offsets={g.name: Jagged(torch.empty(0), self._offsets(spans[g.name]), spans[g.name].longest) for g in groups},
            masks=roles["mask"],
            weights=roles["weight"],
            time=roles["row"].get("time"),
            groups=roles["row"].get("group"),
            global_rows=global_rows,
            id_weights={f.name: self._values(spans[f.name], WEIGHTS) for f in self.schema.ids if f.weighted},
            origin=torch.from_numpy(np.concatenate([part.origin[index] for part, index in picked])),
        )

    def _list_names(self) -> list[str]:
        return [*(f.name for f in self.schema.ids if f.multi), *(group.name for group in self.schema.sequences)]

    def _scalars(self, picked: Picked, at: Sequence[Ints], role: str) -> dict[str, Tensor]:
        names = [name for kind, name in picked[0][0].scalars if kind == role]
        out = {}
        for name in names:
            columns = [part.scalars[role, name] for part, _ in picked]
            out[name] = self._empty(sum(index.size for index in at), columns[0])
            _fill(out[name], columns, at)
        return out

    def _values(self, span: "_Span", column: str) -> Tensor:
        columns = [lists.values[column] for lists in span.lists]
        out = self._empty(span.total, columns[0])
        _fill(out, columns, span.positions)
        return out

    def _ids(self, picked: Picked, at: Sequence[Ints], spans: dict[str, "_Span"], rows: int) -> KeyedJagged:
        """All id columns, written into one tensor of values."""
        sources: dict[str, tuple[list[Column], Sequence[Ints], Ints, int]] = {}
        one_each = np.arange(rows + 1)
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
            np.add(offsets[1:], starts[i], out=packed.numpy()[i * rows + 1 : (i + 1) * rows + 1])
        return KeyedJagged(tuple(sources), values, packed, rows, tuple(starts), tuple(longest for *_, longest in sources.values()))

    def _empty(self, rows: int, like: Column) -> Tensor:
        return torch.empty((rows, *like.shape[1:]), dtype=DTYPES[like.dtype.name], pin_memory=self.pin)

    def _offsets(self, span: "_Span") -> Tensor:
        offsets = torch.from_numpy(span.offsets)
        return offsets.pin_memory() if self.pin else offsets


class _Span:
    """Where the values of the wanted rows lie in each part, and the batch's offsets."""

    def __init__(self, picked: Picked, name: str) -> None:
        self.lists = [part.lists[name] for part, _ in picked]
        begins = [lists.begin[rows] for lists, (_, rows) in zip(self.lists, picked, strict=True)]
        lengths = [lists.length[rows] for lists, (_, rows) in zip(self.lists, picked, strict=True)]
        self.positions = [_positions(begin, length) for begin, length in zip(begins, lengths, strict=True)]
        together = np.concatenate(lengths)
        self.offsets = np.concatenate([[0], np.cumsum(together)])
        self.total = int(self.offsets[-1])
        self.longest = int(together.max(initial=0))


def _positions(begin: Ints, length: Ints) -> Ints:
    """``begin[r] .. begin[r] + length[r] - 1``, row after row."""
    out = np.repeat(begin - np.cumsum(length) + length, length)
    out += np.arange(out.size)
    return out


def _fill(out: Tensor, columns: Sequence[Column], at: Sequence[Ints]) -> None:
    """Gather the entries ``at`` of each column into ``out``, one after the other."""
    done, memory = 0, out.numpy()
    for column, index in zip(columns, at, strict=True):
        if index.size:  # positions were checked with the offsets; numpy's "raise" would copy first, for nothing
            np.take(column, index, axis=0, out=memory[done : done + index.size], mode="clip")
        done += index.size
