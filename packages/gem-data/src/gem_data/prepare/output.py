"""The columns of prepared files, and the schema that describes them."""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.spec import RequestError
from gem_data.ids import Encoder, hash_keys
from gem_data.prepare.definition import Definition
from gem_data.prepare.events import floats
from gem_data.prepare.plan import Plan
from gem_data.schema import Embedding, Id, MultiId, Number, Schema, Sequence, Task

AnyId = TypeVar("AnyId", Id, MultiId)
USER, REQUEST, TIME, REQUEST_ROW = "_user", "_request", "_time", "request_row"


def prepared_schema(plan: Plan, rows: dict[str, int]) -> Schema:
    """The schema of the prepared files: columns called as the features, ids encoded.

    Args:
        rows: rows of the embedding table of each id feature, by batch key.

    Raises:
        RequestError: two columns of the files would have one name.
    """
    schema = plan.schema
    made = Schema(
        user=USER if plan.table.user else None,
        request=REQUEST if schema.request else None,
        time=TIME if plan.table.time else None,
        id=tuple(_passed(f, rows[f.name]) for f in schema.id),
        multi_id=tuple(_passed(f, rows[f.name]) for f in schema.multi_id),
        number=tuple(Number(name=f.name) for f in schema.number),
        embedding=tuple(Embedding(name=f.name, width=f.width) for f in schema.embedding),
        sequence=tuple(
            Sequence(
                name=s.name,
                max_length=s.max_length,
                time=s.time,
                truncate=s.truncate,
                id=tuple(_passed(f, rows[f"{s.name}.{f.name}"]) for f in s.id),
                number=tuple(Number(name=f.name) for f in s.number),
            )
            for s in schema.sequence
        ),
        task=tuple(
            Task(
                name=t.name,
                label=f"label.{t.name}",
                mask=f"mask.{t.name}",
                weight=f"weight.{t.name}" if t.weight else None,
                delay=f"delay.{t.name}" if delayed(t, plan.definition) else None,
                condition=t.condition,
                loss_weight=t.loss_weight,
            )
            for t in schema.task
        ),
    )
    weights = [f.weights for f in made.multi_id if f.weights is not None]
    features = [f.name for f in (*made.id, *made.multi_id, *made.number, *made.embedding)]
    histories = [c for s in made.sequence for c in s.columns()]
    names = [USER, REQUEST, TIME, REQUEST_ROW, *weights, *features, *histories, *(c for t in made.task for c in t.columns())]
    for name in names:
        if names.count(name) > 1:
            raise RequestError("prepared files", f"two of their columns would be called {name!r}", "Rename the feature in the schema.")
    return made


def _passed(feature: AnyId, rows: int) -> AnyId:
    """The feature with ids that are rows already."""
    changed = {"encode": "pass", "rows": rows, "column": None, "min_count": 1, "unknown": "error"}
    if isinstance(feature, MultiId) and feature.weights is not None:
        changed["weights"] = f"{feature.name}.weights"
    return feature.model_copy(update=changed)


def impression_columns(schema: Schema) -> list[str]:
    """Raw columns that rows are made from, besides user, request, time, labels and histories."""
    features = [f.column or f.name for f in (*schema.id, *schema.multi_id, *schema.number, *schema.embedding)]
    weights = [f.weights for f in schema.multi_id if f.weights is not None]
    return list(dict.fromkeys([*features, *weights, *(t.weight for t in schema.task if t.weight is not None)]))


def delayed(task: Task, definition: Definition) -> bool:
    """Whether the files tell how long after the impression the positive event came."""
    return task.delay is not None or task.name in {c.task for c in definition.conversions}


