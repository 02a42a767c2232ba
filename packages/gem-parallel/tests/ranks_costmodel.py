"""Run by test_costmodel_ranks.py, once for each rank: one step of ``fsdp`` and of ``sharded_2d`` in every grid, with the bytes that were counted.

usage: ranks_costmodel.py FOLDER RANK WORLD
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import TABLES, global_rows, pack
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_core.spec import ParallelContext, SparseOptimizer, Topology
from gem_parallel.dense.fsdp import FullyShard
from gem_parallel.mesh import device_mesh, layout_of
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings

WIDTH = 16
MICRO = 3
DELAYED = [(replicas, reduce) for replicas in (2, 4) for reduce in ("last", "each")]
GRIDS = [(replicas, reshard) for replicas in (1, 2, 4) for reshard in (True, False)]


class Chain(nn.Module):
    """Three blocks and a head, of sizes that four ranks share without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def dense(context: ParallelContext, replicas: int, reshard: bool) -> dict[str, Any]:
    strategy, module = FullyShard(replicas=replicas, reshard=reshard), Chain()
    strategy.apply(module, context)
    module(torch.ones(3, WIDTH)).sum().backward()
    return {"sent": strategy.traffic.take(), "held": sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))}


def delayed(context: ParallelContext, replicas: int, reduce: str) -> dict[str, int]:
    """What a step of several micro-batches sends."""
    strategy, module = FullyShard(replicas=replicas, reduce=reduce), Chain()
    strategy.apply(module, context)
    for number in range(MICRO):
        with strategy.micro_batch(last=number + 1 == MICRO):
            module(torch.ones(3, WIDTH)).sum().backward()
    return strategy.traffic.take()


def tables(replicas: int) -> dict[str, int]:
    engine = Sharded2DEmbeddings(TABLES, SparseOptimizer(name="sgd"), device="cpu", seed=1, replicas=replicas, prefetch=False)
    sum(vectors.sum() for vectors in engine(pack(global_rows(0))).values()).backward()
    engine.step()
    return engine.traffic.take()


def groups(world: int) -> dict[str, list[int]]:
    """The ranks of this rank's groups in one layout, and whether a second call gives the same groups."""
    layout = layout_of(world, replicate=2, expert=2, sparse_replicate=2)
    found = {}
    for part in ("dense", "weights", "sparse"):
        mesh = device_mesh(layout, part, "cpu")  # type: ignore[arg-type]
        assert device_mesh(layout, part, "cpu:0") is mesh  # type: ignore[arg-type]
        for name in mesh.mesh_dim_names or ():
            found[f"{part} {name}"] = dist.get_process_group_ranks(mesh.get_group(name))
    return found


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    saved: dict[str, Any] = {
        "groups": groups(world),
        "dense": {grid: dense(context, *grid) for grid in GRIDS},
        "delayed": {how: delayed(context, *how) for how in DELAYED},
        "tables": {replicas: tables(replicas) for replicas in (1, 2, 4)},
    }
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
