"""Microseconds of the host that a call of each op takes, forward and backward, on little data: what a step pays however small its batch.

    python3 packages/gem-kernels/benchmarks/host_time.py [--op gdpa] [--csv FILE]

``op`` is a call of the public function, which checks it and looks its kernel up; ``bound`` one of the function that a model's kernel slot holds. Each
is timed with launches through Triton and, where its release is known, with direct ones (``GEM_DIRECT_LAUNCH=1``). The device works meanwhile and is
waited for between batches of calls, outside the clock. Medians over the batches.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import gem_core.ops
from gem_kernels.bench.backends import resolve
from gem_kernels.bench.cli import machine
from gem_kernels.bench.measure import flat
from gem_kernels.bench.shapes import SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.bench.workloads import Workload, build
from gem_kernels.common import launcher
from gem_kernels.common.direct_launch import SWITCH, why_through_triton
from gem_kernels.plugin import gem_kernel_impls

FIELDS = ("date", "gpu", "torch", "triton", "op", "backend", "variant", "launch", "path", "mode", "us")
LENGTHS = (64, 30)
OURS = ("triton", "gluon")
BATCHES, CALLS = 15, 20
"""Few enough calls at once that the queue of the device never fills."""


def microseconds(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(BATCHES + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return round(statistics.median(times[2:]), 1)


def launches() -> Iterator[str]:
    """Each way of launching in turn, switched on while it is timed."""
    for name, switch in (("triton", "0"), ("direct", "1")):
        os.environ[SWITCH] = switch
        launcher.forget()
        if name == "triton" or why_through_triton() is None:
            yield name
        else:
            print(f"no direct launches: {why_through_triton()}", flush=True)


def timed(work: Workload, backend: str, function: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    public = getattr(gem_core.ops, work.op)
    for launch in launches():
        yield {"launch": launch, "path": "op", "mode": "fwd", "us": microseconds(lambda: work.call(lambda *a, **o: public(*a, **o, backend=backend)))}
        yield {"launch": launch, "path": "bound", "mode": "fwd", "us": microseconds(lambda: work.call(function))}
        outputs = [out for out in flat(work.call(function)) if out.requires_grad]
        upstream, leaves = [torch.ones_like(out) for out in outputs], work.leaves()
        back = microseconds(lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True))  # noqa: B023
        yield {"launch": launch, "path": "bound", "mode": "bwd", "us": back}


def rows(ops: list[str]) -> Iterator[dict[str, Any]]:
    for op in ops:
        for variant in VARIANTS_OF.get(op, ("",)):
            work = build(op, variant, SHAPES[SHAPES_OF[op][0]], list(LENGTHS), torch.bfloat16, "cuda")
            for backend in dict.fromkeys(impl.backend for impl in gem_kernel_impls() if impl.op == op and impl.backend in OURS):
                function = resolve(work, backend)
                if not isinstance(function, str):
                    about = {**machine(), "op": op, "backend": backend, "variant": variant}
                    yield from ({**about, **row} for row in timed(work, backend, function))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=list(SHAPES_OF), help="only this op; may be repeated")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    found = []
    for row in rows(options.op or list(SHAPES_OF)):
        found.append(row)
        print(*(f"{row[name]!s:>18}" for name in FIELDS[4:]), flush=True)
    if options.csv:
        options.csv.parent.mkdir(parents=True, exist_ok=True)
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(found)


if __name__ == "__main__":
    main()
