"""Raw tables of any format as Parquet files with the columns that a preparation needs, in the types that every engine reads alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem_core.spec import RequestError
from gem_data.formats import scan
from gem_data.formats.files import locate
from gem_data.ids.values import is_text
from gem_data.prepare.definition import Table
from gem_data.prepare.kept import forget, keep, kept, made_from

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
LATEST = 10**12
"""Seconds, some 30,000 years. In nanoseconds int64 ends before."""
SCAN_KEYS = set(signature(scan).parameters) - {"paths", "columns"}


@dataclass(frozen=True)
class Staged:
    """A staged table.

    Args:
        path: Parquet file with the asked columns, ``gem_row`` (int64, place of the row in the raw files, from 0), ``gem_user``, ``gem_time``
            (int64, whole seconds) and ``gem_order`` (int64, the time in its own unit). Without a user column users are missing, without a time
            column rows stand for times.
        rows: rows in it, as many as were read from the raw files.
        dropped: lines that could not be read as rows, by reason; only where ``bad_lines = "drop"`` asks for it.
        taken_over: an earlier run had read it already.
    """

    path: Path
    rows: int
    dropped: dict[str, int]
    schema: pa.Schema
    taken_over: bool = False


def stage(name: str, table: Table, columns: Sequence[str], folder: Path, to: Path) -> Staged:
    """Read the raw files once, keep every row, and write ``to/NAME.parquet``, unless an earlier run has done so from the same files.

    Args:
        columns: raw columns to keep besides user and time.
        folder: the folder that paths in the definition start from.

    Raises:
        RequestError: a file or a column is missing, files of one table have columns of different types, or a time is no number.
    """
    wanted = list(dict.fromkeys(c for c in (*columns, table.user, table.time) if c is not None))
    strange = sorted(set(table.scan) - SCAN_KEYS)
    if strange:
        raise RequestError(f"table {name!r}", f"scan.{strange[0]} is no argument of scan", f"The arguments are {', '.join(sorted(SCAN_KEYS))}.")
    path, total = to / f"{name}.parquet", 0
    source = made_from(table, columns, locate(table.files(folder)))
    before = kept(path, source)
    if before is not None:
        file = pq.ParquetFile(path)
        return Staged(path, file.metadata.num_rows, before, file.schema_arrow, taken_over=True)
    forget(path)  # until it is whole again, the file is nobody's
    held = scan(table.files(folder), columns=wanted, **table.scan)
    schema = _staged(name, table, _empty(held.schema), columns, 0).schema
    with pq.ParquetWriter(path, schema, compression="lz4") as writer:
        for batch in held.batches():
            writer.write_batch(_staged(name, table, batch, columns, total))
            total += batch.num_rows
    keep(path, source, dict(held.dropped))
    return Staged(path, total, dict(held.dropped), schema)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], schema=schema)


def _staged(name: str, table: Table, batch: pa.RecordBatch, columns: Sequence[str], first: int) -> pa.RecordBatch:
    arrays = {c: _plain(batch.column(c)) for c in dict.fromkeys(columns)}
    arrays["gem_row"] = pa.array(np.arange(first, first + batch.num_rows))
    arrays["gem_user"] = pa.nulls(batch.num_rows, pa.int64()) if table.user is None else _user(name, batch.column(table.user))
    if table.time is None:
        arrays["gem_time"] = arrays["gem_order"] = arrays["gem_row"]
    else:
        arrays["gem_time"], arrays["gem_order"] = seconds(name, batch.column(table.time), table.unit)
    return pa.RecordBatch.from_pydict(arrays)


def _user(name: str, array: pa.Array) -> pa.Array:
    users = _plain(array)
    if not (pa.types.is_integer(users.type) or is_text(users.type)):
        raise RequestError(f"table {name!r}", f"its user column holds {users.type}", "Give integers or strings, for text files by `scan.types`.")
    return users


def _plain(array: pa.Array) -> pa.Array:
    """One type for all integers but uint64, for all texts and for half floats, so that columns of two tables compare.

    Booleans become 0 and 1, because SQL dialects differ on comparing them with numbers, and a column without values becomes integers.
    """
    kind = array.type
    if pa.types.is_boolean(kind) or pa.types.is_null(kind) or (pa.types.is_integer(kind) and kind != pa.uint64()):
        return array.cast(pa.int64())
    if is_text(kind):
        return array.cast(pa.string())
    return array.cast(pa.float32()) if pa.types.is_float16(kind) else array


def seconds(name: str, array: pa.Array, unit: str) -> tuple[pa.Array, pa.Array]:
    """``(gem_time, gem_order)``: whole seconds, rounded down, and the time as a whole number of its unit; NaN counts as missing.

    Raises:
        RequestError: the column is neither a number nor a timestamp.
    """
    if pa.types.is_timestamp(array.type):
        unit, array = array.type.unit, array.cast(pa.int64())
    elif pa.types.is_date(array.type):
        unit, array = "s", array.cast(pa.timestamp("s")).cast(pa.int64())
    elif pa.types.is_floating(array.type):
        # Fractions of a second still order events, and a missing time is no time.
        unit, array = "us", _microseconds(name, array, PER_SECOND[unit])
    elif not pa.types.is_integer(array.type):
        so = f"its time column holds {array.type}"
        raise RequestError(f"table {name!r}", so, "Give a number of seconds (or `unit`), or a timestamp column.")
    most = min(LATEST * PER_SECOND[unit], 2**63 - 1)
    if array.type == pa.uint64():
        _refuse(name, array, pc.greater(array, pa.scalar(most, pa.uint64())))
    elif array.type == pa.int64():
        _refuse(name, array, pc.or_(pc.greater(array, most), pc.less(array, -most)))
    whole = array.cast(pa.int64())
    values = whole.fill_null(0).to_numpy(zero_copy_only=False) // PER_SECOND[unit]
    return pa.array(values, mask=~np.asarray(pc.is_valid(whole).to_numpy(zero_copy_only=False))), whole


def _microseconds(name: str, array: pa.Array, per_second: int) -> pa.Array:
    values = array.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False)
    scaled = np.floor(values * 10**6 / per_second)
    known = np.isfinite(scaled)
    _refuse(name, array, pa.array(known & (np.abs(scaled) > LATEST * 10**6)))
    return pa.array(np.where(known, scaled, 0).astype(np.int64), mask=~known)


def _refuse(name: str, array: pa.Array, outside: pa.Array) -> None:
    """Times beyond the calendar are another column, or another unit; sums with them would overflow."""
    if pc.any(outside).as_py():
        first = array.filter(outside)[0].as_py()
        raise RequestError(f"table {name!r}", f"its time column holds {first}, more than 30,000 years away", "Check the column, and `unit`.")
