"""Canonical tables on disk: Parquet files, the schema and the definition that ``gem data prepare`` takes, and the ledger."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tomli_w

from gem_core.spec import RequestError
from gem_data.known.dataset import KnownDataSet
from gem_data.known.tables import KnownTable
from gem_data.schema.files import write_schema

Ledgers = dict[str, dict[str, int]]


def export(known: KnownDataSet, folder: Path, out: Path, *, told: Callable[[str, int], None] = lambda table, rows: None, **choices: str) -> Ledgers:
    """Write ``TABLE.parquet``, ``schema.toml``, ``definition.toml`` and ``ledger.json`` into a new folder, which appears when it is whole.

    Args:
        known: the data set.
        folder: its raw files.
        out: the folder to write.
        told: called with the table and the number of rows after each piece.
        choices: the data set's own.

    Returns:
        ``{table: {"read", "kept", "dropped: REASON" ...}}``.

    Raises:
        RequestError: a raw file is missing or damaged, ``out`` exists, a table has no row, or its ledger does not add up.
    """
    if out.exists():
        raise RequestError(f"export to {out}", "it exists already", "Name a new folder, or remove this one.")
    tables = known.tables(folder, **choices)
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, table in tables.items():
        _write(name, table, partial / f"{name}.parquet", told)
    ledgers = {name: dict(table.ledger) for name, table in tables.items()}
    write_schema(known.schema, partial / "schema.toml")
    (partial / "definition.toml").write_text(tomli_w.dumps(definition(known, tables)), encoding="utf-8")
    (partial / "ledger.json").write_text(json.dumps({"data_set": known.name, "choices": choices, "tables": ledgers}, indent=2) + "\n")
    partial.rename(out)
    return ledgers


def definition(known: KnownDataSet, tables: dict[str, KnownTable]) -> dict[str, Any]:
    """The definition over the exported tables, when all of their rows have been read."""
    made = known.definition(tables)
    paths = {name: {"path": f"{name}.parquet", **about} for name, about in made["tables"].items()}
    return {"schema": "schema.toml", **made, "tables": paths}


def _write(name: str, table: KnownTable, path: Path, told: Callable[[str, int], None]) -> None:
    writer: pq.ParquetWriter | None = None
    try:
        for batch in table.batches():
            writer = writer or pq.ParquetWriter(path, batch.schema, compression="zstd")
            writer.write_batch(batch)
            told(name, batch.num_rows)
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise RequestError(f"table {name!r}", f"no row is left of {', '.join(map(str, table.files))}: {dict(table.ledger)}", "Check the files.")
    if sum(table.ledger.values()) != 2 * table.ledger["read"]:
        raise RequestError(f"ledger of table {name!r}", f"{dict(table.ledger)} does not add up", "Count every row once.")
