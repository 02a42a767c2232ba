"""Time the sdpa backends beside the references on a CPU: processor seconds of one thread, which a busy machine does not distort.

    python3 packages/gem-kernels/benchmarks/sdpa.py [--rows 1024] [--wall 2]

``--wall N`` gives wall time with N threads instead.
"""

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gem_kernels.ops import sdpa

LONGEST, HEADS, DIM, SEEDS = 50, 4, 16, 8


def milliseconds(call: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Median of seven calls after two for warming up."""
    call()
    call()
    times = []
    for _ in range(7):
        start = clock()
        call()
        times.append(clock() - start)
    return 1000 * median(times)


def both(function: Callable[[], Tensor], leaves: list[Tensor], clock: Callable[[], float]) -> str:
    def forward() -> None:
        with torch.no_grad():
            function()

    def step() -> None:
        out = function()
        torch.autograd.grad([out], leaves, [torch.ones_like(out)])

    return f"forward {milliseconds(forward, clock):7.1f} ms   with backward {milliseconds(step, clock):7.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--wall", type=int, default=0, metavar="N", help="wall time with N threads")
    options = parser.parse_args()
    torch.set_num_threads(options.wall or 1)
    clock = time.perf_counter if options.wall else time.process_time

    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, LONGEST + 1, (options.rows,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    q, k, v = (torch.randn(int(offsets[-1]), HEADS, DIM, generator=generator).requires_grad_() for _ in range(3))
    seeds = torch.randn(SEEDS, HEADS, DIM, generator=generator).requires_grad_()
    backends = {"reference": lambda op: import_module(f"gem_core.ops.{op}").reference, "sdpa": lambda op: getattr(sdpa, op)}
    for name, extra in {"jagged_attention": {}, "causal": {"causal": True}, "window 8": {"window": 8}}.items():
        for backend, find in backends.items():
            attention = find("jagged_attention")
            timed = both(lambda f=attention, o=extra: f(q, k, v, offsets, offsets, max_q=LONGEST, max_k=LONGEST, **o), [q, k, v], clock)
            print(f"{name:>18} {backend:>10}   {timed}", flush=True)
    for backend, find in backends.items():
        pooled = find("pooled_attention")
        print(f"{'pooled_attention':>18} {backend:>10}   {both(lambda f=pooled: f(seeds, k, v, offsets, max_k=LONGEST), [seeds, k, v], clock)}")


if __name__ == "__main__":
    main()
