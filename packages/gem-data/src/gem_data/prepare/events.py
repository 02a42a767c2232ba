"""The events of each history as flat columns on disk, from which the histories of rows are gathered."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.ids import Encoder
from gem_data.prepare.engine import Engine
from gem_data.prepare.histories import sorted_events
from gem_data.prepare.plan import Plan, feature_columns

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EventLog:
    """Events of one history by user and time.

    Args:
        times: ``[events]`` int64 seconds.
        columns: ``{column of the prepared file: [events]}``, ids encoded (int64), numbers float32, times int64.
    """

    times: Ints
    columns: dict[str, NDArray[Any]]


def write_events(engine: Engine, plan: Plan, h: int, encode: dict[str, Encoder], folder: Path) -> EventLog:
    """Encode the sorted events of history number ``h`` into memory-mapped columns under ``folder``: disk, not memory, bounds their number."""
    group = plan.groups[h]
    source = feature_columns(group, plan.definition.histories[h])
    rows = int(engine.rows(f"SELECT COUNT(*) FROM events_{h}")[0][0])
    ids = {f.name for f in group.id}
    kinds = {f"{group.name}.{name}": np.int64 if name in ids else np.float32 for name in source}
    columns = {key: _mapped(folder / f"{h}.{k}.npy", rows, kind) for k, (key, kind) in enumerate(kinds.items())}
    times: Ints = _mapped(folder / f"{h}.time.npy", rows, np.int64)
    at = 0
    for batch in engine.stream(sorted_events(h, list(dict.fromkeys(source.values())))):
        end = at + batch.num_rows
        times[at:end] = batch.column("gem_time").to_numpy()
        for name, column in source.items():
            key = f"{group.name}.{name}"
            values = batch.column(column)
            columns[key][at:end] = encode[key].encode(values) if name in ids else floats(key, values)
        at = end
    if group.time is not None:
        columns[f"{group.name}.{group.time}"] = times
    return EventLog(times, columns)


def floats(name: str, values: pa.Array) -> NDArray[np.float32]:
    """``[values]`` float32; missing ones and NaN are 0.

    Raises:
        RequestError: a value is infinite, or too large for float32.
    """
    numbers = np.nan_to_num(values.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False), nan=0.0, posinf=np.inf, neginf=-np.inf)
    if np.isinf(numbers).any():
        raise RequestError(f"number {name!r}", "its column holds infinite values", "Replace them, or leave them out.")
    return np.asarray(numbers, np.float32)


def count_missing(values: pa.Array) -> int:
    """Values that ``floats`` takes for missing."""
    return int(pc.sum(pc.is_null(values, nan_is_null=True), min_count=0).as_py())


def _mapped(path: Path, rows: int, kind: Any) -> NDArray[Any]:
    if not rows:
        return np.zeros(0, kind)
    return np.lib.format.open_memmap(path, mode="w+", dtype=kind, shape=(rows,))


def gather(log: EventLog, begin: Ints, end: Ints) -> Iterator[tuple[str, pa.Array]]:
    """``(column, lists)``: for each row the events ``begin:end`` of the log. The caller keeps the sum of lengths below 2^31."""
    lengths = end - begin
    offsets = np.zeros(lengths.size + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    index = np.repeat(begin - offsets[:-1], lengths) + np.arange(offsets[-1])
    places = pa.array(offsets, pa.int32())
    for name, values in log.columns.items():
        yield name, pa.ListArray.from_arrays(places, pa.array(values[index]))
