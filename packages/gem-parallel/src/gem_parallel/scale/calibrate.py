"""What a machine without a description reaches, measured by its ranks: products, copies, collectives by gloo, and what ``fully_shard`` adds to each.

usage: torchrun --nproc-per-node N -m gem_parallel.scale.calibrate FILE

Every figure is the median turn of the slowest rank, all ranks at work at once, so that ranks which share cores are measured as they train: the
quickest turn of a short work is one in which the others did not want the core. Results go into new memory each time, as those of ``fully_shard`` do:
the first touch of a page costs more than what is written to it.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.spec import ParallelContext, Topology
from gem_parallel.comm.collectives import gather_into, scatter_into
from gem_parallel.dense.fsdp import FullyShard
from gem_parallel.scale.machine import Measured

SIZE, TURNS = 512, 20
"""Rows, columns and depth of the matrix product; how often each work is timed."""
SMALL, LARGE = 1 << 10, 1 << 22
"""Bytes of a rank's part of a small and of a large collective."""
COPIED, COPIES = 1 << 21, 8
"""Bytes of a tensor that is copied, and tensors: about the weights of a block, and more than caches hold."""
TINY, BLOCKS = 8, 4
"""Width and blocks of a model that takes no time but that of starting its kernels and collectives."""
COLLECTIVES = 3 * BLOCKS + 2
"""Of a step of that model: blocks are gathered twice and scattered once, the rest is gathered once and scattered once."""

Work = Callable[[], object]


class Tiny(nn.Module):
    """A stack of narrow blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(TINY, TINY) for _ in range(BLOCKS))
        self.head = nn.Linear(TINY, TINY)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def works_of(world: int) -> dict[str, Work]:
    """What is timed; collectives where there are several ranks. Collective."""
    left, out = torch.ones(SIZE, SIZE), torch.empty(SIZE, SIZE)
    sources = [torch.zeros(COPIED // 4) for _ in range(COPIES)]
    works: dict[str, Work] = {"product": lambda: torch.mm(left, left, out=out), "copy": lambda: [source.clone() for source in sources]}
    if world > 1:
        small, large, whole = torch.zeros(SMALL // 4), torch.zeros(LARGE // 4), torch.zeros(LARGE // 4 * world)
        works["small"] = lambda: gather_into(small.new_empty(small.numel() * world), small)
        works["large"] = lambda: gather_into(large.new_empty(large.numel() * world), large)
        works["scatter"] = lambda: scatter_into(torch.empty_like(large), whole, op=dist.ReduceOp.AVG)
        works["reduce"] = lambda: dist.all_reduce(whole)
        context = ParallelContext(rank=dist.get_rank(), world=world, device="cpu", topology=Topology(world=world, device="cpu"))
        works |= {"plain": step_of(Tiny(), TINY, TINY), "sharded": step_of(FullyShard().apply(Tiny(), context), TINY, TINY)}
    return works


def step_of(module: nn.Module, rows: int, width: int) -> Work:
    """Forward and backward of a module on random rows."""
    x = torch.randn(rows, width)

    def step() -> None:
        module(x).square().mean().backward()
        module.zero_grad()

    return step


def timed(works: Mapping[str, Work], turns: int) -> dict[str, float]:
    """Seconds of the median turn of the slowest rank; works take turns, and ranks start each together. Collective."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            dist.barrier()
            begun = time.perf_counter()
            work()
            took = torch.tensor([time.perf_counter() - begun])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[name].append(float(took))
    return {name: median(each) for name, each in seconds.items()}


def measured(took: Mapping[str, float], world: int) -> Measured:
    """The figures that the times say. One rank has no links; it is given those of its memory, which nothing uses."""
    flops, memory = 2 * SIZE**3 / took["product"], 2 * COPIED * COPIES / took["copy"]
    if world == 1:
        return Measured(world=1, flops=flops, memory=memory, host=0.0, latency=0.0, bandwidth=memory, scatter=1.0, reduce=2.0)
    carried = max(took["large"] - took["small"], 1e-9)
    return Measured(
        world=world,
        flops=flops,
        memory=memory,
        host=max(0.0, (took["sharded"] - took["plain"]) / COLLECTIVES - took["small"]),
        latency=took["small"] / (world - 1).bit_length(),
        bandwidth=(world - 1) * LARGE / carried,
        scatter=max(took["scatter"] - took["small"], 1e-9) / carried,
        reduce=max(took["reduce"] - took["small"], 1e-9) / carried,
    )


def main(file: Path) -> None:
    """The work of a rank; the first one writes the figures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    found = measured(timed(works_of(world), TURNS), world)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
