"""Rows a second from Parquet to batches, in one run beside a bare scan of the same columns and a per-row data set; peak memory over a large file.

    python packages/gem-data/benchmarks/cpu_feed.py --out packages/gem-data/benchmarks/results

Each memory figure is measured in a process of its own. The median of the rounds is reported; rounds of all ways alternate.
"""

import argparse
import csv
import datetime
import gc
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet
import torch
from torch.nn.utils.rnn import pad_sequence

SEQUENCES, MEAN_LENGTH, ITEMS, BATCH = 5, 200, 1 << 20, 1024
COLUMNS = [f"s{i}.item" for i in range(SEQUENCES)]
ID = 'name = "item"\nencode = "pass"\nrows = {items}\ntable = "item"\n'
SCHEMA = "[[id]]\n" + ID + '[[number]]\nname = "price"\n[[task]]\nname = "ctr"\nlabel = "click"\n'
SEQUENCE = '[[sequence]]\nname = "s{i}"\nmax_length = 4096\n[[sequence.id]]\n' + ID


def write(folder: Path, rows: int, group: int) -> Path:
    """Rows with five histories each, geometric lengths of mean 200, uniform ids below 2^20 as int64, written as `gem data prepare` does."""
    rng = np.random.default_rng(0)
    (folder / "schema.toml").write_text(SCHEMA.format(items=ITEMS) + "".join(SEQUENCE.format(i=i, items=ITEMS) for i in range(SEQUENCES)))
    writer = None
    for begin in range(0, rows, group):
        count = min(group, rows - begin)
        columns: dict[str, Any] = {
            "item": rng.integers(0, ITEMS, count),
            "price": rng.normal(size=count).astype(np.float32),
            "click": rng.integers(0, 2, count).astype(np.int8),
        }
        for name in COLUMNS:
            lengths = np.minimum(rng.geometric(1 / (MEAN_LENGTH + 1), count) - 1, 4096)
            offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            columns[name] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(rng.integers(0, ITEMS, int(offsets[-1]))))
        table = pa.table(columns)
        writer = writer or pa.parquet.ParquetWriter(
            folder / "train.parquet", table.schema, compression="zstd", compression_level=1, use_dictionary=False
        )
        writer.write_table(table, row_group_size=group)
    assert writer is not None
    writer.close()
    pa.parquet.write_table(table.slice(0, 8), folder / "test.parquet")
    return folder


def scan(folder: Path) -> int:
    """A bare scan of the columns that training reads."""
    data = pa.dataset.dataset(folder / "train.parquet")
    return sum(batch.num_rows for batch in data.scanner(columns=["item", "price", "click", *COLUMNS]).to_batches())


def ours(folder: Path, window: int = 16_384) -> int:
    from gem_data.sources.files import load

    source = load(path=folder, train=("train.parquet",), test=("test.parquet",), window=window)
    return sum(batch.rows for batch in source.batches("train", batch_size=BATCH, seed=0))


