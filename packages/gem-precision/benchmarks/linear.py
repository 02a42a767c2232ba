"""Linear layers forward and backward: bfloat16 against native fp8_block, casts included, and the casts against a copy of the same bytes.

    python packages/gem-precision/benchmarks/linear.py --csv packages/gem-precision/benchmarks/results/h200-linear.csv

Medians of CUDA events; the two ways alternate. TFLOP/s count three products forward and backward.
"""

import argparse
import csv
import datetime
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import nn

from gem_precision.kernels.cast import cast_both
from gem_precision.native import lower_natively

SHAPES = ((1 << 19, 1024, 4096), (1 << 19, 4096, 1024), (1 << 20, 512, 512), (1 << 19, 512, 2048), (1 << 19, 1024, 1024))


def median(ways: dict[str, Callable[[], Any]], rounds: int = 12) -> dict[str, float]:
    """Milliseconds of each way, alternating, after two rounds that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 2):
        for name, way in ways.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way()
            end.record()
            end.synchronize()
            if turn >= 2:
                taken[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in taken.items()}


def step(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = layer(x)
    out.backward(grad)
    layer.weight.grad = x.grad = None


def measure(rows: int, wide_in: int, wide_out: int) -> list[dict[str, Any]]:
    x = torch.randn(rows, wide_in, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(rows, wide_out, device="cuda", dtype=torch.bfloat16)
    plain, low = (nn.Linear(wide_in, wide_out, bias=False, device="cuda") for _ in range(2))
    low.load_state_dict(plain.state_dict())
    lower_natively(low)
    target = torch.empty(2 * grad.numel(), dtype=torch.uint8, device="cuda")
    source = torch.empty_like(target)
    times = median(
        {
            "bf16": lambda: step(plain, x, grad),
            "fp8_block": lambda: step(low, x, grad),
            "cast of the gradient": lambda: cast_both(grad),
            "copy of its bytes": lambda: target.copy_(source),
        }
    )
    flops = 6 * rows * wide_in * wide_out
    moved = {"cast of the gradient": 4 * grad.numel(), "copy of its bytes": 4 * grad.numel()}
    return [
        {
            "shape": f"{rows}x{wide_in}x{wide_out}",
            "what": name,
            "ms": round(ms, 4),
            "tflops": "" if name in moved else round(flops / ms / 1e9, 1),
            "tb_a_second": round(moved[name] / ms / 1e9, 2) if name in moved else "",
            "over_bf16": "" if name in moved else round(times["bf16"] / ms, 3),
        }
        for name, ms in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    records = []
    for shape in SHAPES:
        for record in measure(*shape):
            print(record, flush=True)
            records.append({**about, **record})
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    with given.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        writer.writerows(records)


if __name__ == "__main__":
    main()
