"""``audit``: everything that ``data.json`` says of a prepared folder, counted again from its files."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gem_core.spec import RequestError, RunFailed
from gem_data.prepare.leakage import check_leakage
from gem_data.prepare.output import REQUEST_ROW
from gem_data.prepare.where import quote
from gem_data.prepare.writer import count_labels
from gem_data.schema import Schema, read_schema

KEYS = ("splits", "ledger", "users", "events", "labels", "unknown", "calibration", "leakage", "definition")


@dataclass
class _Found:
    """What the files of one split hold."""

    unknown: Counter[str]
    labels: dict[str, dict[str, int]]


def audit(folder: Path) -> dict[str, Any]:
    """The content of ``data.json``, when the files agree with it.

    Raises:
        RequestError: the folder is no prepared folder.
        RunFailed: files and ``data.json`` differ; every difference is named.
    """
    data = _content(folder)
    schema = read_schema(folder / "schema.toml")
    differences = list(_files(folder, data))
    if not differences:
        differences = [*_ledger(data), *_counts(folder, schema, data), *_vocabularies(folder, schema)]
    if differences:
        raise RunFailed(f"audit of {folder}", "; ".join(differences), "Do not train on this folder; prepare it again.")
    lags = {history["name"]: history.get("lag", 0) for history in data["definition"].get("histories", [])}
    if check_leakage(folder, schema, data["splits"], lags) != data["leakage"]:
        raise RunFailed(f"audit of {folder}", "its histories hold another number of events than data.json says", "Prepare it again.")
    return data


def _content(folder: Path) -> dict[str, Any]:
    asked, do = f"prepared folder {folder}", "Name a folder of `gem data prepare`, or prepare it again."
    try:
        data: dict[str, Any] = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(asked, f"its data.json cannot be read ({error})", do) from error
    if data.get("format") != 1:
        raise RequestError(asked, f"its format is {data.get('format')!r}, not 1", do)
    lacking = [key for key in KEYS if key not in data]
    if lacking:
        raise RequestError(asked, f"its data.json lacks {', '.join(lacking)}", do)
    return data


def _files(folder: Path, data: Mapping[str, Any]) -> Iterator[str]:
    """Files that are missing, damaged, of another number of rows, or not listed."""
    listed: dict[str, int] = {}
    for part in (part for parts in data["splits"].values() for part in parts):
        listed[part["file"]] = part["rows"]
        if "requests" in part:
            listed[part["file"].removesuffix(".parquet") + ".requests.parquet"] = part["requests"]
    for name, rows in listed.items():
        try:
            found = pq.read_metadata(folder / name).num_rows
        except (OSError, pa.ArrowException) as error:
            yield f"{name} cannot be read ({error})"
            continue
        if found != rows:
            yield f"{name} has {found} rows, not {rows}"
    there = {str(path.relative_to(folder)) for split in data["splits"] for path in (folder / split).glob("*")}
    yield from (f"{name} is not listed" for name in sorted(there - set(listed)))


def _ledger(data: Mapping[str, Any]) -> Iterator[str]:
    for split, parts in data["splits"].items():
        rows = sum(part["rows"] for part in parts)
        if data["ledger"].get(split) != rows:
            yield f"the ledger counts {data['ledger'].get(split)} {split} rows, the files hold {rows}"
    for what, ledger in {"rows": data["ledger"], "users": data["users"], **data["events"]}.items():
        total = sum(count for part, count in ledger.items() if part != "read")
        if total != ledger["read"]:
            yield f"the ledger of {what} adds up to {total}, and {ledger['read']} were read"


def _counts(folder: Path, schema: Schema, data: Mapping[str, Any]) -> Iterator[str]:
    for split, parts in data["splits"].items():
        found = _Found(Counter(), {task.name: {"observed": 0, "positive": 0} for task in schema.task})
        for part in parts:
            yield from _part(folder, part, schema, found)
        if found.labels != data["labels"][split]:
            yield f"the labels of {split} are {found.labels}, not {data['labels'][split]}"
        for key, _, _ in schema.id_columns():
            said = data["unknown"][split].get(key, 0)
            if found.unknown[key] != said:
                yield f"{split} has {found.unknown[key]} unknown values of {key!r}, not {said}"
        yield from _calibration(split, found.labels, data)
    users = _users(folder, schema, data)
    if users != data["users"]["written"]:
        yield f"the files hold {users} users, not {data['users']['written']}"


def _users(folder: Path, schema: Schema, data: Mapping[str, Any]) -> int:
    """Different users in all parts; DuckDB counts more of them than fit into memory."""
    if schema.user is None:
        return 0
    files = [str(folder / part["file"]) for parts in data["splits"].values() for part in parts]
    with duckdb.connect() as connection:
        ((users,),) = connection.execute(f"SELECT COUNT(DISTINCT {quote(schema.user)}) FROM read_parquet(?)", [files]).fetchall()
    return int(users)


def _calibration(split: str, labels: Mapping[str, Mapping[str, int]], data: Mapping[str, Any]) -> Iterator[str]:
    calibration = data["calibration"]
    if split == "train" and calibration is not None:
        negatives = labels[calibration["task"]]["observed"] - labels[calibration["task"]]["positive"]
        if negatives != calibration["kept"]:
            yield f"train has {negatives} negatives of {calibration['task']!r}, not {calibration['kept']}"


def _part(folder: Path, part: Mapping[str, Any], schema: Schema, found: _Found) -> Iterator[str]:
    """Faults of one part; what it holds is added to what was found."""
    name, request, last = part["file"], -1, None
    with pq.ParquetFile(folder / name) as file:
        missing = sorted(set(schema.columns()) - set(file.schema_arrow.names) - _history_columns(schema, part))
        if missing:
            yield f"{name} lacks the columns {', '.join(missing)}"
            return
        for batch in file.iter_batches(16_384):
            _add(schema, batch, found)
            yield from _ids(name, schema, batch, found.unknown)
            if "requests" in part:
                rows = np.concatenate([[request], batch.column(REQUEST_ROW).to_numpy()])
                if not np.isin(np.diff(rows), (0, 1)).all():
                    yield f"{name}: {REQUEST_ROW} does not count requests up"
                request = int(rows[-1])
            elif schema.time is not None:
                times = batch.column(schema.time).to_numpy()
                if (np.diff(times, prepend=times[0] if last is None else last) < 0).any():
                    yield f"{name} is not in the order of time"
                last = int(times[-1])
    if "requests" in part:
        yield from _requests(folder, part, schema, request, found)


def _add(schema: Schema, batch: pa.RecordBatch, found: _Found) -> None:
    for task, (observed, positive) in count_labels(schema, {name: batch.column(name) for name in batch.schema.names}).items():
        found.labels[task]["observed"] += observed
        found.labels[task]["positive"] += positive


def _requests(folder: Path, part: Mapping[str, Any], schema: Schema, last: int, found: _Found) -> Iterator[str]:
    """Faults of a requests file, of which rows refer to ``0 .. last``."""
    name = part["file"].removesuffix(".parquet") + ".requests.parquet"
    if last + 1 != part["requests"]:
        yield f"{part['file']} refers to {last + 1} requests, not {part['requests']}"
    with pq.ParquetFile(folder / name) as file:
        for batch in file.iter_batches(16_384):
            yield from _ids(name, schema, batch, found.unknown)


def _history_columns(schema: Schema, part: Mapping[str, Any]) -> set[str]:
    """Columns that a part keeps in its requests file."""
    return {column for group in schema.sequence for column in group.columns()} if "requests" in part else set()


def _ids(file: str, schema: Schema, batch: pa.RecordBatch, unknown: Counter[str]) -> Iterator[str]:
    """Ids outside their table, and lists of one history that differ in length."""
    for key, column, feature in schema.id_columns():
        if column in batch.schema.names:
            values = batch.column(column)
            flat = (values.flatten() if pa.types.is_list(values.type) else values).to_numpy(zero_copy_only=False)
            unknown[key] += int((flat == 0).sum())
            if flat.size and not 0 <= flat.min() <= flat.max() < (feature.rows or 0):
                yield f"{file}: ids of {key!r} lie in {flat.min()} .. {flat.max()}, and its table has {feature.rows} rows"
    for group in schema.sequence:
        columns = [batch.column(c) for c in group.columns() if c in batch.schema.names]
        if any(not pc.list_value_length(c).equals(pc.list_value_length(columns[0])) for c in columns):
            yield f"{file}: the lists of history {group.name!r} differ in length"


def _vocabularies(folder: Path, schema: Schema) -> Iterator[str]:
    """A vocabulary whose rows are not those of the features that use it."""
    for key, _, feature in schema.id_columns():
        path = folder / "vocabulary" / f"{feature.table_name}.parquet"
        if path.exists():
            rows = pq.read_metadata(path).num_rows + 1
            if rows != feature.rows:
                yield f"the vocabulary of {key!r} makes {rows} rows, the schema says {feature.rows}"
