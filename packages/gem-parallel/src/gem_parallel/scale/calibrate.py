"""What a machine without a description reaches, measured by its ranks: products, copies, and collectives by gloo.

usage: torchrun --nproc-per-node N -m gem_parallel.scale.calibrate FILE

Every figure is the quickest turn of the slowest rank, all ranks at work at once, so that ranks which share cores are measured as they train.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from gem_parallel.comm.collectives import gather_into, scatter_into
from gem_parallel.scale.machine import Measured

SIZE, TURNS = 512, 20
"""Rows, columns and depth of the matrix product; how often each work is timed."""
SMALL, LARGE, COPIED = 1 << 10, 1 << 22, 1 << 23
"""Bytes of a rank's part of a small and of a large collective; of a copy."""

Work = Callable[[], object]


def works_of(world: int) -> dict[str, Work]:
    """What is timed; collectives where there are several ranks."""
    left, out = torch.ones(SIZE, SIZE), torch.empty(SIZE, SIZE)
    source = torch.zeros(COPIED // 4)
    works: dict[str, Work] = {"product": lambda: torch.mm(left, left, out=out), "copy": source.clone}
    if world > 1:
        works |= {name: _collective(gather_into, size, world, whole_first=True) for name, size in (("small", SMALL), ("large", LARGE))}
        works["scatter"] = _collective(scatter_into, LARGE, world, whole_first=False)
    return works


def _collective(call: Callable[..., object], size: int, world: int, *, whole_first: bool) -> Work:
    part, whole = torch.zeros(size // 4), torch.zeros(size // 4 * world)
    return lambda: call(whole, part) if whole_first else call(part, whole)


def timed(works: Mapping[str, Work], turns: int) -> dict[str, float]:
    """Seconds of the quickest turn of the slowest rank; works take turns, and ranks start each together. Collective."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(turns):
        for name, work in works.items():
            dist.barrier()
            begun = time.perf_counter()
            work()
            took = torch.tensor([time.perf_counter() - begun])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            best[name] = min(best[name], float(took))
    return best


def measured(best: Mapping[str, float], world: int) -> Measured:
    """The figures that the times say. One rank has no links; it is given those of its memory, which nothing uses."""
    flops, memory = 2 * SIZE**3 / best["product"], 2 * COPIED / best["copy"]
    if world == 1:
        return Measured(world=1, flops=flops, memory=memory, latency=0.0, bandwidth=memory, scatter=1.0)
    carried = max(best["large"] - best["small"], 1e-9)
    return Measured(
        world=world,
        flops=flops,
        memory=memory,
        latency=best["small"] / (world - 1).bit_length(),
        bandwidth=(world - 1) * LARGE / carried,
        scatter=max(best["scatter"] - best["small"], 1e-9) / carried,
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
