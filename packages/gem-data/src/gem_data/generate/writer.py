"""Generated rows as a prepared folder: Parquet parts, schema.toml, data.json and the bounds."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gem_core.spec import RequestError
from gem_data.generate.bounds import ROWS_AT_ONCE, chunks, score_bounds
from gem_data.generate.draws import Floats, Ints
from gem_data.generate.world import Rows, World
from gem_data.options import GeneratedOptions
from gem_data.schema import declare
from gem_data.schema.files import write_schema

SPLITS = ("train", "test")
PART_ROWS = 1_000_000
BOUNDS = "bounds.json"
Truth = list[tuple[Floats, Floats, Floats]]
"""Of each piece: the probabilities of a click, of a click without histories, and of a conversion."""


def write_folder(options: GeneratedOptions, out: Path, told: Callable[[int], None] = lambda rows: None) -> dict[str, Any]:
    """Write both splits and return the bounds of the test rows. Memory does not grow with the rows, but for 24 bytes a test row.

    The folder is written beside its place and moved there when it is whole.

    Args:
        options: what to generate.
        out: the folder, which must not exist.
        told: called with the number of rows written after each piece.

    Raises:
        RequestError: the folder exists.
    """
    if out.exists():
        raise RequestError(f"generated data in {out}", "it exists already", "Name a new folder, or remove this one.")
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    world = World(options)
    truth: Truth = []
    splits = {}
    for split in SPLITS:
        (partial / split).mkdir(parents=True)
        splits[split] = _write_split(world, split, partial, truth if split == "test" else None, told)
    click, blind, conversion = (np.concatenate(column) for column in zip(*truth, strict=True))
    found = score_bounds(click, blind, conversion if options.conversion else None)
    write_schema(schema(options), partial / "schema.toml")
    unknown: dict[str, Any] = {split: {} for split in SPLITS}
    ledger = {"read": options.rows + options.test_rows, "train": options.rows, "test": options.test_rows}
    definition = {"source": "generated", "options": options.model_dump()}
    data = {
        "format": 1,
        "splits": splits,
        "ledger": ledger,
        "unknown": unknown,
        "calibration": None,
        "definition": definition,
    }
    (partial / "data.json").write_text(json.dumps(data, indent=2) + "\n")
    (partial / BOUNDS).write_text(json.dumps(found, indent=2) + "\n")
    partial.rename(out)
    return found


def schema(options: GeneratedOptions) -> declare.Schema:
    """What the columns mean; ids are rows of their tables, from 1."""
    ids = {"item": options.items, "category": options.categories, "user_group": options.groups, "hour": 24}
    features = {name: declare.Id(name=name, encode="pass", rows=count + 1) for name, count in ids.items()}
    history = declare.Sequence(name="history", max_length=options.history_length, time="time", id=(features["item"], features["category"]))
    tasks = [declare.Task(name="ctr", label="click")]
    if options.conversion:
        tasks.append(declare.Task(name="cvr", label="conversion", mask="conversion_mask", delay="conversion_delay", condition="ctr"))
    return declare.Schema(
        user="user_id",
        request="request_id",
        time="timestamp",
        id=tuple(features.values()),
        number=(declare.Number(name="number_1"), declare.Number(name="number_2")),
        sequence=(history,),
        task=tuple(tasks),
    )


def _write_split(world: World, split: str, folder: Path, truth: Truth | None, told: Callable[[int], None]) -> list[dict[str, Any]]:
    """The parts written, as data.json lists them; the true probabilities are added to ``truth``."""
    pieces = chunks(world, split)
    parts: list[dict[str, Any]] = []
    piece = next(pieces, None)
    while piece is not None:
        file = f"{split}/part-{len(parts):05}.parquet"
        rows = 0
        part = _Part(folder / file, shared=world.options.candidates > 1)
        while piece is not None and (not rows or rows + piece.index.size <= PART_ROWS):
            part.write(world.options, piece)
            rows += piece.index.size
            if truth is not None:
                truth.append((piece.click, piece.blind, piece.conversion))
            told(piece.index.size)
            piece = next(pieces, None)
        part.close()
        parts.append({"file": file, "rows": rows})
    return parts


class _Part:
    """One Parquet file of rows and, where candidates share histories, one of requests."""

    def __init__(self, path: Path, *, shared: bool) -> None:
        self._paths = [path, path.with_suffix(".requests.parquet")][: 1 + shared]
        self._writers: list[pq.ParquetWriter] = []
        self._requests = 0

    def write(self, options: GeneratedOptions, piece: Rows) -> None:
        shared = len(self._paths) == 2
        columns = _row_columns(options, piece)
        histories = _history_columns(piece)
        if shared:
            columns["request_row"] = pa.array(piece.request + self._requests)
            tables = [pa.table(columns), pa.table(histories)]
        else:
            tables = [pa.table({**columns, **histories})]
        if not self._writers:
            self._writers = [pq.ParquetWriter(path, table.schema, compression="zstd") for path, table in zip(self._paths, tables, strict=True)]
        for writer, table in zip(self._writers, tables, strict=True):
            writer.write_table(table, row_group_size=ROWS_AT_ONCE)
        self._requests += piece.requests.user.size

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _row_columns(options: GeneratedOptions, rows: Rows) -> dict[str, pa.Array]:
    requests = rows.requests
    columns = {
        "user_id": requests.user[rows.request],
        "request_id": requests.number[rows.request],
        "timestamp": requests.time[rows.request],
        **{name: value + 1 for name, value in rows.visible_ids().items()},
        **{f"number_{k + 1}": rows.numbers[:, k].astype(np.float32) for k in (0, 1)},
        "click": rows.clicked.astype(np.int8),
        "click_probability": rows.click,
        "click_probability_without_history": rows.blind,
    }
    out = {name: pa.array(value) for name, value in columns.items()}
    if options.conversion:
        out["conversion"] = pa.array(rows.converted.astype(np.int8))
        out["conversion_mask"] = pa.array(rows.closed)
        out["conversion_delay"] = pa.array(rows.delay, mask=rows.delay < 0)
        out["conversion_probability"] = pa.array(rows.conversion)
    return out


def _history_columns(rows: Rows) -> dict[str, pa.Array]:
    histories = rows.histories
    offsets = pa.array(histories.offsets.astype(np.int32))
    values: Iterator[tuple[str, Ints]] = iter((("item", histories.item + 1), ("category", histories.category + 1), ("time", histories.time)))
    return {f"history.{name}": pa.ListArray.from_arrays(offsets, pa.array(value)) for name, value in values}
