"""What the ``torchrec`` engine costs over calling torchrec or fbgemm itself, and the memory it takes to make tables; in one process on the CPU.

usage: python3 packages/gem-parallel/benchmarks/cpu_engines.py [--steps N] [--write]

All sides look up the same ids of the same tables, run backward with the same gradient, and update by fused row-wise AdaGrad. torchrec is its sharded
collection on one rank, given tensors of its own kind. Sides take turns, and the difference is the median over turns of the ratio of their CPU times,
which a busy machine disturbs least.

Memory is the peak of a fresh process over what it held after fbgemm was loaded.
``--write`` adds lines to results/cpu-engines.csv.
"""

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.batch import Jagged, KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse.copies import Copies
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.native import load_fbgemm
from gem_parallel.sparse.placement import Cluster, Place
from gem_parallel.sparse.sharded import ShardedGroup, Storage, _keyed_jagged_tensor
from gem_parallel.sparse.shards import tbe_options

RESULTS = Path(__file__).parent / "results" / "cpu-engines.csv"
OPTIMIZER = SparseOptimizer(name="rowwise_adagrad", lr=0.05)
CASES = {
    "sum of 20 ids, 8 tables x 100,000 x 64, 2,048 rows": (8, 100_000, 64, "sum", 2048, 20),
    "ids one by one, 4 tables x 100,000 x 64, 50,000 ids each": (4, 100_000, 64, "none", 2500, 20),
    "sum of 2 ids, 26 tables x 10,000 x 16, 1,024 rows": (26, 10_000, 16, "sum", 1024, 2),
}
TURNS = 13_000_000
"""Floats looked up by which ``--steps`` counts: small steps are taken more often."""
MEMORY_ROWS, MEMORY_DIM = 4_000_000, 64


def tables_of(count: int, rows: int, dim: int, pooling: str) -> tuple[TableSpec, ...]:
    return tuple(TableSpec(name=f"t{i}", rows=rows, dim=dim, features=(f"f{i}",), pooling=pooling, init_scale=0.1) for i in range(count))


def batch_of(tables: tuple[TableSpec, ...], rows: int, ids: int) -> KeyedJagged:
    generator, offsets = torch.Generator().manual_seed(0), torch.arange(0, rows * ids + 1, ids)
    columns = {t.features[0]: Jagged(torch.randint(0, t.rows, (rows * ids,), generator=generator), offsets, ids) for t in tables}
    return KeyedJagged.from_columns(columns, rows)  # as data sources make it


