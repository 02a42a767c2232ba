"""A proposed schema for a file: what each column probably is, and why. A guess from the first rows, to be read and corrected."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from gem_data.formats import Scan, scan
from gem_data.formats.files import format_of, locate, suffix_of
from gem_data.formats.sniff import Dialect, sniff
from gem_data.guess import Column, Verdict, judge, list_name, times_of
from gem_data.schema import Embedding, Id, MultiId, Number, Schema, Sequence, Task

VOCABULARY_UP_TO = 1_000
BATCH_ROWS = 4_096


@dataclass(frozen=True)
class Proposal:
    """``verdicts`` holds one entry a column, in the order of the file; ``dropped`` counts the lines that are no rows, by reason."""

    schema: Schema
    verdicts: Mapping[str, Verdict]
    types: Mapping[str, pa.DataType]
    rows: int
    dialect: Dialect | None
    dropped: Mapping[str, int]


def inspect(
    path: str | Path,
    *,
    rows: int = 10_000,
    format: str | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    names: tuple[str, ...] | None = None,
) -> Proposal:
    """Propose a schema from the first ``rows`` rows; RequestError where the file cannot be read."""
    place = locate(path)[0]
    text = separator is not None or format == "csv" or (format is None and (_is_text(suffix_of(place)) or format_of(place) == "csv"))
    if not text:
        return propose(scan(path, format=format, batch_rows=min(rows, BATCH_ROWS)), rows)
    dialect = sniff(place, encoding=encoding, separator=separator, columns=names)
    opened = scan(path, format="csv", separator=dialect.separator, encoding=dialect.encoding, header=dialect.columns or True, bad_lines="drop")
    return propose(opened, rows, dialect)


def _is_text(suffix: str) -> bool:
    return suffix in ("csv", "tsv", "tab", "txt", "dat", "data", "")


def propose(opened: Scan, rows: int, dialect: Dialect | None = None) -> Proposal:
    """The proposal from the first ``rows`` rows of a scan."""
    held, count = [], 0
    for batch in opened.batches():
        held.append(batch.slice(0, rows - count))
        count += held[-1].num_rows
        if count >= rows:
            break
    table = pa.Table.from_batches(held, opened.schema)
    columns = {name: Column(name, table[name].combine_chunks()) for name in table.column_names}
    verdicts = judge(columns)
    return Proposal(_schema(columns, verdicts), verdicts, {name: c.type for name, c in columns.items()}, count, dialect, dict(opened.dropped))


def _schema(columns: Mapping[str, Column], verdicts: Mapping[str, Verdict]) -> Schema:
    def of(kind: str) -> list[str]:
        return [name for name, verdict in verdicts.items() if verdict.kind == kind]

    groups: dict[str, list[str]] = {}
    for name in of("sequence"):
        groups.setdefault(verdicts[name].group, []).append(name)
    single = {role: next(iter(of(role)), None) for role in ("user", "request", "time")}
    tables = _tables(columns, verdicts)
    return Schema(
        **single,
        id=tuple(Id(name=name, **tables[name]) for name in of("id")),
        multi_id=tuple(MultiId(name=name, **tables[name]) for name in of("multi_id")),
        number=tuple(Number(name=name) for name in of("number")),
        embedding=tuple(Embedding(name=name, width=columns[name].longest) for name in of("embedding")),
        sequence=tuple(_sequence(group, {name: columns[name] for name in names}, tables) for group, names in groups.items()),
        task=tuple(Task(name=name, label=name) for name in of("label")),
    )


def _tables(columns: Mapping[str, Column], verdicts: Mapping[str, Verdict]) -> dict[str, dict[str, Any]]:
    """How the ids of each feature name are encoded; features of one name, in the row and in histories, share a table.

    A vocabulary for few values; else a hash into ten times the values seen, since the sample shows only some of them.
    """
    seen: dict[str, int] = {}
    for name, verdict in verdicts.items():
        if verdict.kind not in ("id", "multi_id", "sequence"):
            continue
        feature = list_name(verdict.group, name) if verdict.group else name
        seen[feature] = max(seen.get(feature, 0), columns[name].distinct)
    return {name: {"encode": "vocabulary"} if count <= VOCABULARY_UP_TO else {"encode": "hash", "rows": _rows(count)} for name, count in seen.items()}


def _rows(count: int) -> int:
    rows = 1_000
    while rows < 10 * count:
        rows *= 10
    return rows


def _sequence(group: str, columns: Mapping[str, Column], tables: Mapping[str, dict[str, Any]]) -> Sequence:
    time = next((name for name, column in columns.items() if times_of(column)), None)
    sides = {list_name(group, name): (name, column) for name, column in columns.items() if name != time}
    short = None if time is None else list_name(group, time)

    def given(side: str, name: str) -> dict[str, Any]:
        return {"name": side} if name == f"{group}.{side}" else {"name": side, "column": name}

    return Sequence(
        name=group,
        max_length=max(1, *(column.longest for column in columns.values())),
        time=short,
        time_column=time if time != f"{group}.{short}" else None,
        id=tuple(Id(**given(side, name), **tables[side]) for side, (name, c) in sides.items() if not c.fractional),
        number=tuple(Number(**given(side, name)) for side, (name, c) in sides.items() if c.fractional),
    )
