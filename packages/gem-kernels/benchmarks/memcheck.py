"""Run every kernel on small calls under compute-sanitizer's memcheck: forward and backward, each backend and variant of this package.

    python3 packages/gem-kernels/benchmarks/memcheck.py [--op gdpa] [--jobs 8] [--tool memcheck]

Kernels are compiled first, side by side and without the tool. Then one program makes all calls under it: of two programs under the tool at once the
second waits for ever in its first call of CUDA. Torch's caching allocator is off there, so that an access past a tensor leaves its allocation. Ends
with 1 if the tool finds anything.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from glob import glob
from shutil import which
from typing import Any

from gem_kernels.bench.shapes import SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.plugin import gem_kernel_impls

LENGTHS = (70, 0, 300)
OURS = ("triton", "gluon", "gluon_fp8")
FOUND = 9
"""Exit code that the tool gives a program in which it found something."""
CALLS: dict[str, list[dict[str, Any]]] = {
    "jagged_attention": [{}, {"causal": True, "window": 40}, {"return_lse": True}],
    "gdpa": [{}, {"window": 40, "activation": "silu"}],
    "hstu_attention": [{}, {"causal": False, "window": 40}],
    "pffn": [{}, {"activation": "gelu_fast"}],
}
"""Options that reach other kernels, or other branches, than an op's plain call."""


def sanitizer() -> str:
    """Path of compute-sanitizer; ends the program where there is none."""
    found = which("compute-sanitizer") or next(iter(sorted(glob("/usr/local/cuda*/bin/compute-sanitizer"))), None)
    if found is None:
        sys.exit("compute-sanitizer is not on PATH and not under /usr/local/cuda*; it comes with the CUDA toolkit")
    return found


def calls(op: str) -> Iterator[tuple[str, Any]]:
    """A description and a workload for each small call of an op."""
    import torch

    from gem_kernels.bench.workloads import build

    for variant in VARIANTS_OF.get(op, ("",)):
        for dtype in (torch.bfloat16, torch.float32):
            for options in CALLS.get(op, [{}]):
                work = build(op, variant, SHAPES[SHAPES_OF[op][-1]], list(LENGTHS), dtype, "cuda")
                work.arguments.update(options)
                yield f"{op} {variant} {dtype} {options}", work


def run(op: str) -> None:
    """Each backend on each call that it fits."""
    import torch

    from gem_kernels.bench.backends import resolve
    from gem_kernels.bench.measure import flat

    done = 0
    for backend in dict.fromkeys(impl.backend for impl in gem_kernel_impls() if impl.op == op and impl.backend in OURS):
        for name, work in calls(op):
            function = resolve(work, backend)
            if isinstance(function, str):
                continue
            outputs = [out for out in flat(work.call(function)) if out.requires_grad]
            torch.autograd.grad(outputs, work.leaves(), [torch.randn_like(out) for out in outputs])
            torch.cuda.synchronize()
            print(f"ran {backend} {name}", flush=True)
            done += 1
    if not done:
        sys.exit(f"no call of {op} fits this machine")


def compiled(op: str) -> str:
    """What went wrong where the calls of an op run without the tool; empty if nothing."""
    program = subprocess.run([sys.executable, __file__, "--run", op], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if program.returncode == 0 else f"{op} fails without the tool:\n" + "\n".join(program.stdout.splitlines()[-20:])


def check(tool: str, ops: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code and lines of all calls under the tool; calls that have run are shown at once."""
    command = [sanitizer(), "--tool", tool, "--target-processes", "application-only", "--error-exitcode", str(FOUND)]
    words = [word for op in ops for word in ("--run", op)]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    lines = []
    with subprocess.Popen(
        [*command, sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as program:
        for line in program.stdout or ():
            lines.append(line.rstrip())
            if line.startswith("ran "):
                print(line, end="", flush=True)
    return program.returncode, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=list(SHAPES_OF), help="only this op; may be repeated")
    parser.add_argument("--jobs", type=int, default=4, help="ops that are compiled at once")
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--run", action="append", choices=list(SHAPES_OF), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        for op in options.run:
            run(op)
        return
    sanitizer()
    ops = options.op or list(SHAPES_OF)
    with ThreadPoolExecutor(options.jobs) as pool:
        broken = [words for words in pool.map(compiled, ops) if words]
    if broken:
        sys.exit("\n".join(broken))
    code, lines = check(options.tool, ops)
    print(f"{'clean' if code == 0 else 'RED'}: {sum(line.startswith('ran ') for line in lines)} calls of {', '.join(ops)}", flush=True)
    if code:
        print("\n".join(lines[-60:]), flush=True)
        sys.exit(f"{options.tool} found something")


if __name__ == "__main__":
    main()
