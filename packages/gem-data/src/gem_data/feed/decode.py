"""Units decoded by their schema: Arrow columns in, a ``Part`` out, every value checked once."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gem_core.spec import RequestError
from gem_data.feed.arrays import Floats, integers, numbers, owner, seconds, spans
from gem_data.feed.part import WEIGHTS, Column, Ints, Lists, Part
from gem_data.feed.units import Place
from gem_data.ids import Encoder, hash_keys
from gem_data.schema import Embedding, Id, MultiId, Schema, Sequence, Task

Convert = Callable[[str, pa.Array, Place, tuple[Ints, Ints]], Column]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a unit.

    Args:
        rows: rows of the unit.
        own: columns with one entry a row.
        shared: columns with one entry a request.
        request: ``[rows]`` the entry of each row in ``shared``.
    """

    rows: int
    own: Mapping[str, pa.Array]
    shared: Mapping[str, pa.Array]
    request: Ints

    def spread(self, name: str) -> tuple[pa.Array, Ints | None]:
        """A column, and the entry of each row in it (None: the row's own)."""
        return (self.own[name], None) if name in self.own else (self.shared[name], self.request)


class Decoder:
    """Decodes units of one split.

    Args:
        schema: what the columns mean.
        encoders: by batch key; their counters run.
    """

    def __init__(self, schema: Schema, encoders: Mapping[str, Encoder]) -> None:
        self.schema, self.encoders = schema, encoders

    def decode(self, columns: Columns, place: Place, first: int) -> Part:
        """All rows of a unit whose first row is row ``first`` of the split.

        Raises:
            RequestError: a value that the schema rules out, named by file, unit and row.
        """
        scalars = {name: values if column in columns.own else values[columns.request] for name, column, values in self._scalars(columns, place)}
        lists = {feature.name: self._multi(columns, feature, place) for feature in self.schema.multi_id}
        lists |= {group.name: self._sequence(columns, group, place) for group in self.schema.sequence}
        lengths = [lists[group.name].length for group in self.schema.sequence]
        return Part(
            np.arange(first, first + columns.rows),
            scalars,
            lists,
            sum(lengths, np.zeros(columns.rows, np.int64)),
            sum((length * length for length in lengths), np.zeros(columns.rows, np.int64)),
        )

    def _scalars(self, columns: Columns, place: Place) -> Iterator[tuple[tuple[str, str], str, Column]]:
        """``(name in the part, column, values)`` of all columns that hold one value a row."""
        schema = self.schema

        def of(column: str) -> pa.Array:
            return columns.spread(column)[0]

        for feature in schema.id:
            column = feature.column or feature.name
            yield ("id", feature.name), column, _encode(self.encoders[feature.name], feature, of(column), place)
        for number in schema.number:
            column = number.column or number.name
            yield ("dense", number.name), column, numbers(number.name, of(column), place)[:, None]
        for vector in schema.embedding:
            column = vector.column or vector.name
            yield ("dense", vector.name), column, _vectors(vector, of(column), place)
        for task in schema.task:
            for role, column, tensor in _task(task, of, place):
                yield (role, task.name), column, tensor
        if schema.time is not None:
            yield ("row", "time"), schema.time, seconds(schema.time, of(schema.time), place)
        group = schema.user or schema.request
        if group is not None:
            yield ("row", "group"), group, _groups(group, of(group), place)

    def _multi(self, columns: Columns, feature: MultiId, place: Place) -> Lists:
        names = {feature.name: feature.column or feature.name} | ({WEIGHTS: feature.weights} if feature.weights else {})
        convert: dict[str, Convert] = {feature.name: self._ids(feature.name, feature), WEIGHTS: _weights}
        return self._lists(columns, feature.name, names, convert, place)

    def _sequence(self, columns: Columns, group: Sequence, place: Place) -> Lists:
        names = {f.name: group.column_of(f) for f in (*group.id, *group.number)}
        convert: dict[str, Convert] = {f.name: self._ids(f"{group.name}.{f.name}", f) for f in group.id}
        convert |= {f.name: numbers for f in group.number}
        if group.time is not None and group.time_source is not None:
            names[group.time], convert[group.time] = group.time_source, _seconds
        lists = self._lists(columns, group.name, names, convert, place)
        return _truncated(lists, group, place)

    def _ids(self, key: str, feature: Id) -> Convert:
        encoder = self.encoders[key]
        return lambda name, array, place, rows: _encode(encoder, feature, array, place)

    def _lists(self, columns: Columns, group: str, names: Mapping[str, str], convert: Mapping[str, Convert], place: Place) -> Lists:
        """Aligned list columns, each converted once over all values that its rows own."""
        known: tuple[str, Ints, Ints] | None = None
        values: dict[str, Column] = {}
        own = [column for column in names.values() if column in columns.own]
        if 0 < len(own) < len(names):
            so = f"{place.file} holds only {', '.join(own)} of them; the others stand in its file of requests"
            raise RequestError(f"aligned columns of {group!r}", so, "Keep the columns of a group in one file.")
        for name, column in names.items():
            array, request = columns.spread(column)
            begin, length, child = spans(column, array, place)
            low = int(begin[0]) if begin.size else 0
            high = int((begin + length).max()) if begin.size else 0
            begin, child = begin - low, child.slice(low, max(high - low, 0))
            if known is not None and not (np.array_equal(known[1], begin) and np.array_equal(known[2], length)):
                begin, child = _aligned(group, known, (column, begin, length), child, place)
            known = known or (column, begin, length)
            values[name] = convert[name](column, child, place, (begin, length))
        assert known is not None  # the schema refuses a group without columns
        _, begin, length = known
        return Lists(begin, length, values) if request is None else Lists(begin[request], length[request], values)


