"""Rows held as columns, and the gather that makes a batch of any of them without a loop over rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged, check_offsets, lengths_to_offsets, range_index
from gem_core.spec import DataSchema, RequestError
from gem_data.table_checks import check_columns


@dataclass(frozen=True, kw_only=True)
class Spans:
    """For each row the part ``begin[r]:end[r]`` of a packed column that it owns; ``[rows]`` int64. Parts may overlap: histories of one user do."""

    begin: Tensor
    end: Tensor

    @classmethod
    def packed(cls, total: int, what: str, *, lengths: Tensor | None = None, offsets: Tensor | None = None) -> Self:
        """Rows that lie one after the other and cover ``total`` values, by their lengths, their offsets, or both.

        Raises:
            RequestError: a length is negative, offsets do not run from 0 to ``total`` without falling, or lengths and offsets disagree.
        """
        if lengths is not None:
            running = lengths_to_offsets(lengths)
            if offsets is not None and not torch.equal(running, offsets):
                raise RequestError(f"column {what!r}", "its lengths and offsets disagree", "Give one of them, or two that agree.")
            offsets = running
        if offsets is None:
            raise RequestError(f"column {what!r}", "it has neither lengths nor offsets", "Give one of them.")
        check_offsets(offsets, total, what)
        return cls(begin=offsets[:-1], end=offsets[1:])

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, int]:
        """Positions of the chosen rows' values, their packed offsets ``[rows + 1]`` and the longest length."""
        begin = self.begin.index_select(0, index)
        lengths = self.end.index_select(0, index) - begin
        positions, offsets = range_index(begin, lengths)
        return positions, offsets, int(lengths.max()) if lengths.numel() else 0


@dataclass(frozen=True, kw_only=True)
class MultiIds:
    """A multi-valued id column: ``values`` ``[total]`` int64 and the span of each row."""

    values: Tensor
    spans: Spans


@dataclass(frozen=True, kw_only=True)
class Events:
    """The event columns of one history group, shared by all rows: one entry an event, and the span of each row's history, oldest event first."""

    spans: Spans
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    time: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a data set in memory.

    Args:
        schema: what the columns mean.
        rows: number of rows.
        ids: ``{feature: [rows]}`` int64, the single-valued id features.
        multi: the multi-valued ones.
        dense: ``{feature: [rows, width]}`` float32.
        events: one entry for each history group.
        labels: ``{task: [rows]}`` float32.
        masks: ``{task: [rows]}`` bool, True where the label is observed.
        weights: ``{task: [rows]}`` float32.
        time: ``[rows]`` int64 seconds.
        groups: ``[rows]`` int64.

    Raises:
        RequestError: a column is missing, left over, of the wrong shape or dtype, or holds values that the schema rules out.
    """

    schema: DataSchema
    rows: int
    labels: Mapping[str, Tensor]
    ids: Mapping[str, Tensor] = field(default_factory=dict)
    multi: Mapping[str, MultiIds] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)
    events: Mapping[str, Events] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    time: Tensor | None = None
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        check_columns(self)

    def batch(self, index: Tensor, global_rows: int | None = None) -> Batch:
        """The rows ``index`` ``[n]`` int64, in that order; ``global_rows`` defaults to ``n``."""
        rows = index.numel()
        columns = self._id_columns(index)
        event_dense: dict[str, Tensor] = {}
        event_time: dict[str, Tensor] = {}
        event_offsets: dict[str, Jagged] = {}
        for name, events in self.events.items():
            at, offsets, longest = events.spans.take(index)
            columns |= {f"{name}.{key}": Jagged(values, offsets, longest) for key, values in _take(events.ids, at).items()}
            event_dense |= {f"{name}.{key}": values for key, values in _take(events.dense, at).items()}
            if events.time is not None:
                event_time[name] = events.time.index_select(0, at)
            event_offsets[name] = Jagged(torch.empty(0), offsets, longest)
        return Batch(
            rows=rows,
            ids=KeyedJagged.from_columns({key: columns[key] for key in self.schema.all_id_features()}, rows),
            labels=_take(self.labels, index),
            dense=_take(self.dense, index),
            event_dense=event_dense,
            event_time=event_time,
            event_offsets=event_offsets,
            masks=_take(self.masks, index),
            weights=_take(self.weights, index),
            time=None if self.time is None else self.time.index_select(0, index),
            groups=None if self.groups is None else self.groups.index_select(0, index),
            global_rows=rows if global_rows is None else global_rows,
        )

    def _id_columns(self, index: Tensor) -> dict[str, Jagged]:
        rows = index.numel()
        one_each = torch.arange(rows + 1)
        columns = {key: Jagged(values, one_each, min(rows, 1)) for key, values in _take(self.ids, index).items()}
        for key, column in self.multi.items():
            at, offsets, longest = column.spans.take(index)
            columns[key] = Jagged(column.values.index_select(0, at), offsets, longest)
        return columns


def _take(columns: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    # index_select is several times faster here than indexing with brackets.
    return {key: column.index_select(0, index) for key, column in columns.items()}
