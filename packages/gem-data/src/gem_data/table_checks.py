"""Checks that the columns of a table are what its schema says, made once, before the first batch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gem_core.spec import DataSchema, RequestError

if TYPE_CHECKING:
    from gem_data.collate import Events, Spans, Table


def check_columns(table: "Table") -> None:
    """Raise RequestError for the first column that does not fit the table's schema."""
    schema, rows = table.schema, table.rows
    _check_shares(schema)
    _check_names("id features", table.ids, (f.name for f in schema.ids if not f.multi))
    _check_names("multi-valued id features", table.multi, (f.name for f in schema.ids if f.multi))
    _check_names("dense features", table.dense, (f.name for f in schema.dense))
    _check_names("history groups", table.events, (s.name for s in schema.sequences))
    _check_names("labels", table.labels, (t.name for t in schema.tasks))
    for feature in schema.ids:
        if feature.multi:
            column = table.multi[feature.name]
            _check_ids(feature.name, column.values, feature.cardinality)
            _check_spans(feature.name, column.spans, rows, column.values.numel())
        else:
            _check_shape(feature.name, table.ids[feature.name], (rows,), torch.int64)
            _check_ids(feature.name, table.ids[feature.name], feature.cardinality)
    for dense in schema.dense:
        _check_dense(dense.name, table.dense[dense.name], (rows, dense.width))
    if table.time is not None:  # before the histories, whose events are compared with it
        _check_shape("time", table.time, (rows,), torch.int64)
    for name, events in table.events.items():
        _check_events(name, events, table)
    _check_labels(table)
    if schema.group != (table.groups is not None):
        raise RequestError("column 'groups'", "the schema and the table differ on whether rows have one", "Give both or neither.")
    if table.groups is not None:
        _check_shape("groups", table.groups, (rows,), torch.int64)


def _check_shares(schema: DataSchema) -> None:
    """Raise RequestError where two features share a table but not its number of rows."""
    sizes: dict[str, int] = {}
    for key, feature in schema.all_id_features().items():
        known = sizes.setdefault(feature.table_name, feature.cardinality)
        if known != feature.cardinality:
            so = f"{key!r} wants {feature.cardinality} rows and another feature wants {known}"
            raise RequestError(f"table {feature.table_name!r}", so, "Give features of one table one cardinality.")


def _check_names(what: str, have: Mapping[str, object], want: Iterable[str]) -> None:
    wanted = set(want)
    missing, extra = sorted(wanted - set(have)), sorted(set(have) - wanted)
    if missing or extra:
        raise RequestError(f"{what} of the table", f"missing {missing}, left over {extra}", "Give one column for each feature of the schema.")


