"""What the engines cost on GPUs over calling torchrec or fbgemm itself, and what sending ids ahead saves.

usage: torchrun --nproc-per-node N packages/gem-parallel/benchmarks/gpu_engines.py [--steps N] [--out FILE] [--device cpu --small]

All sides of a case look up the same ids of equal tables, run backward with the same gradients and update by fused row-wise AdaGrad. Before they are
timed their vectors are compared, after a step too. They take turns, over several batches in rotation. A figure is the median over steps of
the wall time between two synchronised points, the slowest rank's; host time counts, as it does in training. ``--out`` adds lines to a file such as
results/h200.csv.
"""

import argparse
import csv
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse import engine as torchrec_engine
from gem_parallel.sparse import sharded2d
from gem_parallel.sparse.copies import Copies
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.native import load_fbgemm
from gem_parallel.sparse.placement import Cluster, Place
from gem_parallel.sparse.sharded import ShardedGroup, Storage, _keyed_jagged_tensor
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings
from gem_parallel.sparse.shards import Slice, tbe_options

OPTIMIZER = SparseOptimizer(name="rowwise_adagrad", lr=0.05)
SEED, BATCHES = 1, 4
SQUARE, PRODUCTS = 8192, 4
"""Size and number of the matrix products that stand for a dense part, in bf16: five to six milliseconds of an H200."""
CASES = {
    "16 tables x 1M x 128, 16,384 bags of 20 ids": (16, 1_000_000, 128, "sum", 16_384, 20),
    "1 table x 1M x 256, 734,000 ids one by one": (1, 1_000_000, 256, "none", 7_340, 100),
}
Step = Callable[[int], list[Tensor]]


def tables_of(count: int, rows: int, dim: int, pooling: str) -> tuple[TableSpec, ...]:
    return tuple(TableSpec(name=f"t{i}", rows=rows, dim=dim, features=(f"f{i}",), pooling=pooling, init_scale=0.1) for i in range(count))


def fill(slices: Sequence[Slice], tables: Sequence[TableSpec], seed: int) -> None:
    """Known weights in the place of drawn ones, computed where they lie: drawing billions on the host would take longer than all the rest."""
    for piece in slices:
        weight = piece.tensors["weight"]
        row, column = (torch.arange(n, device=weight.device) for n in weight.shape)
        weight.copy_(((piece.start + row)[:, None] * 131 + (piece.column + column) * 17) % 1009 / 5045 - 0.1)


torchrec_engine.draw = sharded2d.draw = fill


def batch_of(tables: tuple[TableSpec, ...], rows: int, ids: int, seed: int, device: torch.device) -> KeyedJagged:
    values = torch.randint(0, tables[0].rows, (len(tables) * rows * ids,), generator=torch.Generator().manual_seed(seed))
    starts = tuple(range(0, values.numel() + 1, rows * ids))
    offsets = torch.arange(0, values.numel() + 1, ids)
    return KeyedJagged(tuple(t.features[0] for t in tables), values, offsets, rows, starts, (ids,) * len(tables)).to(device)


