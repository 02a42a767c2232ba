"""Time jagged_attention and gdpa, forward and backward, beside the attention that torch brings.

    python3 packages/gem-kernels/benchmarks/attention.py [--csv FILE] [--ops gdpa] [--backends gluon] [--shapes self-L256]

1,152 rows, 4 heads of 128, random bfloat16. Peers: ``cudnn`` (dense rows only), ``varlen_attn`` (FlashAttention 2), both softmax. Times are medians
of CUDA events, the L2 cache cleared before each; the device is kept waiting until the host has issued the whole call, so that they hold no host time.
FLOPs count real tokens, 4 H D sum(Lq Lk) forward and 2.5 times that backward: recomputed scores are included, so the rates compare kernels and are
not model FLOPs. Bytes are each input read once and each output written once.
"""

import argparse
import csv
import datetime
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.activations import ACTIVATIONS

BATCH, HEADS, DIM = 1152, 4, 128
SCALE = DIM**-0.5
SHAPES: dict[str, tuple[int, int | None, bool]] = {
    "self-L256": (256, None, False),
    "self-L1024": (1024, None, False),
    "self-L2048": (2048, None, False),
    "self-u1024": (1024, None, True),
    "cross-q1024-kv256": (1024, 256, False),
}
"""Name: longest query row, longest key row (None: the queries' own), and whether lengths are uniform in 1 .. longest."""
BACKWARD = 2.5
FIELDS = ("date", "gpu", "torch", "triton", "op", "backend", "activation", "dtype", "shape", "mode", "ms", "tflops", "gbps", "peak_mib")
Timed = tuple[Callable[[], Tensor], list[Tensor]]
"""A forward pass and its leaves."""


def lengths_of(shape: str, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Query and key lengths ``[batch]`` int64 on the CPU."""
    longest, keys, uniform = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(1, longest + 1, (batch,), generator=generator) if uniform else torch.full((batch,), longest)
    return q, q if keys is None else torch.full((batch,), keys)


def jagged(shape: str, batch: int = BATCH) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Random bfloat16 leaves and offsets on the GPU, and the longest rows."""
    torch.manual_seed(0)
    lengths = lengths_of(shape, batch)
    q_offsets, k_offsets = (torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]).cuda() for n in lengths)
    if SHAPES[shape][1] is None:
        k_offsets = q_offsets
    tokens = (int(lengths[0].sum()), int(lengths[1].sum()), int(lengths[1].sum()))
    q, k, v = (torch.randn(n, HEADS, DIM, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in tokens)
    return (q, k, v, q_offsets, k_offsets), {"max_q": int(lengths[0].max()), "max_k": int(lengths[1].max())}


def ours(op: str, backend: str, shape: str, activation: str) -> Timed:
    from gem_core import ops

    arguments, options = jagged(shape)
    if op == "gdpa":
        options |= {"activation": activation, "scale": SCALE}
    function = getattr(ops, op)
    return lambda: function(*arguments, **options, backend=backend), list(arguments[:3])


def varlen_attn(shape: str) -> Timed:
    from torch.nn.attention.varlen import varlen_attn

    (q, k, v, q_offsets, k_offsets), limits = jagged(shape)
    a, b = q_offsets.int(), k_offsets.int()
    return lambda: varlen_attn(q, k, v, a, b, limits["max_q"], limits["max_k"]), [q, k, v]


def cudnn(shape: str) -> Timed:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (q, k, v, *_), _ = jagged(shape)
    leaves = [t.detach().view(BATCH, -1, HEADS, DIM).transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(*leaves)

    return forward, leaves


def providers(op: str, backends: list[str], activation: str) -> dict[str, Callable[[str], Timed]]:
    found: dict[str, Callable[[str], Timed]] = {name: lambda shape, name=name: ours(op, name, shape, activation) for name in backends}
    return found | ({"cudnn": cudnn, "varlen_attn": varlen_attn} if op == "jagged_attention" else {})


def median_ms(call: Callable[[], Any], budget: float = 200.0) -> float:
    """Median milliseconds on the device, of as many calls as the budget of milliseconds holds, 5 to 50."""
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(4_000_000)  # about two milliseconds
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    warm = [once() for _ in range(3)]
    return median(once() for _ in range(max(5, min(50, int(budget / warm[-1])))))


def measure(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Iterator[tuple[str, float, int]]:
    """Mode, median milliseconds and peak bytes above what the leaves take."""
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    peak = torch.cuda.max_memory_allocated() - held
    yield "fwd", median_ms(forward), peak
    dout = torch.randn_like(out)

    def backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        torch.autograd.backward([out], [dout], retain_graph=True)

    backward()
    torch.cuda.reset_peak_memory_stats()
    backward()
    peak = torch.cuda.max_memory_allocated() - held
    yield "bwd", median_ms(backward), peak


def rows_of(op: str, shape: str, activation: str, backend: str, provider: Callable[[str], Timed]) -> Iterator[dict[str, Any]]:
    import triton

    about = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    about |= {"op": op, "backend": backend, "activation": activation if op == "gdpa" else "softmax", "dtype": "bf16", "shape": shape}
    q, k = (n.double() for n in lengths_of(shape))
    work = 4 * HEADS * DIM * float((q * k).sum())
    moved = 2 * HEADS * DIM * float(q.sum() + k.sum()) * 2
    for mode, ms, peak in measure(*provider(shape)):
        flops, traffic = (work, moved) if mode == "fwd" else (work * BACKWARD, 2 * moved)
        rates = {"tflops": round(flops / ms / 1e9, 1), "gbps": round(traffic / ms / 1e6, 1), "peak_mib": peak >> 20}
        yield {**about, "mode": mode, "ms": round(ms, 4), **rates}


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
    parser.add_argument("--ops", default="jagged_attention,gdpa")
    parser.add_argument("--backends", default="gluon,triton")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)}")
    parser.add_argument("--activation", default="gelu", choices=list(ACTIVATIONS))
    options = parser.parse_args()
    shapes = chosen_shapes(options.shapes)
    rows = []
    for op in options.ops.split(","):
        for shape in shapes:
            for backend, provider in providers(op, options.backends.split(","), options.activation).items():
                if backend == "cudnn" and SHAPES[shape][2]:
                    continue
                for row in rows_of(op, shape, options.activation, backend, provider):
                    rows.append(row)
                    print(*(f"{row[name]!s:>18}" for name in ("op", "shape", "backend", "mode", "ms", "tflops", "gbps", "peak_mib")), flush=True)
                torch.cuda.empty_cache()
    if options.csv:
        append(options.csv, rows)


if __name__ == "__main__":
    main()
