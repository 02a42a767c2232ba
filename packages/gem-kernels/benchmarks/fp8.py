"""Forward attention in FP8 beside the bfloat16 kernels of the backend ``gluon``, in one process on a Hopper GPU, with its casts apart.

    python3 packages/gem-kernels/benchmarks/fp8.py [--csv FILE]

Heads are four of 128; rows have equal lengths or, ``drawn``, lengths from 1 to 2,048, and about 300,000 tokens in all. Each time is the median of
rounds in which all take turns. ``over_bf16`` is the time of the bfloat16 kernel divided by that of a line; ``cast and fp8`` adds two medians.
"""

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from gem_kernels.bench.cli import machine
from gem_kernels.common.hopper import launch as bf16
from gem_kernels.common.hopper.fp8 import launch as fp8
from gem_kernels.ops.attention import AttentionCall
from gem_kernels.ops.gdpa.call import kernel_activation

FIELDS = ("date", "gpu", "torch", "triton", "op", "activation", "shape", "what", "ms", "tflops", "over_bf16")
TOKENS, HEADS, DIM = 294912, 4, 128
ROUNDS, CALLS = 7, 3
SHAPES = [
    *(("gdpa", "gelu", length) for length in ("1024", "4096", "2048")),
    *(("jagged_attention", "softmax", length) for length in ("1024", "4096", "2048")),
    *(("gdpa", "gelu", length) for length in ("256", "drawn")),
    ("gdpa", "silu", "1024"),
]
WAYS: dict[str, Callable[..., None]] = {"fp8": fp8.attend}
"""What computes attention from cast operands: ``(call, low, out, lse)``."""


def lengths_of(shape: str) -> list[int]:
    if shape == "drawn":
        generator = torch.Generator().manual_seed(1)
        return torch.randint(1, 2049, (TOKENS // 1024,), generator=generator).tolist()
    return [int(shape)] * (TOKENS // int(shape))


def once(call: Callable[[], Any]) -> float:
    """Milliseconds of a call, of a few in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(op: str, activation: str, shape: str) -> list[dict[str, Any]]:
    """The lines of one shape."""
    lengths = lengths_of(shape)
    tokens, longest = sum(lengths), max(lengths)
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(tokens, HEADS, DIM, device="cuda", generator=generator).bfloat16() for _ in range(3))
    call = AttentionCall(
        op=op, q=q, k=k, v=v, q_offsets=offsets, k_offsets=offsets, max_q=longest, max_k=longest, scale=DIM**-0.5, window=None,
        activation=kernel_activation(activation, torch.bfloat16),
    )  # fmt: skip
    out = torch.empty_like(q)
    lse = torch.empty(HEADS, tokens, device="cuda") if activation == "softmax" else None
    low = fp8.cast(call)

    def attend(way: Callable[..., None]) -> Callable[[], Any]:
        return lambda: way(call, low, out, lse)

    runs: dict[str, Callable[[], Any]] = {"bf16": lambda: bf16.forward(call, out, lse), "cast": lambda: fp8.cast(call)}
    runs |= {name: attend(way) for name, way in WAYS.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(once(run))
    found = {name: median(values) for name, values in times.items()}
    found["cast and fp8"] = found["cast"] + found["fp8"]
    flops = 4 * HEADS * DIM * sum(length * length for length in lengths)
    head = {**machine(), "op": op, "activation": activation, "shape": shape}
    rows = []
    for name, ms in found.items():
        rate = "" if name == "cast" else round(flops / ms / 1e9, 1)
        rows.append({**head, "what": name, "ms": round(ms, 4), "tflops": rate, "over_bf16": round(found["bf16"] / ms, 3)})
    return rows


def write(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("this benchmark needs a Hopper GPU (sm90)", file=sys.stderr)
        return 3
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for row in measure(*shape):
            print({name: row[name] for name in FIELDS[4:]}, flush=True)
            rows.append(row)
        if given.csv:
            write(rows, given.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