def _check_shape(name: str, column: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(column.shape) != shape or column.dtype != dtype:
        so = f"it is {column.dtype} of shape {list(column.shape)}"
        raise RequestError(f"column {name!r}", so, f"Give {dtype} of shape {list(shape)}.")


def _check_ids(name: str, values: Tensor, cardinality: int) -> None:
    if values.dtype != torch.int64:
        raise RequestError(f"ids of {name!r}", f"they are {values.dtype}", "Give int64 ids.")
    bad = ((values < 0) | (values >= cardinality)).nonzero()
    if bad.numel():
        at = int(bad[0])
        so = f"id {int(values[at])} at index {at} lies outside 0 .. {cardinality - 1}"
        raise RequestError(f"ids of {name!r}", so, "Map ids that the table does not hold to row 0.")


def _check_dense(name: str, column: Tensor, shape: tuple[int, int]) -> None:
    _check_shape(name, column, shape, torch.float32)
    bad = (~torch.isfinite(column)).nonzero()
    if bad.numel():
        raise RequestError(
            f"dense feature {name!r}", f"row {int(bad[0, 0])} is not finite", "Replace missing numbers and say so in a column of their own."
        )


def _check_spans(name: str, spans: "Spans", rows: int, total: int) -> None:
    _check_shape(f"{name} (begin)", spans.begin, (rows,), torch.int64)
    _check_shape(f"{name} (end)", spans.end, (rows,), torch.int64)
    bad = ((spans.begin < 0) | (spans.end < spans.begin) | (spans.end > total)).nonzero()
    if bad.numel():
        at = int(bad[0])
        so = f"row {at} owns {int(spans.begin[at])}:{int(spans.end[at])} of {total} values"
        raise RequestError(f"column {name!r}", so, "Give spans inside the column.")


def _check_events(name: str, events: "Events", table: "Table") -> None:
    group = table.schema.sequence(name)
    _check_names(f"id columns of {name!r}", events.ids, (f.name for f in group.ids))
    _check_names(f"dense columns of {name!r}", events.dense, (f.name for f in group.dense))
    if group.time != (events.time is not None):
        raise RequestError(f"history {name!r}", "the schema and the table differ on whether events have a time", "Give both or neither.")
    sizes = {column.shape[0] for column in (*events.ids.values(), *events.dense.values())} | (
        {events.time.numel()} if events.time is not None else set()
    )
    if len(sizes) != 1:
        raise RequestError(f"history {name!r}", f"its columns hold {sorted(sizes)} events", "Give aligned columns.")
    total = sizes.pop()
    for feature in group.ids:
        _check_ids(f"{name}.{feature.name}", events.ids[feature.name], feature.cardinality)
    for dense in group.dense:
        _check_dense(f"{name}.{dense.name}", events.dense[dense.name], (total, dense.width))
    _check_spans(name, events.spans, table.rows, total)
    longest = int((events.spans.end - events.spans.begin).max()) if table.rows else 0
    if longest > group.max_length:
        raise RequestError(f"history {name!r}", f"a row has {longest} events", f"Keep the last {group.max_length}, as the schema says.")
    if events.time is not None:
        _check_shape(f"{name} (time)", events.time, (total,), torch.int64)
        _check_event_times(name, events.time, events.spans, table.time)


def _check_event_times(name: str, time: Tensor, spans: "Spans", now: Tensor | None) -> None:
    """Events of a history never go back in time, and none is later than its impression."""
    rows = (spans.end > spans.begin).nonzero().squeeze(1)
    if not rows.numel():
        return
    begin, last = spans.begin[rows], spans.end[rows] - 1
    falls = torch.cat([torch.zeros(1, dtype=torch.int64), (time.diff() < 0).cumsum(0)])
    back = (falls[last] > falls[begin]).nonzero()
    if back.numel():
        raise RequestError(f"history {name!r}", f"row {int(rows[back[0]])} goes back in time", "Sort events by time, oldest first.")
    late = (time[last] > now[rows]).nonzero() if now is not None else torch.empty(0)
    if late.numel():
        raise RequestError(f"history {name!r}", f"row {int(rows[late[0]])} holds an event from after the impression", "Keep earlier events only.")


def _check_labels(table: "Table") -> None:
    for kind, columns, dtype in (("label", table.labels, torch.float32), ("mask", table.masks, torch.bool), ("weight", table.weights, torch.float32)):
        for task, column in columns.items():
            if task not in table.labels:
                raise RequestError(f"{kind} of {task!r}", f"the tasks are {sorted(table.labels)}", "Name a task of the schema.")
            _check_shape(f"{kind} of {task}", column, (table.rows,), dtype)
    for task, label in table.labels.items():
        seen = label if task not in table.masks else label[table.masks[task]]
        bad = ((seen != 0) & (seen != 1)).nonzero()
        if bad.numel():
            raise RequestError(f"label {task!r}", f"it holds {float(seen[int(bad[0])])}", "Labels are 0 or 1; mask out rows whose label is unknown.")
    for task, weight in table.weights.items():
        if not bool(torch.isfinite(weight).all()) or bool((weight < 0).any()):
            raise RequestError(f"weight of {task!r}", "it holds a negative or non-finite value", "Weights are finite and not negative.")