def ours(tables: tuple[TableSpec, ...], batch: KeyedJagged, grad: Tensor) -> Callable[[], None]:
    engine = TorchRecEmbeddings(tables, OPTIMIZER, device="cpu", seed=1)
    axis = 0 if tables[0].pooling == "none" else 1

    def step() -> None:
        engine.zero_grad()
        torch.autograd.backward(list(engine(batch).values()), list(grad.split(grad.shape[axis] // len(tables), axis)))
        engine.step()

    return step


def direct(tables: tuple[TableSpec, ...], batch: KeyedJagged, grad: Tensor) -> Callable[[], None]:
    module = load_fbgemm("cpu")
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

    tbe: Any = module.SplitTableBatchedEmbeddingBagsCodegen(
        [(t.rows, t.dim, EmbeddingLocation.HOST, module.ComputeDevice.CPU) for t in tables],
        pooling_mode=PoolingMode.NONE if tables[0].pooling == "none" else PoolingMode.SUM,
        device=torch.device("cpu"),
        **tbe_options(OPTIMIZER, "fp32"),
    )
    axis = 0 if tables[0].pooling == "none" else 1

    def step() -> None:
        found = tbe(indices=batch.values, offsets=batch.offsets)  # users of the vectors take them apart by feature, on either side
        torch.autograd.backward(list(found.split(found.shape[axis] // len(tables), axis)), list(grad.split(grad.shape[axis] // len(tables), axis)))

    return step


def collection(tables: tuple[TableSpec, ...], batch: KeyedJagged, grad: Tensor) -> Callable[[], None]:
    places = {t.name: Place(sharding="table_wise", ranks=(0,)) for t in tables}
    cluster = Cluster(world=1, local=1, device="cpu")
    bags = tables[0].pooling != "none"
    copies = Copies(cluster=cluster, replicas=1, mesh=None)
    group = ShardedGroup(tables, places, OPTIMIZER, torch.device("cpu"), bags=bags, storage=Storage(), copies=copies)
    given, axis = _keyed_jagged_tensor(batch), 1 if bags else 0

    def step() -> None:
        found = group.module(given).wait()
        by_key = found.to_dict() if bags else {key: vectors.values() for key, vectors in found.items()}
        torch.autograd.backward([by_key[key] for key in group.keys], list(grad.split(grad.shape[axis] // len(tables), axis)))

    return step


def paired(sides: dict[str, Callable[[], None]], steps: int) -> dict[str, list[float]]:
    """CPU milliseconds of each side turn by turn, in an order that changes every time."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(steps + 3):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            begun = time.process_time()
            sides[name]()
            if turn >= 3:
                times[name].append(1e3 * (time.process_time() - begun))
    return times


def over(times: dict[str, list[float]], other: str) -> str:
    """The median over turns of the engine's time over another side's."""
    ratio = statistics.median(a / b for a, b in zip(times["engine"], times[other], strict=True))
    return f"{100 * (ratio - 1):+.1f} %"


def measure_steps(steps: int) -> list[dict[str, Any]]:
    lines = []
    for name, (count, rows, dim, pooling, batch_rows, ids) in CASES.items():
        tables = tables_of(count, rows, dim, pooling)
        batch = batch_of(tables, batch_rows, ids)
        shape = (batch.values.numel(), dim) if pooling == "none" else (batch_rows, dim * count)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        turns = steps * TURNS // (batch_rows * ids * count * dim)
        sides = {make.__name__: make(tables, batch, grad) for make in (ours, direct, collection)}
        times = paired(dict(zip(("engine", "fbgemm", "torchrec"), sides.values(), strict=True)), turns)
        figures = {side: f"{statistics.median(found):.2f}" for side, found in times.items()}
        lines.append({"what": f"step, CPU ms: {name}", **figures, "over fbgemm": over(times, "fbgemm"), "over torchrec": over(times, "torchrec")})
    return lines


def resident(what: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (the most since ``clear_refs`` was told 5), in bytes; Linux only."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{what}:"))


def print_memory() -> None:
    """Run in a process of its own: the peak over what a small engine needs, and bytes of the tables."""
    TorchRecEmbeddings(tables_of(1, 1000, MEMORY_DIM, "none"), OPTIMIZER, device="cpu", seed=1)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = resident("VmRSS")
    engine = TorchRecEmbeddings(tables_of(1, MEMORY_ROWS, MEMORY_DIM, "none"), OPTIMIZER, device="cpu", seed=1)
    print(resident("VmHWM") - before, sum(t.nbytes for piece in engine._slices for t in piece.tensors.values()))


def measure_memory() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, "--memory"], check=True, capture_output=True, text=True)
    peak, held = map(int, done.stdout.split()[-2:])
    name = f"peak of making one table of {MEMORY_ROWS:,} x {MEMORY_DIM}, MB"
    of_held = {"fbgemm": f"{held / 1e6:.0f} held", "torchrec": "", "over fbgemm": f"x {peak / held:.3f}", "over torchrec": ""}
    return {"what": name, "engine": f"{peak / 1e6:.0f}", **of_held}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print_memory()
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    releases = ", ".join(f"{name} {version(name)}" for name in ("torch", "fbgemm-gpu-cpu", "torchrec"))
    facts = {"date": date.today().isoformat(), "machine": f"{platform.machine()}, one thread", "versions": releases}
    lines = [line | facts for line in [*measure_steps(arguments.steps), measure_memory()]]
    for line in lines:
        print(", ".join(f"{name} {line[name]}" for name in line if name not in facts))
    if arguments.write:
        new = not RESULTS.exists()
        with RESULTS.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            if new:
                writer.writeheader()
            writer.writerows(lines)


if __name__ == "__main__":
    main()