class PerRow(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The usual data set: a table in memory, a dictionary of tensors for each row, made from Arrow's memory or from Python's lists."""

    def __init__(self, table: pa.Table, *, python: bool) -> None:
        self.python = python
        self.lists = {name: table[name].combine_chunks() for name in COLUMNS}
        self.scalars = {name: table[name].to_numpy() for name in ("item", "price", "click")}

    def __len__(self) -> int:
        return len(self.scalars["item"])

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        values = [column[row].as_py() if self.python else column[row].values.to_numpy() for column in self.lists.values()]
        out = {name: torch.tensor(value) for name, value in zip(self.lists, values, strict=True)}
        return out | {name: torch.tensor(column[row]) for name, column in self.scalars.items()}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    out = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in COLUMNS}
    return out | {name: torch.stack([row[name] for row in rows]) for name in ("item", "price", "click")}


def per_row(folder: Path, *, python: bool = False, workers: int = 0) -> int:
    data = PerRow(pa.parquet.read_table(folder / "train.parquet"), python=python)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers, collate_fn=padded)
    return sum(len(batch["item"]) for batch in loader)


class Streamed(torch.utils.data.IterableDataset[Any]):
    """Our source for a loader's worker process: what sending batches between processes costs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __iter__(self) -> Iterator[Any]:
        from gem_data.sources.files import load

        yield from load(path=self.folder, train=("train.parquet",), test=("test.parquet",)).batches("train", batch_size=BATCH, seed=0)


def in_process(folder: Path) -> int:
    """Our source in one worker process of torch's DataLoader."""
    return sum(batch.rows for batch in torch.utils.data.DataLoader(Streamed(folder), batch_size=None, num_workers=1))


WAYS: dict[str, Callable[[Path], int]] = {
    "pyarrow scan": scan,
    "gem_data files": ours,
    "gem_data files in a worker process": in_process,
    "per-row Dataset of arrays, padding collate": per_row,
    "per-row Dataset of arrays, padding collate, two worker processes": partial(per_row, workers=2),
    "per-row Dataset of lists, padding collate": partial(per_row, python=True),
    "per-row Dataset of lists, padding collate, two worker processes": partial(per_row, python=True, workers=2),
}


def rates(folder: Path, rows: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows a second of each way, and processor time a row; the rounds alternate between the ways, after one that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    busy: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):
        for name, way in WAYS.items():
            begun, worked = time.perf_counter(), sum(os.times()[:4])
            assert way(folder) == rows
            gc.collect()  # joins what worker processes are left, so that their time counts
            if turn:
                seconds[name].append(time.perf_counter() - begun)
                busy[name].append(sum(os.times()[:4]) - worked)
    scanned = statistics.median(seconds["pyarrow scan"])
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        cpu = statistics.median(busy[name]) / rows
        yield {
            "what": name,
            "unit": "rows/s",
            "value": round(rows / middle),
            "of_scan": round(scanned / middle, 3),
            "cpu_us_a_row": round(1e6 * cpu, 1),
        }


def _peak(task: str, folder: Path, window: int, sender: Any) -> None:
    import gem_data.sources.files

    assert gem_data.sources.files
    rows = 0 if task == "imports" else scan(folder) if task == "scan" else ours(folder, window)
    # Not getrusage: there a new process starts with the peak of the one that made it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    sender.send((rows, int(status["VmHWM"].split()[0]) / 1024))


def peaks(folder: Path, window: int) -> Iterator[dict[str, Any]]:
    """Peak resident memory of fresh processes: imports alone, a bare scan, the source."""
    size = (folder / "train.parquet").stat().st_size / 2**20
    yield {"what": "size of the file", "unit": "MiB", "value": round(size)}
    for task in ("imports", "scan", "source"):
        receiver, sender = multiprocessing.get_context("spawn").Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(target=_peak, args=(task, folder, window, sender))
        process.start()
        rows, peak = receiver.recv()
        process.join()
        yield {"what": f"peak memory, {task}, window {window}", "unit": "MiB", "value": round(peak), "rows": rows}


def _processor() -> str:
    """The processor by its own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=40_000, help="rows of the timed file; 0 leaves the timing out")
    parser.add_argument("--large-rows", type=int, default=280_000, help="rows of the file for the memory figure; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--row-group", type=int, default=4096, help="of the timed file")
    parser.add_argument("--window", type=int, default=2048, help="shuffle window and row group of the memory figure")
    parser.add_argument("--out", type=Path, help="folder for cpu_feed.csv and cpu_feed_memory.csv")
    given = parser.parse_args()
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": f"{os.cpu_count()} cores of {_processor()}",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, pyarrow {pa.__version__}",
        "load_before": round(os.getloadavg()[0], 2),
    }
    with tempfile.TemporaryDirectory() as name:
        if given.rows:
            timed = write(Path(name), given.rows, given.row_group)
            save(list(rates(timed, given.rows, given.rounds)), about, given.out, "cpu_feed.csv")
        if given.large_rows:
            large = write(Path(name), given.large_rows, given.window)
            save(list(peaks(large, given.window)), about, given.out, "cpu_feed_memory.csv")


def save(records: list[dict[str, Any]], about: dict[str, Any], folder: Path | None, name: str) -> None:
    """Print the records, and write them with what was measured where, if there is a folder."""
    for record in records:
        print(record)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, [*records[-1], *about])
            writer.writeheader()
            writer.writerows({**record, **about} for record in records)


if __name__ == "__main__":
    main()