class Case:
    """The sides of one case on one rank."""

    def __init__(self, shape: tuple[int, int, int, str, int, int], device: torch.device, rank: int, world: int) -> None:
        count, rows, dim, pooling, batch_rows, ids = shape
        self.tables, self.device, self.world, self.bags = tables_of(count, rows, dim, pooling), device, world, pooling != "none"
        self.batches = [batch_of(self.tables, batch_rows // world, ids, BATCHES * rank + i, device) for i in range(BATCHES)]
        vectors = batch_rows // world * (1 if self.bags else ids)
        generator = torch.Generator(device=device).manual_seed(rank)
        self.grads = [torch.randn(vectors, dim, device=device, generator=generator) / 100 for _ in self.tables]
        self.square = torch.randn(SQUARE if device.type == "cuda" else 64, SQUARE if device.type == "cuda" else 64, device=device).bfloat16()

    def engine(self, engine: Any, *, ahead: bool = False, dense: bool = False) -> Step:
        """A step of an engine; ``dense`` puts matrix products between look-up and update, and with ``ahead`` the next ids travel meanwhile."""
        side = torch.cuda.Stream(self.device) if ahead and self.device.type == "cuda" else None
        sent: dict[int, Any] = {}

        def step(number: int) -> list[Tensor]:
            engine.zero_grad()
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            found = engine(sent.pop(number, self.batches[number % BATCHES]))
            out = [found[table.features[0]] for table in self.tables]
            for _ in range(PRODUCTS if dense else 0):
                torch.mm(self.square, self.square)
            if side is not None:
                with torch.cuda.stream(side):
                    sent[number + 1] = engine.prefetch(self.batches[(number + 1) % BATCHES])
            torch.autograd.backward(out, self.grads)
            engine.step()
            return out

        return step

    def fbgemm(self) -> Step:
        """One module of fbgemm, as a user would write it in one process."""
        module = load_fbgemm(self.device.type)
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode

        on_gpu = EmbeddingLocation.DEVICE, module.ComputeDevice.CUDA
        place = on_gpu if self.device.type == "cuda" else (EmbeddingLocation.HOST, module.ComputeDevice.CPU)
        tbe: Any = module.SplitTableBatchedEmbeddingBagsCodegen(
            [(t.rows, t.dim, *place) for t in self.tables],
            pooling_mode=PoolingMode.SUM if self.bags else PoolingMode.NONE,
            device=self.device,
            **tbe_options(OPTIMIZER, "fp32"),
        )
        engine = TorchRecEmbeddings(self.tables, OPTIMIZER, device=self.device, seed=SEED)
        for mine, theirs in zip(tbe.split_embedding_weights(), engine._slices, strict=True):
            mine.copy_(theirs.tensors["weight"])
        sizes, axis = ([t.dim for t in self.tables], 1) if self.bags else ([self.grads[0].shape[0]] * len(self.tables), 0)

        def step(number: int) -> list[Tensor]:
            batch = self.batches[number % BATCHES]
            out = list(tbe(indices=batch.values, offsets=batch.offsets).split(sizes, axis))
            torch.autograd.backward(out, self.grads)
            return out

        return step

    def torchrec(self, sharding: str) -> Step:
        """torchrec's sharded collection, called with tensors of its own kind."""
        ranks = {"table_wise": lambda i: (i % self.world,), "row_wise": lambda i: tuple(range(self.world))}[sharding]
        places = {t.name: Place(sharding=sharding, ranks=ranks(i)) for i, t in enumerate(self.tables)}
        cluster = Cluster(world=self.world, local=self.world, device=self.device.type)
        copies = Copies(cluster=cluster, replicas=1, mesh=None)
        group = ShardedGroup(self.tables, places, OPTIMIZER, self.device, bags=self.bags, storage=Storage(), copies=copies)
        fill(group.slices, self.tables, SEED)
        given = [_keyed_jagged_tensor(batch) for batch in self.batches]

        def step(number: int) -> list[Tensor]:
            found = group.module(given[number % BATCHES]).wait()
            by_key = found.to_dict() if self.bags else {key: vectors.values() for key, vectors in found.items()}
            out = [by_key[key] for key in group.keys]
            torch.autograd.backward(out, self.grads)
            return out

        return step

    def sides(self) -> dict[str, Step]:
        rules = [{"pattern": t.name, "sharding": "table_wise"} for t in self.tables]
        options: dict[str, Any] = {} if self.world == 1 else {"tables": rules}
        sides = {"engine torchrec": self.engine(TorchRecEmbeddings(self.tables, OPTIMIZER, device=self.device, seed=SEED, **options))}
        sides["torchrec itself"] = self.torchrec("table_wise")
        if self.world == 1:
            sides["fbgemm itself"] = self.fbgemm()
            return sides
        for name, words in {"dense work between": {}, "dense work between, ids sent ahead": {"ahead": True}}.items():
            engine = TorchRecEmbeddings(self.tables, OPTIMIZER, device=self.device, seed=SEED, **options)
            sides[f"engine torchrec, {name}"] = self.engine(engine, dense=True, **words)
        for replicas in (1, self.world):
            sharded = Sharded2DEmbeddings(self.tables, OPTIMIZER, device=self.device, seed=SEED, replicas=replicas)
            sides[f"engine sharded_2d, replicas = {replicas}"] = self.engine(sharded)
        return sides


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def compare(sides: dict[str, Step]) -> str:
    """What differs between the sides' vectors in the first two steps; the second sees the update of the first."""
    first = None
    for name, step in sides.items():
        seen = [[vectors.detach().clone() for vectors in step(number)] for number in (0, 0)]
        first = first or seen
        for one, other in zip((v for vs in first for v in vs), (v for vs in seen for v in vs), strict=True):
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return f"{name}: off by {float((one - other).abs().max()):.3g}"
    return ""


def measure(sides: dict[str, Step], steps: int, device: torch.device) -> dict[str, float]:
    """The median milliseconds of a step of each side."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(steps + 3):
        for name in list(sides) if turn % 2 else list(sides)[::-1]:
            wait(device)
            begun = time.perf_counter()
            sides[name](turn)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


def slowest(figures: dict[str, float]) -> dict[str, float]:
    table = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(figures, table.tolist(), strict=True))


def release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a hundredth of the rows: whether it runs")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if asked.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    lines = []
    for name, shape in CASES.items():
        if asked.small:
            shape = (shape[0], shape[1] // 100, shape[2], shape[3], shape[4] // 100, shape[5])
        sides = Case(shape, device, rank, world).sides()
        wrong: list[Any] = [None] * world
        dist.all_gather_object(wrong, compare(sides))
        if any(wrong):
            raise SystemExit(f"{name}: {wrong}")
        figures = slowest(measure(sides, asked.steps, device))
        for side, ms in figures.items():
            over = f"{100 * (ms / figures['torchrec itself'] - 1):+.1f} %"
            facts = {"date": date.today().isoformat(), "gpu": torch.cuda.get_device_name() if device.type == "cuda" else "", "world": world}
            releases = {name: release(name) for name in ("torch", "torchrec", "fbgemm-gpu")}
            lines.append({**facts, **releases, "case": name, "side": side, "ms": f"{ms:.3f}", "over torchrec": over, "note": ""})
            if rank == 0:
                print(f"{world} x {name}: {side} {ms:.3f} ms, {over}", flush=True)
        del sides
    if rank == 0 and asked.out is not None:
        new = not asked.out.exists()
        with asked.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(lines[0]))
            if new:
                writer.writeheader()
            writer.writerows(lines)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
