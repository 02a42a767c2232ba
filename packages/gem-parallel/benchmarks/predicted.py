"""Steps that the cost model predicts beside steps that gloo ranks take, on this machine.

usage: python3 packages/gem-parallel/benchmarks/predicted.py [--ranks 2 4] [--write]

Each run calibrates the machine (``gem_parallel.scale.calibrate``: copies, collectives, what ``fully_shard`` adds to each), and the speed of the dense
part when all ranks compute and nothing is sent. From these, steps (forward and backward) of several layouts are predicted. Calibration and steps take
turns, and the median turn of each counts.
``--write`` makes results/predicted.csv anew, with the load of the machine: beside other work these figures are noise.
"""

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, ParallelContext, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.dense import configured
from gem_parallel.costmodel.step import Step
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.dense.fsdp import FullyShard
from gem_parallel.scale.calibrate import measured, step_of, timed, works_of
from gem_parallel.scale.machine import Measured

RESULTS = Path(__file__).parent / "results" / "predicted.csv"
WIDTH, BLOCKS, ROWS, TURNS = 512, 6, 192, 30
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


def rank_main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    works = {**works_of(world), "compute": step_of(Chain(), ROWS, WIDTH)}
    for name, strategies in LAYOUTS.items():
        ((kind, options),) = strategies.items()
        if world % options.get("replicas", 1) == 0 and world > options.get("replicas", 1):
            strategy: Any = DataParallel() if kind == "ddp" else FullyShard(**options)
            works[name] = step_of(strategy.apply(Chain(), context), ROWS, WIDTH)
    took = timed(works, TURNS)
    if rank == 0:
        (folder / "out.json").write_text(json.dumps(took))
    dist.destroy_process_group()


def predicted(machine: Measured, compute: float, strategies: dict[str, dict[str, Any]]) -> float:
    """Seconds of a step without its optimiser; ``compute`` is what one takes when nothing is sent."""
    chain = Chain()
    parts = [("rest", chain.head), *((f"layers.{i}", layer) for i, layer in enumerate(chain.layers))]
    counts = [(name, sum(p.numel() for p in part.parameters())) for name, part in parts]
    blocks = tuple(BlockFacts(name=name, parameters=count, flops=2.0 * count, saved=0.0) for name, count in counts)
    speed = 3 * ROWS * sum(block.flops for block in blocks) / compute
    topology = replace(machine.topology(), peak_flops={"fp32": speed})
    model = ModelFacts(blocks=blocks, dtype="fp32", row_cv=0.0)
    tables = EmbeddingPlan(world=machine.world, tables=(), held=(0,) * machine.world, working=0, sent={})
    assumed = Assumed(matmul=1.0, row_cv=0.0, **machine.assumed())
    nothing = BatchFacts(rows=ROWS, ids={}, distinct={})
    done = Step(topology, configured(topology, strategies, model, 1), model, nothing, tables, assumed).outcome()
    return done.seconds - done.parts["optimiser"]


def run(world: int) -> list[tuple[str, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--rank-of", str(world), folder]
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        ranks = [subprocess.Popen([*words, str(rank)], env=quiet) for rank in range(world)]
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")
        ran = json.loads((Path(folder) / "out.json").read_text())
    machine = measured(ran, world)
    facts = f"copies {machine.memory / 1e9:.1f} GB/s, host {1e6 * machine.host:.0f} us and network {1e6 * ran['small']:.0f} us a collective, "
    facts += f"{machine.bandwidth / 1e9:.2f} GB/s, a scatter {machine.scatter:.1f} x and an all-reduce {machine.reduce:.1f} x a gather"
    lines: list[tuple[str, ...]] = [(str(world), "calibrated", "", "", "", facts)]
    print("  ".join(lines[0]), flush=True)
    for name, strategies in LAYOUTS.items():
        if name in ran:
            said = predicted(machine, ran["compute"], strategies)
            milli = [f"{1e3 * seconds:.1f}" for seconds in (ran["compute"], said, ran[name])]
            lines.append((str(world), name, *milli, f"{said / ran[name] - 1:+.0%}"))
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
    head = ("ranks", "layout", "compute ms", "predicted ms", "measured ms", "off")
    print("  ".join(head))
    lines = [line for world in chosen.ranks for line in run(world)]
    if chosen.write:
        facts = (
            date.today().isoformat(),
            f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.0f}",
            f"torch {torch.__version__}",
        )
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([(*head, "date", "machine", "versions"), *((*line, *facts) for line in lines)])


if __name__ == "__main__":
    main()
