"""Run by test_memory_ranks.py, once for each rank: ``activations`` under ``fsdp``, ``ddp`` and ``experts``; saves losses and weights by policy,
and what ranks wait for gradients under ``ddp``.

usage: ranks_memory.py FOLDER RANK WORLD
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_experts import spread, train
from torch import nn

from gem_core.spec import ParallelContext, Topology
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.memory import storing
from gem_parallel.memory.activations import Activations

LAYOUTS = ((2, "fsdp", 1), (2, "ddp", 1))
"""``(degree of experts, dense strategy, replicas)``."""
RUNS: dict[str, dict[str, Any]] = {
    "keep": {"policies": [{"pattern": "*", "policy": "keep"}]},
    "mixed": {"policies": [{"pattern": "layers.0", "policy": "offload"}, {"pattern": "layers.1", "policy": "recompute"}]},
    "planned": {"budget": 1.0, "policies": [{"pattern": "layers.0", "policy": "offload"}]},
}


def ddp_waits(context: ParallelContext) -> list[float]:
    """Seconds that each backward waits for gradients under ``ddp``, where the first rank is slow by 0.2 s before it."""
    model = nn.Linear(8, 8)
    called, seconds = DataParallel().apply(model, context), []
    for _ in range(3):
        LEDGER.start()
        loss = called(torch.ones(4, 8)).sum()
        if context.rank == 0:
            time.sleep(0.2)
        loss.backward()
        seconds.append(sum(entry.exposed for entry in LEDGER.stop() if entry.name == "dense: wait for gradients"))
    return seconds


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    storing.SMALLEST = 1  # the model is tiny
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    saved: dict[str, Any] = {"runs": {}, "plans": {}}
    for layout in LAYOUTS:
        for name, options in RUNS.items():
            model, called, _ = spread("sum", *layout, context)
            strategy = Activations(**options)
            saved["runs"][layout, name] = train(model, strategy.apply(called, context), rank, world)
            saved["plans"][layout, name] = dict(strategy.describe())
    saved["waits"] = ddp_waits(context)
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
