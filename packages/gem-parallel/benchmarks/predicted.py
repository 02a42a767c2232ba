"""Steps that the cost model predicts beside steps that gloo ranks take, on this machine.

usage: python3 packages/gem-parallel/benchmarks/predicted.py [--ranks 2 4] [--write]

Each run calibrates five figures: the speed of the dense part when all ranks compute and nothing is sent; latency and bandwidth of an all-gather,
from a small and a large one; how much longer a reduce-scatter of the same parts takes; the speed of a copy. From these, steps (forward and backward)
of several layouts are predicted. Calibration and steps take turns, and the quickest turn of each counts. Ranks that share cores with gloo's own
threads hide little, so the prediction is given twice: with the overlap of the model, and with nothing hidden.
``--write`` makes results/predicted.csv anew.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, ParallelContext, Tier, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.dense import configured
from gem_parallel.costmodel.step import Step
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.dense.fsdp import FullyShard

RESULTS = Path(__file__).parent / "results" / "predicted.csv"
WIDTH, BLOCKS, ROWS, TURNS = 512, 6, 192, 30
SMALL, LARGE, COPIED = 1 << 10, 1 << 22, 1 << 25
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {"ddp": {}},
    "fsdp": {"fsdp": {}},
    "fsdp, weights kept": {"fsdp": {"reshard": False}},
    "fsdp, 2 replicas": {"fsdp": {"replicas": 2}},
}


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def timed(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of the quickest turn of the slowest rank; the works take turns, and ranks start each together."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(TURNS):
        for name, work in works.items():
            dist.barrier()
            begun = time.perf_counter()
            work()
            took = torch.tensor([time.perf_counter() - begun])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            best[name] = min(best[name], float(took))
    return best


def trained(module: nn.Module) -> Callable[[], None]:
    rows = torch.randn(ROWS, WIDTH)

    def step() -> None:
        module(rows).square().mean().backward()
        module.zero_grad()

    return step


def gathering(size: int, world: int) -> Callable[[], None]:
    part, whole = torch.zeros(size // 4), torch.zeros(size // 4 * world)
    return lambda: dist.all_gather_into_tensor(whole, part)


def scattering(size: int, world: int) -> Callable[[], None]:
    part, whole = torch.zeros(size // 4), torch.zeros(size // 4 * world)
    return lambda: dist.reduce_scatter_tensor(part, whole)


def copying(size: int) -> Callable[[], object]:
    source, target = torch.zeros(size // 4), torch.zeros(size // 4)
    return lambda: target.copy_(source)


def rank_main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    works: dict[str, Callable[[], object]] = {"compute": trained(Chain()), "small": gathering(SMALL, world), "large": gathering(LARGE, world)}
    works["scatter"], works["copy"] = scattering(LARGE, world), copying(COPIED)
    for name, strategies in LAYOUTS.items():
        ((kind, options),) = strategies.items()
        if world % options.get("replicas", 1) == 0 and world > options.get("replicas", 1):
            strategy: Any = DataParallel() if kind == "ddp" else FullyShard(**options)
            works[name] = trained(strategy.apply(Chain(), context))
    best = timed(works)
    if rank == 0:
        (folder / "out.json").write_text(json.dumps(best))
    dist.destroy_process_group()


def predicted(ran: dict[str, float], world: int, strategies: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Seconds of a step: with overlap, and with nothing hidden."""
    chain = Chain()
    parts = [("rest", chain.head), *((f"layers.{i}", layer) for i, layer in enumerate(chain.layers))]
    counts = [(name, sum(p.numel() for p in part.parameters())) for name, part in parts]
    blocks = tuple(BlockFacts(name=name, parameters=count, flops=2.0 * count, saved=0.0) for name, count in counts)
    speed = 3 * ROWS * sum(block.flops for block in blocks) / ran["compute"]
    hops = (world - 1).bit_length()
    link = Tier(name="machine", size=world, bandwidth=(world - 1) * LARGE / (ran["large"] - ran["small"]), latency=ran["small"] / hops)
    machine = Topology(
        world=world, device="cpu", tiers=(link,), source="measured", memory_bandwidth=2 * COPIED / ran["copy"], peak_flops={"fp32": speed}
    )
    scatter = (ran["scatter"] - ran["small"]) / (ran["large"] - ran["small"])
    reached = Assumed(matmul=1.0, memory=1.0, links=1.0, scatter=scatter, launch=0.0, row_cv=0.0)
    model = ModelFacts(blocks=blocks, dtype="fp32", row_cv=0.0)
    tables = EmbeddingPlan(world=world, tables=(), held=(0,) * world, working=0, sent={})
    dense = configured(machine, strategies, model, 1)
    done = Step(machine, dense, model, BatchFacts(rows=ROWS, ids={}, distinct={}), tables, reached).outcome()
    seconds = done.seconds - done.parts["optimiser"]
    return seconds, done.compute + done.parts.get("copies", 0.0) + sum(done.carried.values())


def run(world: int) -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--rank-of", str(world), folder]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        ranks = [subprocess.Popen([*words, str(rank)], env=quiet) for rank in range(world)]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")
        ran = json.loads((Path(folder) / "out.json").read_text())
    ratio = f"{ran['scatter'] / ran['large']:.1f} x the time of the all-gather"
    lines: list[tuple[str, ...]] = [(str(world), "reduce-scatter of the same parts", "", "", "", ratio, "", "")]
    print("  ".join(lines[0]), flush=True)
    for name, strategies in LAYOUTS.items():
        if name in ran:
            hidden, open_ = predicted(ran, world, strategies)
            milli = [f"{1e3 * seconds:.1f}" for seconds in (ran["compute"], hidden, open_, ran[name])]
            lines.append((str(world), name, *milli, f"{hidden / ran[name] - 1:+.0%}", f"{open_ / ran[name] - 1:+.0%}"))
            print("  ".join(lines[-1]), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rank-of", nargs=3, metavar=("WORLD", "FOLDER", "RANK"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of:
        rank_main(Path(chosen.rank_of[1]), int(chosen.rank_of[2]), int(chosen.rank_of[0]))
        return
    head = ("ranks", "layout", "compute ms", "predicted ms", "predicted ms, nothing hidden", "measured ms", "off", "off, nothing hidden")
    print("  ".join(head))
    lines = [line for world in chosen.ranks for line in run(world)]
    if chosen.write:
        facts = (date.today().isoformat(), f"{platform.machine()}, 2 cores", f"torch {torch.__version__}")
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([(*head, "date", "machine", "versions"), *((*line, *facts) for line in lines)])


if __name__ == "__main__":
    main()
