"""Saving and loading a checkpoint of tables, against a plain copy of the same bytes that is flushed to disk.

    python packages/gem-core/benchmarks/cpu_checkpoint.py --gb 1 --rounds 3

Each round does all of it in turn, and files are dropped from the page cache before they are read, so that copy and load both come from the disk.
``save`` writes from the live tables and waits; ``pause`` is what training waits for when the same is written beside it (in the first one memory for
the copy is taken); ``load`` verifies the hashes and fills the tables. Target: save and load within 1.5 times the copy.
"""

import argparse
import csv
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import torch

from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.spec import SparseOptimizer, TableSpec
from gem_core.train.checkpoint.pieces import table_pieces
from gem_core.train.checkpoint.restore import restore_tables
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.checkpoint.saver import Content, Saver
from gem_core.train.world import World

TARGET = 1.5
DIMS = (32, 64, 128, 128)


def tables(nbytes: int) -> TorchEmbeddings:
    """Tables with row-wise AdaGrad state of that many bytes in all, a part for each of ``DIMS``."""
    specs = [
        TableSpec(name=f"t{i}", rows=nbytes // len(DIMS) // (4 * (dim + 1)), dim=dim, features=(f"f{i}",), init_scale=0.1)
        for i, dim in enumerate(DIMS)
    ]
    return TorchEmbeddings(specs, SparseOptimizer(), device="cpu", seed=1)


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy(source: Path, target: Path) -> None:
    """A plain copy of all files, each flushed."""
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb+") as file:
            os.fsync(file.fileno())


@contextmanager
def timed(seconds: dict[str, list[float]], name: str) -> Iterator[None]:
    """Wall seconds under a name, and the processor's under ``cpu NAME``."""
    os.sync()  # what others and the step before have left to write, and the discarding of what was removed
    start, cpu = time.perf_counter(), time.process_time()
    yield
    seconds.setdefault(name, []).append(time.perf_counter() - start)
    seconds.setdefault(f"cpu {name}", []).append(time.process_time() - cpu)


def one_round(folder: Path, live: TorchEmbeddings, seconds: dict[str, list[float]]) -> int:
    """Save at once and beside nothing, copy and load; return the bytes of the checkpoint."""

    def content(step: int) -> Content:
        return Content(step=step, pieces=table_pieces(live.table_slices()), trainer={}, about={})

    saver = Saver(folder / "checkpoints", World(), keep=1, told=lambda step, path: None)
    with timed(seconds, "save"):
        saver.save(content(1), background=False)
    for step, name in enumerate(("first pause", "pause"), 2):
        with timed(seconds, name):
            saver.save(content(step), background=True)
        saver.wait()
    saver.close()
    saved = find_checkpoint(folder)
    forget(saved.path)
    with timed(seconds, "copy"):
        copy(saved.path, folder / "copy")
    forget(saved.path)
    with timed(seconds, "load"):
        saved.verify()
        restore_tables(live, saved, updates=0)
    nbytes = sum(path.stat().st_size for path in saved.path.iterdir())
    for path in folder.iterdir():
        shutil.rmtree(path)
    return nbytes


def rows(seconds: dict[str, list[float]], nbytes: int, threads: int) -> Iterator[dict[str, object]]:
    reference = statistics.median(seconds["copy"])
    for name in ("copy", "save", "load", "first pause", "pause"):
        median = statistics.median(seconds[name])
        yield {
            "date": datetime.now(UTC).date().isoformat(),
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[1], 1),
            "torch": torch.__version__,
            "threads": threads,
            "bytes": nbytes,
            "what": name,
            "rounds": len(seconds[name]),
            "median_s": round(median, 3),
            "least_s": round(min(seconds[name]), 3),
            "most_s": round(max(seconds[name]), 3),
            "cpu_s": round(statistics.median(seconds[f"cpu {name}"]), 3),
            "of_copy": round(median / reference, 2),
            "target": TARGET if name in ("save", "load") else "",
            "command": " ".join(["python", *sys.argv]),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="10**9 bytes of tables and state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "checkpoint.csv")
    asked = parser.parse_args()
    live = tables(int(asked.gb * 1e9))
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        for _ in range(asked.rounds):
            nbytes = one_round(Path(name), live, seconds)
    found = list(rows(seconds, nbytes, torch.get_num_threads()))
    with asked.out.open("a" if asked.out.exists() else "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(found[0]))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(found)
    for row in found:
        print(
            f"{row['what']:11} {row['median_s']:8.3f} s ({row['least_s']} to {row['most_s']})  {row['of_copy']:5.2f} x copy, {row['cpu_s']} s of CPU"
        )


if __name__ == "__main__":
    main()