def _encode(encoder: Encoder, feature: Id, array: pa.Array, place: Place) -> Ints:
    """Rows of the feature's table. Ids that are rows already stay where they are: one look at the largest, taken without sign, tells."""
    if feature.encode == "pass" and pa.types.is_int64(array.type) and not array.null_count:
        values: Ints = array.to_numpy(zero_copy_only=True)
        if not values.size or int(values.view(np.uint64).max()) < encoder.cardinality:
            return values
    try:
        return encoder.encode(array)
    except RequestError as error:
        raise RequestError(error.asked, f"{error.so} ({place.file}, {place.kind} {place.unit})", error.do) from error


def _aligned(group: str, known: tuple[str, Ints, Ints], other: tuple[str, Ints, Ints], child: pa.Array, place: Place) -> tuple[Ints, pa.Array]:
    """Values of a column whose rows are as long but lie elsewhere (around null lists), moved to where the first column's are."""
    (first, begin, length), (second, other_begin, other_length) = known, other
    differ = np.flatnonzero(length != other_length)
    if differ.size:
        row = int(differ[0])
        so = f"{place.row(row)} has {length[row]} values of {first!r} and {other_length[row]} of {second!r}"
        raise RequestError(f"aligned columns of {group!r}", so, "Give every column of the group one value an event.")
    if not len(child):
        return begin, child
    at = np.zeros(int((begin + length).max()) if begin.size else 0, np.int64)
    within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    at[np.repeat(begin, length) + within] = np.repeat(other_begin, length) + within
    return begin, child.take(pa.array(at))


def _truncated(lists: Lists, group: Sequence, place: Place) -> Lists:
    """At most ``max_length`` events a row, by the group's policy; nothing is moved."""
    excess = np.maximum(lists.length - group.max_length, 0)
    if not excess.any():
        return lists
    if group.truncate == "error":
        row = int(np.flatnonzero(excess)[0])
        so = f"{place.row(row)} has {lists.length[row]} events, max_length is {group.max_length}"
        raise RequestError(f"sequence {group.name!r}", so, "Raise max_length, or set truncate to newest or oldest.")
    begin = lists.begin + excess if group.truncate == "newest" else lists.begin  # the oldest event comes first
    return Lists(begin, lists.length - excess, lists.values)


def _vectors(feature: Embedding, array: pa.Array, place: Place) -> Floats:
    name = feature.column or feature.name
    begin, length, child = spans(name, array, place)
    wrong = np.flatnonzero(length != feature.width)
    if wrong.size:
        row = int(wrong[0])
        raise RequestError(f"embedding {feature.name!r}", f"{place.row(row)} has {length[row]} values", f"Give {feature.width}, as the schema says.")
    low = int(begin[0]) if begin.size else 0
    if begin.size and not np.array_equal(begin, low + np.arange(begin.size) * feature.width):
        child, low = child.take(pa.array((begin[:, None] + np.arange(feature.width)).ravel())), 0
        begin = np.arange(begin.size) * feature.width
    flat = numbers(name, child.slice(low, begin.size * feature.width), place, (begin - low, length))
    return flat.reshape(begin.size, feature.width)


def _task(task: Task, of: Callable[[str], pa.Array], place: Place) -> Iterator[tuple[str, str, Column]]:
    """``(role, column, values)`` of a task's label, mask and weight; labels are checked where they are observed."""
    array = of(task.label)
    if task.mask is not None:
        mask = of(task.mask)
        if not (pa.types.is_boolean(mask.type) or pa.types.is_integer(mask.type)):
            raise RequestError(f"mask {task.mask!r} of {place.file}", f"it holds {mask.type}", "Give booleans, true where the label is observed.")
        shown = mask.cast(pa.bool_()).fill_null(False)
        yield "mask", task.mask, shown.to_numpy(zero_copy_only=False)
        array = pc.if_else(shown, array, pa.scalar(0, array.type))  # a label means nothing where it is masked out
    label = numbers(task.label, array, place)
    wrong = np.flatnonzero((label != 0) & (label != 1))
    if wrong.size:
        row = int(wrong[0])
        raise RequestError(f"label {task.label!r}", f"it is {float(label[row])} at {place.row(row)}", "Labels are 0 or 1; mask unknown ones.")
    yield "label", task.label, label
    if task.weight is not None:
        yield "weight", task.weight, _not_negative(task.weight, numbers(task.weight, of(task.weight), place), place, None)


def _weights(name: str, array: pa.Array, place: Place, rows: tuple[Ints, Ints]) -> Floats:
    return _not_negative(name, numbers(name, array, place, rows), place, rows)


def _not_negative(name: str, values: Floats, place: Place, rows: tuple[Ints, Ints] | None) -> Floats:
    wrong = np.flatnonzero(values < 0)
    if wrong.size:
        at = int(wrong[0])
        row = at if rows is None else owner(at, *rows)
        raise RequestError(f"weight {name!r}", f"it is {float(values[at])} at {place.row(row)}", "Weights are not negative.")
    return values


def _seconds(name: str, array: pa.Array, place: Place, rows: tuple[Ints, Ints]) -> Ints:
    return seconds(name, array, place)


def _groups(name: str, array: pa.Array, place: Place) -> Ints:
    """Integers as they are; texts by their stable 64-bit hash."""
    if pa.types.is_integer(array.type):
        return integers(name, array, place)
    text = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    if not (pa.types.is_string(text.type) or pa.types.is_large_string(text.type)):
        raise RequestError(f"column {name!r} of {place.file}", f"it holds {text.type}", "Users and requests are integers or strings.")
    return hash_keys(text.cast(pa.large_string()).fill_null("")).view(np.int64)
