"""A norm and the linear layer behind it on a Hopper GPU: steps in native FP8 beside bfloat16, and the passes that are not products.

    python packages/gem-precision/benchmarks/norm_linear.py --json packages/gem-precision/benchmarks/results/h200-norm-linear.json

A step is forward and backward of what a pre-norm layer begins with: a branch is added to the residual stream, the sum is normed and multiplied, and
the sum has a gradient of its own. The weight is cast in each step. bfloat16 is the backend ``triton`` of gem-kernels. Times are medians, taken as
``linear.py`` takes them.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from linear import DEVICE, about, beside_bf16, medians, random
from torch import Tensor

from gem_core.ops import norm_linear as op
from gem_precision.kernels.norm import Norm, norm_both, norm_grad
from gem_precision.native_ops import norm_linear, square_norm_linear


class Layer(NamedTuple):
    """Rows, inputs, outputs; the norm, and whether there is a bias."""

    rows: int
    inputs: int
    outputs: int
    norm: Norm = "rms"
    bias: bool = False


LAYERS = (*(Layer(728_000, 1024, outputs) for outputs in (1024, 2048, 3072, 4096)), Layer(131_168, 1024, 4096, "layer", True))
"""Those of the recipe gem-h200-1024, a wider one, and that of hstu-h200-fixed."""
PASSES = ((728_000, 1024, "rms"), (131_168, 1024, "layer"))
"""Rows, columns and norm."""


def step(call: Callable[..., Any], leaves: list[Tensor], grads: list[Tensor], norm: Norm) -> None:
    x, branch, weight, *bias = leaves
    made = call(x, weight.bfloat16(), *(b.bfloat16() for b in bias), norm=norm, residual=branch, return_sum=True)
    torch.autograd.backward(made, grads)
    for leaf in leaves:
        leaf.grad = None


def steps(rows: int, inputs: int, outputs: int, norm: Norm, bias: bool) -> list[dict[str, Any]]:
    leaves = [random(rows, inputs), random(rows, inputs), random(outputs, inputs).float() / 32, *([random(outputs).float()] if bias else [])]
    for leaf in leaves:
        leaf.requires_grad_()
    grads = [random(rows, outputs), random(rows, inputs)]
    ways = {"bf16": partial(op, backend="triton"), "fp8_block": norm_linear, "fp8_square": square_norm_linear}
    times = medians({name: partial(step, call, leaves, grads, norm) for name, call in ways.items()})
    return beside_bf16(f"{norm} norm and linear", times, 6 * rows * inputs * outputs)


def passes(rows: int, columns: int, norm: Norm) -> list[dict[str, Any]]:
    """Beside a copy of one tensor, two a copy moves; with how many each pass has to move."""
    x, branch, more = random(rows, columns), random(rows, columns), random(rows, columns)
    target, (_, total, means, inverses) = torch.empty_like(x), norm_both(x, norm=norm)
    ways: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2, lambda: target.copy_(x)),
        "norm and cast": (2, lambda: norm_both(x, norm=norm)),
        "norm and cast in squares": (2, lambda: norm_both(x, norm=norm, square=True)),
        "sum, norm and cast": (4, lambda: norm_both(x, norm=norm, branch=branch)),
        "sum, norm and cast in squares": (4, lambda: norm_both(x, norm=norm, branch=branch, square=True)),
        "gradient of norm and sum": (4, lambda: norm_grad(total, branch, None, means, inverses, norm=norm, more=more)),
    }
    times = medians({name: way for name, (_, way) in ways.items()})
    bytes_of = {name: ways[name][0] * 2 * rows * columns for name in times}
    speed = {name: bytes_of[name] / ms / 1e9 for name, ms in times.items()}
    return [{"what": f"{norm}: {name}", "ms": ms, "tb_a_second": speed[name], "of_a_copy": speed[name] / speed["copy"]} for name, ms in times.items()]


def timings() -> Iterator[dict[str, Any]]:
    for measure, shape in [*((steps, layer) for layer in LAYERS), *((passes, shape) for shape in PASSES)]:
        try:
            found = measure(*shape)
        except Exception as failure:  # the next shape may still tell something, and time on the device is short
            found = [{"what": f"{measure.__name__} failed: {failure!r:.300}"}]
        sizes = "x".join(str(size) for size in shape if type(size) is int)
        for record in found:
            record = {"shape": sizes, **{k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}}
            print(record, flush=True)
            yield record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print(f"this benchmark needs a Hopper GPU (sm90), and runs on {DEVICE}", file=sys.stderr)
        return 3
    found: dict[str, Any] = {"about": about(Path(__file__).name, given.json), "timings": []}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    for record in timings():
        found["timings"].append(record)
        given.json.write_text(json.dumps(found, indent=1))  # what there is stays if the rest does not end
    return 0


if __name__ == "__main__":
    sys.exit(main())
