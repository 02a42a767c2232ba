"""Generated rows as a prepared folder: Parquet parts, schema.toml and data.json."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from gem_core.spec import RequestError
from gem_data.generate.bounds import ROWS_AT_ONCE, Baselines, Truth, chunks, score_bounds
from gem_data.generate.draws import Ints
from gem_data.generate.world import Rows, World
from gem_data.options import GeneratedOptions
from gem_data.prepare.output import REQUEST, REQUEST_ROW, TIME, USER
from gem_data.schema import declare
from gem_data.schema.files import write_schema

SPLITS = ("train", "test")
PART_ROWS = 1_000_000


@dataclass
class _Account:
    """What was written: the parts of a split as data.json lists them, labels observed and positive, events, and a bit for each user."""

    parts: dict[str, list[dict[str, Any]]]
    labels: dict[str, Counter[str]]
    users: NDArray[np.uint8]
    events: int = 0

    def count(self, split: str, rows: Rows, *, conversion: bool) -> None:
        seen = rows.clicked & rows.closed
        self.labels[split].update({"ctr observed": rows.clicked.size, "ctr positive": int(rows.clicked.sum())})
        if conversion:
            self.labels[split].update({"cvr observed": int(seen.sum()), "cvr positive": int((seen & rows.converted).sum())})
        user = rows.requests.user
        np.bitwise_or.at(self.users, user >> 3, np.left_shift(1, user & 7).astype(np.uint8))


def write_folder(options: GeneratedOptions, out: Path, told: Callable[[int], None] = lambda rows: None) -> Baselines:
    """Write both splits as ``gem data prepare`` would, so that ``gem data audit`` holds; returns the bounds of the test rows.

    Memory does not grow with the rows, but for 27 bytes a test row and a bit a user. The folder is written beside its place and moved there
    when it is whole.

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
    truth: list[Truth] = []
    account = _Account({split: [] for split in SPLITS}, {split: Counter() for split in SPLITS}, np.zeros(options.users // 8 + 1, np.uint8))
    for split in SPLITS:
        (partial / split).mkdir(parents=True)
        _write_split(world, split, partial, account, truth if split == "test" else None, told)
    found = score_bounds(Truth.joined(truth), conversion=options.conversion)
    write_schema(schema(options), partial / "schema.toml")
    (partial / "data.json").write_text(json.dumps(_about(world, account, found), indent=1) + "\n")
    partial.rename(out)
    return found


def _about(world: World, account: _Account, found: Baselines) -> dict[str, Any]:
    """The content of data.json."""
    o = world.options
    users = int(np.unpackbits(account.users).sum())
    tasks = ("ctr", "cvr") if o.conversion else ("ctr",)
    return {
        "format": 1,
        "splits": account.parts,
        "ledger": {"read": o.rows + o.test_rows, "train": o.rows, "test": o.test_rows},
        "users": {"read": users, "written": users},
        "events": {},
        "sides": {},
        "labels": {
            split: {task: {what: n[f"{task} {what}"] for what in ("observed", "positive")} for task in tasks} for split, n in account.labels.items()
        },
        "unknown": {split: {} for split in SPLITS},
        "cold": {},
        "test_from": world.test_start,
        "calibration": None,
        "leakage": {"history": account.events},
        "baselines": found,
        "definition": {"source": "generated", "options": o.model_dump()},
    }


def schema(options: GeneratedOptions) -> declare.Schema:
    """What the columns mean; ids are rows of their tables, from 1."""
    ids = {"item": options.items, "category": options.categories, "user_group": options.groups, "hour": 24}
    features = {name: declare.Id(name=name, encode="pass", rows=count + 1) for name, count in ids.items()}
    history = declare.Sequence(name="history", max_length=options.history_length, time="time", id=(features["item"], features["category"]))
    tasks = [declare.Task(name="ctr", label="label.ctr", mask="mask.ctr")]
    if options.conversion:
        tasks.append(declare.Task(name="cvr", label="label.cvr", mask="mask.cvr", delay="delay.cvr", condition="ctr"))
    return declare.Schema(
        user=USER,
        request=REQUEST,
        time=TIME,
        id=tuple(features.values()),
        number=(declare.Number(name="number_1"), declare.Number(name="number_2")),
        sequence=(history,),
        task=tuple(tasks),
    )


def _write_split(world: World, split: str, folder: Path, account: _Account, truth: list[Truth] | None, told: Callable[[int], None]) -> None:
    """All parts of a split; what is known of its rows is added to ``truth``."""
    pieces, parts = chunks(world, split), account.parts[split]
    piece = next(pieces, None)
    while piece is not None:
        part = _Part(folder, f"{split}/part-{len(parts):05}", shared=world.options.candidates > 1)
        while piece is not None and (not part.rows or part.rows + piece.index.size <= PART_ROWS):
            part.write(world.options, piece)
            account.count(split, piece, conversion=world.options.conversion)
            if truth is not None:
                truth.append(Truth.of(piece))
            told(piece.index.size)
            piece = next(pieces, None)
        account.events += part.events
        parts.append(part.close())


class _Part:
    """One Parquet file of rows and, where candidates share histories, one of requests."""

    def __init__(self, folder: Path, name: str, *, shared: bool) -> None:
        self._folder, self._name, self._shared = folder, name, shared
        self._writers: dict[str, pq.ParquetWriter] = {}
        self.rows = self.requests = self.events = 0

    def write(self, options: GeneratedOptions, piece: Rows) -> None:
        rows, histories = _row_columns(options, piece), _history_columns(piece)
        if self._shared:
            self._add(".parquet", {**rows, REQUEST_ROW: pa.array(piece.request + self.requests)})
            self._add(".requests.parquet", histories)
        else:
            self._add(".parquet", {**rows, **histories})
        self.rows += piece.index.size
        self.requests += piece.requests.user.size
        self.events += piece.histories.item.size

    def _add(self, ending: str, columns: dict[str, pa.Array]) -> None:
        table = pa.table(columns)
        if ending not in self._writers:
            self._writers[ending] = pq.ParquetWriter(self._folder / f"{self._name}{ending}", table.schema, compression="zstd")
        self._writers[ending].write_table(table, row_group_size=ROWS_AT_ONCE)

    def close(self) -> dict[str, Any]:
        for writer in self._writers.values():
            writer.close()
        return {"file": f"{self._name}.parquet", "rows": self.rows, **({"requests": self.requests} if self._shared else {})}


def _row_columns(options: GeneratedOptions, rows: Rows) -> dict[str, pa.Array]:
    requests = rows.requests
    columns = {
        USER: requests.user[rows.request],
        REQUEST: requests.number[rows.request],
        TIME: requests.time[rows.request],
        **{name: value + 1 for name, value in rows.visible_ids().items()},
        **{f"number_{k + 1}": rows.numbers[:, k].astype(np.float32) for k in (0, 1)},
        "label.ctr": rows.clicked.astype(np.int8),
        "mask.ctr": np.ones(rows.index.size, np.bool_),
        "click_probability": rows.click,
        "click_probability_without_history": rows.blind,
    }
    out = {name: pa.array(value) for name, value in columns.items()}
    if options.conversion:
        out["label.cvr"] = pa.array(rows.converted.astype(np.int8))
        out["mask.cvr"] = pa.array(rows.closed)
        out["delay.cvr"] = pa.array(rows.delay, mask=rows.delay < 0)
        out["conversion_probability"] = pa.array(rows.conversion)
    return out


def _history_columns(rows: Rows) -> dict[str, pa.Array]:
    histories = rows.histories
    offsets = pa.array(histories.offsets.astype(np.int32))
    values: Iterator[tuple[str, Ints]] = iter((("item", histories.item + 1), ("category", histories.category + 1), ("time", histories.time)))
    return {f"history.{name}": pa.ListArray.from_arrays(offsets, pa.array(value)) for name, value in values}