def row_columns(plan: Plan, encode: dict[str, Encoder], batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    """``(name, values)`` of everything in a prepared row but its histories, from a batch of ``final_rows``."""
    schema = plan.schema
    if plan.table.user:
        yield USER, whole_numbers(batch.column("gem_user"))
    if schema.request:
        yield REQUEST, whole_numbers(batch.column("gem_request"))
    if plan.table.time:
        yield TIME, batch.column("gem_time")
    for k, task in enumerate(schema.task):
        yield f"label.{task.name}", batch.column(f"gem_label_{k}").cast(pa.int8())
        yield f"mask.{task.name}", batch.column(f"gem_mask_{k}").cast(pa.bool_())
        if task.weight is not None:
            yield f"weight.{task.name}", _weights(task, batch.column(task.weight))
        if delayed(task, plan.definition):
            yield f"delay.{task.name}", _delays(task, batch.column(f"gem_delay_{k}"))
    for one in schema.id:
        yield one.name, pa.array(encode[one.name].encode(batch.column(one.column or one.name)))
    for many in schema.multi_id:
        yield from _multi(many, encode[many.name], batch)
    for number in schema.number:
        yield number.name, pa.array(floats(number.name, batch.column(number.column or number.name)))
    for embedding in schema.embedding:
        yield embedding.name, _embedding(embedding, batch.column(embedding.column or embedding.name))


def whole_numbers(values: pa.Array) -> pa.Array:
    """Users and requests as int64, which groups of a batch are: integers as they are, others by their stable hash."""
    if pa.types.is_integer(values.type) and values.type != pa.uint64():
        return values.cast(pa.int64())
    filled = values.cast(pa.large_string()).fill_null("")
    keys = hash_keys(filled).view(np.int64)
    return pa.array(keys, mask=~np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False)))


def _weights(task: Task, values: pa.Array) -> pa.Array:
    numbers = values.cast(pa.float32())
    if numbers.null_count or not pc.all(pc.is_finite(numbers), min_count=0).as_py():
        raise RequestError(f"weight of task {task.name!r}", f"column {task.weight!r} has missing or infinite values", "Give every row a weight.")
    return numbers


def _delays(task: Task, values: pa.Array) -> pa.Array:
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid as error:
        so = f"column {task.delay!r} holds what is no whole number of seconds ({error})"
        raise RequestError(f"delay of task {task.name!r}", so, "Give whole seconds, or nothing.") from error


def _multi(feature: MultiId, encoder: Encoder, batch: pa.RecordBatch) -> Iterator[tuple[str, pa.Array]]:
    values = batch.column(feature.column or feature.name)
    lengths = list_lengths(feature.name, values)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    yield feature.name, pa.ListArray.from_arrays(offsets, pa.array(encoder.encode(values.flatten())))
    if feature.weights is not None:
        weights = batch.column(feature.weights)
        differ = np.flatnonzero(list_lengths(feature.weights, weights) != lengths)
        if differ.size:
            row = batch.column("gem_row")[int(differ[0])].as_py()
            raise RequestError(f"weights of {feature.name!r}", f"row {row} has another number of ids", "Give as many weights as ids.")
        yield f"{feature.name}.weights", pa.ListArray.from_arrays(offsets, pa.array(floats(feature.weights, weights.flatten())))


def list_lengths(name: str, values: pa.Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``[rows]`` lengths; a missing list is empty."""
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type)):
        raise RequestError(f"feature {name!r}", f"its column holds {values.type}", "Give a list column.")
    return np.asarray(pc.fill_null(pc.list_value_length(values), 0).to_numpy(zero_copy_only=False)).astype(np.int64)


def _embedding(feature: Embedding, values: pa.Array) -> pa.Array:
    lengths = list_lengths(feature.name, values)
    wrong = np.flatnonzero((lengths != feature.width) & np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False)))
    if wrong.size:
        so = f"a row has {lengths[wrong[0]]} numbers, and the width is {feature.width}"
        raise RequestError(f"embedding {feature.name!r}", so, "Give every row that many, or none.")
    full = np.zeros((lengths.size, feature.width), np.float32)
    full[lengths > 0] = floats(feature.name, values.flatten()).reshape(-1, feature.width)
    return pa.FixedSizeListArray.from_arrays(pa.array(full.reshape(-1)), feature.width)
