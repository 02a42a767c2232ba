"""Time gdpa, forward and backward, beside what one would use without it.

    python3 packages/gem-kernels/benchmarks/gdpa.py [--csv FILE] [--shapes self256,cross1024x256] [--activation gelu]

Providers: ``triton`` (this package), ``bmm_compiled`` (padded rows, two batched products and the activation under torch.compile; padding itself is
not timed) and ``reference`` (gem-core's op in float32, not compiled). Times are medians of CUDA events. FLOPs count real tokens, 4 H D sum(Lq Lk)
forward and 2.5 times that backward: recomputed scores are included, so the rates compare kernels and are not model FLOPs.
"""

import argparse
import csv
import datetime
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.gdpa import flops, reference
from gem_kernels.ops.gdpa import launch

BATCH, HEADS, DIM = 1152, 4, 128
SCALE = DIM**-0.5
SHAPES: dict[str, tuple[int, int | None, bool]] = {
    "self256": (256, None, False),
    "self1024": (1024, None, False),
    "self2048": (2048, None, False),
    "uniform1024": (1024, None, True),
    "cross1024x256": (1024, 256, False),
}
"""Name: longest query row, longest key row (None: the queries' own), and whether lengths are uniform in 1 .. longest."""
BACKWARD = 2.5
FIELDS = ("date", "gpu", "torch", "triton", "op", "shape", "activation", "provider", "direction", "ms", "tflops", "note")
Timed = tuple[Callable[[], Tensor], list[Tensor]]
"""A forward pass and its leaves."""


def lengths_of(shape: str, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Query and key lengths ``[batch]`` int64 on the CPU."""
    longest, keys, uniform = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(1, longest + 1, (batch,), generator=generator) if uniform else torch.full((batch,), longest)
    return q, q if keys is None else torch.full((batch,), keys)


def jagged(shape: str, batch: int = BATCH) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random bf16 leaves and offsets on the GPU, and the longest rows."""
    torch.manual_seed(0)
    lengths = lengths_of(shape, batch)
    q_offsets, k_offsets = (torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]).cuda() for n in lengths)
    if SHAPES[shape][1] is None:
        k_offsets = q_offsets
    tokens = (int(lengths[0].sum()), int(lengths[1].sum()), int(lengths[1].sum()))
    q, k, v = (torch.randn(n, HEADS, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in tokens)
    return (q, k, v, q_offsets, k_offsets), {"max_q": int(lengths[0].max()), "max_k": int(lengths[1].max())}


def time_triton(shape: str, activation: str) -> Timed:
    arguments, options = jagged(shape)
    return lambda: launch.gdpa(*arguments, **options, activation=activation, scale=SCALE), list(arguments[:3])


def time_bmm_compiled(shape: str, activation: str) -> Timed:
    longest, keys, _ = SHAPES[shape]
    f = ACTIVATIONS[activation]
    sizes = (longest, keys or longest, keys or longest)
    q, k, v = (torch.randn(BATCH, HEADS, n, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in sizes)
    compiled: Any = torch.compile(lambda a, b, c: f(a @ b.transpose(-1, -2) * SCALE) @ c, dynamic=False)
    return lambda: compiled(q, k, v), [q, k, v]


def time_reference(shape: str, activation: str) -> Timed:
    arguments, options = jagged(shape)
    return lambda: reference(*arguments, **options, activation=activation, scale=SCALE), list(arguments[:3])


PROVIDERS = {"triton": time_triton, "bmm_compiled": time_bmm_compiled, "reference": time_reference}


def median_ms(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=80, return_mode="median"))


def measure(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Iterator[tuple[str, float]]:
    """Median milliseconds of both directions."""
    yield "forward", median_ms(forward)
    out = forward()
    dout = torch.randn_like(out)

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward([out], [dout], retain_graph=True)

    yield "backward", median_ms(backward)


def rows_of(shape: str, activation: str, provider: str) -> Iterator[dict[str, Any]]:
    """A row for each direction; one that does not fit in memory gets a note."""
    import triton

    row = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    row |= {"triton": triton.__version__, "op": "gdpa", "shape": shape, "activation": activation, "provider": provider}
    q_lengths, k_lengths = lengths_of(shape)
    work = flops(q_lengths=q_lengths.tolist(), k_lengths=k_lengths.tolist(), heads=HEADS, dim=DIM)
    done = []
    try:
        for direction, ms in measure(*PROVIDERS[provider](shape, activation)):
            done.append(direction)
            rate = work * (BACKWARD if direction == "backward" else 1.0) / ms / 1e9
            yield {**row, "direction": direction, "ms": round(ms, 4), "tflops": round(rate, 1), "note": ""}
    except torch.OutOfMemoryError:
        yield {**row, "direction": "backward" if done else "forward", "ms": "", "tflops": "", "note": "out of memory"}


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def chosen_shapes(text: str) -> list[str]:
    """Names from a comma-separated list; ends the program for an unknown one, or without a GPU."""
    shapes = text.split(",")
    unknown = [shape for shape in shapes if shape not in SHAPES]
    if unknown:
        sys.exit(f"unknown shapes {', '.join(unknown)}; known: {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--activation", default="gelu", choices=list(ACTIVATIONS))
    options = parser.parse_args()
    rows = []
    for shape in chosen_shapes(options.shapes):
        for provider in PROVIDERS:
            for row in rows_of(shape, options.activation, provider):
                rows.append(row)
                print(*(f"{row[name]!s:>14}" for name in ("shape", "activation", "provider", "direction", "ms", "tflops", "note")), flush=True)
            torch.cuda.empty_cache()
    if options.csv:
        append(options.csv, rows)


if __name__ == "__main__":
    main()
