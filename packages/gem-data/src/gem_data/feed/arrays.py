"""Arrow arrays as numpy arrays over the same memory, checked: list offsets, numbers, times. Bad values are named by file, unit and row."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.feed.units import Place

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def spans(name: str, column: pa.Array, place: Place) -> tuple[Ints, Ints, pa.Array]:
    """Where each row's values begin, how many there are, and the values; a null list is empty. Nothing is copied but offsets of 32 bits.

    Raises:
        RequestError: the column holds no lists, or its offsets are negative, fall, or run past its values.
    """
    if not is_list(column.type):
        raise RequestError(f"column {name!r} of {place.file}", f"it holds {column.type}", "Give a list column, or declare the feature otherwise.")
    if pa.types.is_fixed_size_list(column.type):
        width = column.type.list_size
        begin, length = (np.arange(len(column)) + column.offset) * width, np.full(len(column), width)
    else:
        offsets = column.offsets.to_numpy(zero_copy_only=True).astype(np.int64, copy=False)
        begin, length = offsets[:-1], np.diff(offsets)
        _check_offsets(name, offsets, len(column.values), place)
    if column.null_count:
        length = np.where(np.asarray(column.is_valid().to_numpy(zero_copy_only=False)), length, 0)
    return begin, length, column.values


def _check_offsets(name: str, offsets: Ints, total: int, place: Place) -> None:
    asked, do = f"list column {name!r}", "The file is damaged; write it again."
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if falls.size:
        row = int(falls[0])
        raise RequestError(asked, f"offsets fall from {offsets[row]} to {offsets[row + 1]} at {place.row(row)}", do)
    if offsets.size and offsets[0] < 0:
        raise RequestError(asked, f"the first offset is {offsets[0]} at {place.row(0)}", do)
    if offsets.size and offsets[-1] > total:
        row = int(np.searchsorted(offsets, total, "right")) - 1
        raise RequestError(asked, f"last offset {offsets[-1]} but {total} values; {place.row(row)} runs past them", do)


def owner(position: int, begin: Ints, length: Ints) -> int:
    """The first row that owns a position among the values; -1 for none."""
    rows = np.flatnonzero((begin <= position) & (position < begin + length))
    return int(rows[0]) if rows.size else -1


def numbers(name: str, array: pa.Array, place: Place, rows: tuple[Ints, Ints] | None = None) -> Floats:
    """``[values]`` float32 of a column of numbers; ``rows`` are begins and lengths where it holds the values of lists.

    Raises:
        RequestError: a value is missing or not finite, or the column holds no numbers.
    """
    kind = array.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_decimal(kind)):
        raise RequestError(f"number {name!r} of {place.file}", f"it holds {kind}", "Give a column of numbers.")
    # Missing values become NaN, so that one look finds both faults.
    plain = array if pa.types.is_float32(array.type) else array.cast(pa.float32(), safe=False)
    values = plain.to_numpy(zero_copy_only=False)
    if values.size and not np.isfinite(values.sum(dtype=np.float64)):
        for at in np.flatnonzero(~np.isfinite(values)).tolist():
            row = at if rows is None else owner(at, *rows)
            if row >= 0:
                do = "Replace missing numbers, and say so in a column of their own."
                raise RequestError(f"number {name!r}", f"it is {values[at]} at {place.row(row)}", do)
    return np.asarray(values)


def seconds(name: str, array: pa.Array, place: Place) -> Ints:
    """``[values]`` int64 seconds of a column of integers (seconds) or timestamps.

    Raises:
        RequestError: a time is missing, or the column holds no times.
    """
    if pa.types.is_timestamp(array.type):
        array = pc.floor_temporal(array, unit="second").cast(pa.timestamp("s", array.type.tz), safe=False).cast(pa.int64())
    return integers(name, array, place)


def integers(name: str, array: pa.Array, place: Place) -> Ints:
    """``[values]`` int64; RequestError where a value is missing or the column holds no integers."""
    if not pa.types.is_integer(array.type):
        raise RequestError(f"column {name!r} of {place.file}", f"it holds {array.type}", "Give integers; times as seconds or timestamps.")
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise RequestError(f"column {name!r}", f"its value {row} is missing in {place.file}, {place.kind} {place.unit}", "Fill it in.")
    return np.asarray(array.cast(pa.int64()).to_numpy(zero_copy_only=False))
