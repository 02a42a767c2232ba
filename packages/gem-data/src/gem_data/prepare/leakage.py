"""The leakage check: its own pass over prepared files, which trusts nothing that wrote them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem_core.spec import RunFailed
from gem_data.prepare.output import REQUEST_ROW, TIME
from gem_data.schema import Schema


def check_leakage(folder: Path, schema: Schema, files: Mapping[str, list[dict[str, Any]]], lags: Mapping[str, int]) -> dict[str, int]:
    """``{sequence: events checked}`` over all splits.

    Args:
        files: the parts of each split, as in ``data.json``.
        lags: seconds that events of each sequence must lie before the impression, beyond being earlier.

    Raises:
        RunFailed: an event lies at or after an impression's time less the lag; the first one is named.
    """
    checked = {}
    for group in schema.sequence:
        if group.time_source is None:
            continue
        column, lag = group.time_source, lags.get(group.name, 0)
        parts = [part for split in files.values() for part in split]
        checked[group.name] = sum(_check_part(folder, part, column, lag) for part in parts)
    return checked


def _check_part(folder: Path, part: Mapping[str, Any], column: str, lag: int) -> int:
    path = folder / part["file"]
    if "requests" not in part:
        with pq.ParquetFile(path) as file:
            return sum(_check(path, b.column(TIME).to_numpy(), b.column(column), lag) for b in file.iter_batches(16_384, columns=[TIME, column]))
    earliest = _earliest(path, part["requests"])
    requests, at, events = path.with_suffix(".requests.parquet"), 0, 0
    with pq.ParquetFile(requests) as file:
        for batch in file.iter_batches(16_384, columns=[column]):
            events += _check(requests, earliest[at : at + batch.num_rows], batch.column(0), lag)
            at += batch.num_rows
    return events


def _earliest(path: Path, requests: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """``[requests]`` int64: the time of the first impression of each."""
    earliest = np.full(requests, np.iinfo(np.int64).max)
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=[TIME, REQUEST_ROW]):
            np.minimum.at(earliest, batch.column(1).to_numpy(), batch.column(0).to_numpy())
    return earliest


def _check(path: Path, times: np.ndarray[Any, np.dtype[np.int64]], events: pa.ListArray, lag: int) -> int:
    values, offsets = events.flatten().to_numpy(), events.offsets.to_numpy() - events.offsets[0].as_py()
    limits = np.repeat(times - lag, np.diff(offsets))
    wrong = np.flatnonzero(values >= limits)
    if wrong.size:
        row = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        late = f"time {values[wrong[0]]} is not before its impression at {times[row]}" + (f" less the lag of {lag}" if lag else "")
        raise RunFailed(f"leakage check of {path.name}", f"an event of {wrong.size} at {late}", "Do not train on this folder; prepare it again.")
    return len(values)
