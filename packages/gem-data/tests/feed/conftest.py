"""Small columnar files with every kind of feature, and what a plain loop over their rows says a batch holds."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet
import pytest
import torch

from gem_core.batch import Batch
from gem_data.options import FilesOptions
from gem_data.sources.files import Files

START = 1_700_000_000
LONGEST = 6
SCHEMA = f"""
user = "user_id"
time = "timestamp"
[[id]]
name = "item"
encode = "pass"
rows = 50
[[multi_id]]
name = "tags"
encode = "pass"
rows = 20
weights = "tag_weights"
[[number]]
name = "price"
[[embedding]]
name = "picture"
width = 3
[[sequence]]
name = "clicks"
max_length = {LONGEST}
time = "time"
[[sequence.id]]
name = "item"
table = "item"
encode = "pass"
rows = 50
[[sequence.id]]
name = "action"
encode = "pass"
rows = 5
[[sequence.number]]
name = "dwell"
[[sequence]]
name = "carts"
max_length = {LONGEST}
[[sequence.id]]
name = "item"
table = "item"
encode = "pass"
rows = 50
[[task]]
name = "ctr"
label = "click"
weight = "click_weight"
[[task]]
name = "cvr"
label = "buy"
mask = "buy_known"
condition = "ctr"
"""


def lists(rng: np.random.Generator, lengths: Any, draw: Any, kind: pa.DataType) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(draw(int(offsets[-1])), kind))


def make_table(rows: int, seed: int = 0, longest: int = LONGEST) -> pa.Table:
    """Random rows in the order of time; about a quarter of the histories are empty, and ids of ``row`` count the rows."""
    rng = np.random.default_rng(seed)
    clicks, carts, tags = (np.maximum(rng.integers(-longest // 3, longest + 1, rows), 0) for _ in range(3))
    click = rng.integers(0, 2, rows)
    known = rng.random(rows) < 0.7

    def ids(high: int) -> Callable[[int], Any]:
        return lambda count: rng.integers(0, high, count)

    return pa.table(
        {
            "user_id": pa.array(rng.integers(0, 9, rows)),
            "timestamp": pa.array(START + np.sort(rng.integers(0, 10**6, rows))),
            "item": pa.array(rng.integers(0, 50, rows), pa.int32()),
            "tags": lists(rng, tags, ids(20), pa.int64()),
            "tag_weights": lists(rng, tags, rng.random, pa.float32()),
            "price": pa.array(rng.normal(size=rows)),
            "picture": pa.FixedSizeListArray.from_arrays(pa.array(rng.normal(size=3 * rows).astype(np.float32)), 3).cast(pa.list_(pa.float32())),
            "clicks.item": lists(rng, clicks, ids(50), pa.int64()),
            "clicks.action": lists(rng, clicks, ids(5), pa.int16()),
            "clicks.dwell": lists(rng, clicks, rng.random, pa.float32()),
            "clicks.time": lists(rng, clicks, lambda n: START - rng.integers(0, 10**6, n), pa.int64()),
            "carts.item": lists(rng, carts, ids(50), pa.int64()),
            "click": pa.array(click, pa.int8()),
            "click_weight": pa.array(1 + rng.integers(0, 3, rows), pa.float32()),
            "buy": pa.array([int(b) if k else None for b, k in zip(click * rng.integers(0, 2, rows), known, strict=True)], pa.int8()),
            "buy_known": pa.array(known),
        }
    )


def change(table: pa.Table, name: str, column: Any) -> pa.Table:
    """The table with another column of that name."""
    return table.set_column(table.column_names.index(name), name, column)


def write(table: pa.Table, path: Path, unit: int) -> None:
    """One file, with units of about so many rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=unit, compression="zstd")
    elif path.suffix == ".orc":
        pa.orc.write_table(table, path, stripe_size=1024, batch_size=unit)
    else:
        pa.feather.write_feather(table, path, chunksize=unit, compression="uncompressed")


def write_folder(folder: Path, files: dict[str, pa.Table], unit: int = 16, schema: str = SCHEMA) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.toml").write_text(schema)
    for name, table in files.items():
        write(table, folder / name, unit)
    return folder


def open_source(folder: Path, ending: str = "parquet", **options: Any) -> Files:
    return Files(FilesOptions(path=folder, **{"train": (f"train*.{ending}",), "test": (f"test*.{ending}",), "window": 40, **options}))


def plain_batch(table: pa.Table, rows: list[int]) -> dict[str, Any]:
    """What a batch of these rows holds, by a loop over rows."""
    records = [table.slice(row, 1).to_pylist()[0] for row in rows]

    def packed(column: str) -> list[list[Any]]:
        return [(record[column] or [])[-LONGEST:] for record in records]

    return {
        "ids": {
            "item": [[r["item"]] for r in records],
            "tags": [r["tags"] for r in records],
            **{key: packed(key) for key in ("clicks.item", "clicks.action", "carts.item")},
        },
        "tags.weights": [r["tag_weights"] for r in records],
        "clicks.dwell": packed("clicks.dwell"),
        "clicks.time": packed("clicks.time"),
        "price": [[r["price"]] for r in records],
        "picture": [r["picture"] for r in records],
        "click": [r["click"] for r in records],
        "weight": [r["click_weight"] for r in records],
        "buy": [r["buy"] for r in records],
        "known": [r["buy_known"] for r in records],
        "time": [r["timestamp"] for r in records],
        "user": [r["user_id"] for r in records],
    }


def check(batch: Batch, table: pa.Table, base: int = 0) -> None:
    """The batch holds exactly what the table says of the rows of its origin."""
    assert batch.origin is not None
    assert batch.time is not None
    assert batch.groups is not None
    want = plain_batch(table, [row - base for row in batch.origin.tolist()])
    assert batch.ids.keys == tuple(want["ids"])
    for key, rows in want["ids"].items():
        column = batch.ids[key]
        got = [column.values[a:b].tolist() for a, b in zip(column.offsets[:-1].tolist(), column.offsets[1:].tolist(), strict=True)]
        assert got == rows, key
        assert column.max_length == max((len(row) for row in rows), default=0)
    flat = {key: [value for row in want[key] for value in row] for key in ("tags.weights", "clicks.dwell", "clicks.time")}
    torch.testing.assert_close(batch.id_weights["tags"], torch.tensor(flat["tags.weights"], dtype=torch.float32))
    torch.testing.assert_close(batch.event_dense["clicks.dwell"][:, 0], torch.tensor(flat["clicks.dwell"], dtype=torch.float32))
    assert batch.event_time["clicks"].tolist() == flat["clicks.time"]
    assert torch.equal(batch.event_offsets["clicks"].offsets, batch.ids["clicks.item"].offsets)
    torch.testing.assert_close(batch.dense["price"], torch.tensor(want["price"], dtype=torch.float32).reshape(-1, 1))
    torch.testing.assert_close(batch.dense["picture"], torch.tensor(want["picture"], dtype=torch.float32).reshape(-1, 3))
    assert batch.labels["ctr"].tolist() == want["click"]
    assert batch.weights["ctr"].tolist() == want["weight"]
    assert batch.masks["cvr"].tolist() == want["known"]
    seen = batch.masks["cvr"].tolist()
    assert [label for label, here in zip(batch.labels["cvr"].tolist(), seen, strict=True) if here] == [b for b in want["buy"] if b is not None]
    assert batch.time.tolist() == want["time"]
    assert batch.groups.tolist() == want["user"]


def origins(batches: Any) -> list[int]:
    """The rows of all batches, in order."""
    return [row for batch in batches for row in batch.origin.tolist()]


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of this file."""
    return sys.modules[__name__]
