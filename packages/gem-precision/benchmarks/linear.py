"""Native ``fp8_block`` on a Hopper GPU: are its numbers right, and how fast are its casts, its products and whole layers beside bfloat16.

    python packages/gem-precision/benchmarks/linear.py --json packages/gem-precision/benchmarks/results/h200-linear.json

Right comes first: each check prints its error and whether it holds, and the command ends with exit code 1 if one does not. Timings follow anyway.
They are medians of CUDA events; ways that are compared alternate, and each waits on the device until the host has given it all its work, as in
training, where the host runs ahead. TB/s count the bytes that a pass has to read and write, beside a copy of as many; TFLOP/s count real products. A
step is forward and backward, with the cast of the weight, which an optimiser changes in each step.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F

from gem_core.ops.gdpa import reference
from gem_precision.formats import fake_quantize, find_format
from gem_precision.kernels.activation import activation_both
from gem_precision.kernels.cast import Both, cast_and_sum, cast_both, cast_squares, cast_weight
from gem_precision.kernels.gdpa import gdpa_forward
from gem_precision.kernels.layers import mlp, norm_linear
from gem_precision.kernels.norm import norm_both
from gem_precision.kernels.product import Way, choose, library_reasons, product
from gem_precision.linear import lower
from gem_precision.native import native_linear, native_square_linear
from gem_precision.presets import PRESETS

DEVICE = "cuda"
ROUNDS = 9
PAUSE = 2_000_000
"""Cycles of the device, about a millisecond, for which it waits while the host gives it the work of a call."""
CHECKED = ((1, 128, 128), (200, 128, 128), (1000, 384, 640), (4096, 512, 512), (4096, 512, 2048), (4096, 1024, 4096), (4096, 4096, 1024))
"""Rows, inputs, outputs: of these the first two have scales that the library could take for scales of rows."""
TIMED = ((1 << 19, 1024, 4096), (1 << 19, 4096, 1024), (1 << 20, 512, 512), (1 << 19, 512, 2048), (1 << 19, 1024, 1024))
STEPPED = (*TIMED, (1 << 19, 1024, 2048), (1 << 19, 1024, 3072), (1 << 19, 2048, 1024), (1 << 18, 2048, 2048))
"""Of whole layers: between those that gain and those that do not."""
FUSED = ((1 << 19, 1024, 4096), (1 << 19, 1024, 3072), (1 << 20, 512, 512))
"""Of a norm before a linear layer, and of two layers with an activation between them, where outputs are the hidden width."""
ATTENDED = ((1152, 256), (288, 1024))
"""Rows and their length, with four heads of 128."""
NATIVE = {"fp8_block": native_linear, "fp8_square": native_square_linear}
Ways = dict[str, Callable[[], Any]]


# ---- right


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative, of the whole tensor: a scale or an element in a wrong place gives about 1."""
    difference, size = (got.double() - wanted.double()).norm(), wanted.double().norm()
    return float(difference / size) if size else float(difference)


def spread(rows: int, columns: int, seed: int) -> Tensor:
    """Values whose size differs from block to block."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    factors = torch.logspace(-2, 2, columns // 128, device=DEVICE).repeat_interleave(128)
    return torch.randn(rows, columns, device=DEVICE, generator=generator) * factors


def cast_errors(rows: int, wide_in: int) -> dict[str, float]:
    """0, or the kernels do not round as the formats do."""
    x = spread(rows, wide_in, 1).bfloat16()
    full = torch.zeros(-(-rows // 128) * 128, wide_in, device=DEVICE)
    full[:rows] = x
    row, square = find_format("fp8_e4m3_1x128"), find_format("fp8_e4m3_128x128")
    both, weight, squares = cast_both(x), cast_weight(full), cast_squares(x)
    tall = torch.zeros(-(-rows // 512) * 512, wide_in, device=DEVICE)
    tall[:rows] = x
    return {
        "cast along rows": error(both.along.dequantize(), fake_quantize(full, row)),
        "cast along columns": error(both.turned.dequantize(), fake_quantize(full.T.contiguous(), row)),
        "cast in squares": error(squares.along.dequantize(), fake_quantize(tall, square)),
        "cast in squares, turned": error(squares.turned.dequantize().T, fake_quantize(tall, square)),
        "cast of a weight": error(weight.along.dequantize(), fake_quantize(full, square)),
        "cast of a weight, turned": error(weight.turned.dequantize().T, fake_quantize(full, square)),
    }


def possible(m: int, n: int, k: int, square: bool) -> list[Way]:
    """The ways that compute a product."""
    return ["own", *(["wide"] if n % 256 == 0 else []), *([] if library_reasons(m, n, k, square) else ["library"])]


def product_errors(rows: int, wide_in: int, wide_out: int) -> dict[str, float]:
    """Both ways, of the forward product and of the weight gradient."""
    x, grad, w = cast_both(spread(rows, wide_in, 1)), cast_both(spread(rows, wide_out, 2)), cast_weight(spread(wide_out, wide_in, 3))
    found = {}
    for name, left, right in (("forward", x.along, w.along), ("weight gradient", grad.turned, x.turned)):
        (m, k), n = left.elements.shape, right.elements.shape[0]
        wanted = left.dequantize().double() @ right.dequantize().double().T
        for way in possible(m, n, k, right.square):
            found[f"{name}, {way}"] = error(product(left, right, torch.float32, way), wanted)
    bias = torch.arange(wide_out, device=DEVICE) * 10.0
    biased = product(x.along, w.along, bias=bias) - product(x.along, w.along).float()
    found["forward, what a bias adds"] = error(biased[:, wide_out // 2 :], bias[wide_out // 2 :].expand(len(biased), -1))
    return found


def layer_errors(rows: int, wide_in: int, wide_out: int) -> dict[str, float]:
    """Native layers beside the emulated ones, for an output gradient in bfloat16: the native layer's output is, so its gradient becomes so on its
    way in, and rounding twice would move one element in thirty by a step of E4M3."""
    found = {}
    for recipe, function in NATIVE.items():
        native, emulated = (nn.Linear(wide_in, wide_out, device=DEVICE) for _ in range(2))
        emulated.load_state_dict(native.state_dict())
        rule = PRESETS[recipe].rule()
        lower(native, rule, function)
        lower(emulated, rule)
        results = []
        for layer in (native, emulated):
            x = spread(rows, wide_in, 4).requires_grad_()
            out = layer(x)
            out.backward(spread(rows, wide_out, 5).bfloat16().float())
            results.append((out.detach(), x.grad, layer.weight.grad))
        for name, got, wanted in zip(("output", "input gradient", "weight gradient"), *results, strict=True):
            found[f"layer in {recipe}, {name}"] = error(got, wanted)
    return found


def fused_errors(rows: int, wide_in: int, wide_out: int) -> dict[str, float]:
    """Operands of a norm and of activations beside the same in float64, rounded."""
    x, dy, row = spread(rows, wide_in, 6), spread(rows, wide_in, 7), find_format("fp8_e4m3_1x128")
    gamma = torch.rand(wide_in, device=DEVICE) + 0.5
    leaf = x.double().requires_grad_()
    F.gelu(leaf).backward(dy.double())
    made = {
        "norm": (norm_both(x, gamma, norm="rms")[0], F.rms_norm(x.double(), (wide_in,), gamma.double(), 1e-5)),
        "activation": (activation_both(x, "gelu"), F.gelu(x.double())),
        "gradient of an activation": (activation_both(x, "gelu", dy), leaf.grad),
    }
    return {name: error(both.along.dequantize()[:rows], fake_quantize(wanted.float(), row)) for name, (both, wanted) in made.items()}


def attention_errors(rows: int, wide_in: int, _: int) -> dict[str, float]:
    """Two rows of queries over all keys, beside the op in float64. Weights are rounded once more than the operands of a layer."""
    q, k, v = (torch.randn(rows, wide_in // 128, 128, device=DEVICE) for _ in range(3))
    queries = torch.tensor([0, rows // 3, rows], device=DEVICE)
    keys = torch.tensor([0, rows // 2, rows], device=DEVICE)
    where: Any = {"max_q": rows, "max_k": rows, "activation": "gelu", "scale": 128**-0.5}
    wanted = reference(q.double(), k.double(), v.double(), queries, keys, **where)
    return {"attention": error(gdpa_forward(q, k, v, queries, keys, **where), wanted)}


LIMITS = {
    "attention": 0.1,
    "cast": 0.0,
    "forward, what": 0.1,
    "forward": 5e-3,
    "weight gradient": 5e-3,
    "layer": 1e-2,
    "norm": 1e-2,
    "activation": 1e-2,
    "gradient": 1e-2,
}
"""By the first word or words of a check. A tensor core keeps about 14 bits of the largest term while it sums; outputs of layers are bfloat16; a last
bit of float32 may decide how a fused operand rounds."""


def checks() -> list[dict[str, Any]]:
    records = []
    for rows, wide_in, wide_out in CHECKED:
        shape = f"{rows}x{wide_in}x{wide_out}"
        found: dict[str, Any] = {}
        for part in (
            lambda r=rows, i=wide_in: cast_errors(r, i),
            lambda s=(rows, wide_in, wide_out): product_errors(*s),
            lambda s=(rows, wide_in, wide_out): layer_errors(*s),
            lambda s=(rows, wide_in, wide_out): fused_errors(*s),
            lambda s=(rows, wide_in, wide_out): attention_errors(*s),
        ):
            try:
                found |= part()
            except Exception as failure:  # the next shape may still tell something, and time on the device is short
                found[f"failed: {failure!r:.300}"] = float("inf")
        for what, value in found.items():
            limit = next((limit for word, limit in LIMITS.items() if what.startswith(word)), 0.0)
            records.append({"shape": shape, "check": what, "error": value, "limit": limit, "holds": value <= limit})
            if not value <= limit:
                print(f"WRONG {shape}: {what}: {value:.2e} > {limit:.0e}", flush=True)
        print(f"{shape}: checked {len(found)}", flush=True)
    print(f"{sum(r['holds'] for r in records)} of {len(records)} checks hold", flush=True)
    return records


# ---- fast


def working(ways: Ways) -> Ways:
    """Those that run; the others are printed and left out, so that they cost no other its time."""
    run = {}
    for name, way in ways.items():
        try:
            way()
            run[name] = way
        except Exception as failure:
            print(f"FAILED {name}: {failure!r:.300}", flush=True)
    return run


def medians(ways: Ways) -> dict[str, float]:
    """Milliseconds of each way that works, alternating, after two rounds that do not count."""
    run = working(ways)
    taken: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(ROUNDS + 1):
        for name, way in run.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(PAUSE)
            begin.record()
            way()
            end.record()
            end.synchronize()
            if turn:
                taken[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in taken.items()}


def random(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=torch.bfloat16)


def passes(rows: int, columns: int) -> list[dict[str, Any]]:
    """Casts alone and fused, beside a copy of the bytes that a cast moves: two read, two written an element."""
    x, dy = random(rows, columns), random(rows, columns)
    target = torch.empty_like(x)
    moved = 4 * rows * columns
    ways: Ways = {
        "copy": lambda: target.copy_(x),
        "cast": lambda: cast_both(x),
        "cast and column sums": lambda: cast_and_sum(x),
        "cast in squares": lambda: cast_squares(x),
        "RMS norm and cast": lambda: norm_both(x, norm="rms"),
        "layer norm and cast": lambda: norm_both(x, norm="layer"),
        "SiLU and cast": lambda: activation_both(x, "silu"),
        "GELU and cast": lambda: activation_both(x, "gelu"),
        "gradient of SiLU and cast": lambda: activation_both(x, "silu", dy),
    }
    times = medians(ways)
    records = []
    for name, ms in times.items():
        bytes_moved = moved * 3 // 2 if name.startswith("gradient") else moved
        share = bytes_moved / moved * times["copy"] / ms
        records.append({"what": name, "ms": ms, "tb_a_second": bytes_moved / ms / 1e9, "of_a_copy": share})
    return records


def products(rows: int, wide_in: int, wide_out: int) -> list[dict[str, Any]]:
    """The three products of a layer, each way, beside bfloat16."""
    x, grad, w = random(rows, wide_in), random(rows, wide_out), random(wide_out, wide_in)
    low_x, low_grad, low_w = cast_both(x), cast_both(grad), cast_weight(w)
    kinds = {
        "forward": (low_x.along, low_w.along, torch.bfloat16, lambda: x @ w.T),
        "input gradient": (low_grad.along, low_w.turned, torch.bfloat16, lambda: grad @ w),
        "weight gradient": (low_grad.turned, low_x.turned, torch.float32, lambda: grad.T @ x),
    }
    records = []
    for kind, (left, right, dtype, plain) in kinds.items():
        (m, k), n = left.elements.shape, right.elements.shape[0]
        ways: Ways = {way: lambda a=left, b=right, d=dtype, w=way: product(a, b, d, w) for way in possible(m, n, k, right.square)}
        if DEVICE == "cuda":  # what scales a block cost: the library's product with one a row
            ones = torch.ones(max(m, n), device=DEVICE)
            ways["scales a row"] = lambda a=left, b=right, s=(ones[:m, None], ones[None, :n]): torch._scaled_mm(
                a.elements, b.elements.t(), *s, out_dtype=torch.bfloat16
            )
        times = medians({"bf16": plain, **ways})
        for name, ms in times.items():
            chosen = name == choose(m, n, k, right.square)
            tflops = 2 * rows * wide_in * wide_out / ms / 1e9
            records.append({"what": f"{kind}, {name}", "ms": ms, "tflops": tflops, "over_bf16": times["bf16"] / ms, "chosen": chosen})
    return records


def backward(out: Tensor, grad: Tensor, *leaves: Tensor) -> None:
    out.backward(grad)
    for leaf in leaves:
        leaf.grad = None


def step(layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    """Nobody tells the layer that its weight stays as it is, so it is cast in each step, as in training."""
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = layer(x)
    backward(out, grad, x, layer.weight, layer.bias)


def layers(rows: int, wide_in: int, wide_out: int) -> list[dict[str, Any]]:
    """A linear layer with a bias, forward and backward."""
    x, grad = random(rows, wide_in).requires_grad_(), random(rows, wide_out)
    kept = {recipe: nn.Linear(wide_in, wide_out, device=DEVICE) for recipe in ("bf16", *NATIVE)}
    for recipe, function in NATIVE.items():
        lower(kept[recipe], PRESETS[recipe].rule(), function)
    times = medians({name: lambda layer=layer: step(layer, x, grad) for name, layer in kept.items()})
    return beside_bf16("linear", times, 6 * rows * wide_in * wide_out)


def fused(rows: int, wide_in: int, wide_out: int) -> list[dict[str, Any]]:
    """RMS norm and linear layer with a bias; and two layers with SiLU between them. Beside bfloat16, compiled by torch."""
    x, grad, wide_grad = random(rows, wide_in).requires_grad_(), random(rows, wide_in), random(rows, wide_out)
    first, second = (torch.randn(*size, device=DEVICE).div_(32).requires_grad_() for size in ((wide_out, wide_in), (wide_in, wide_out)))
    gamma, bias = (torch.ones(width, device=DEVICE, requires_grad=True) for width in (wide_in, wide_out))

    @torch.compile(dynamic=False)
    def plain_norm(x: Tensor, w: Tensor, gamma: Tensor, bias: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (wide_in,), gamma.bfloat16(), 1e-5), w.bfloat16(), bias.bfloat16())

    @torch.compile(dynamic=False)
    def plain_mlp(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return F.silu(x @ first.bfloat16().T) @ second.bfloat16().T

    def both() -> tuple[Both, Both]:
        return cast_weight(first.detach()), cast_weight(second.detach())

    leaves = (x, first, second, gamma, bias)
    norms = medians(
        {
            "bf16": lambda: backward(plain_norm(x, first, gamma, bias), wide_grad, *leaves),
            "fp8_block": lambda: backward(norm_linear(x, first, cast_weight(first.detach()), gamma, bias=bias, norm="rms")[0], wide_grad, *leaves),
        }
    )
    pairs = medians(
        {
            "bf16": lambda: backward(plain_mlp(x, first, second), grad, *leaves),
            "fp8_block": lambda: backward(mlp(x, first, second, both(), "silu"), grad, *leaves),
        }
    )
    flops = 6 * rows * wide_in * wide_out
    return [*beside_bf16("RMS norm and linear", norms, flops), *beside_bf16("linear, SiLU, linear", pairs, 2 * flops)]


def attention(rows: int, length: int, heads: int = 4) -> list[dict[str, Any]]:
    """Attention with GELU, forward, every row full, casts included; beside two batched products and GELU of torch."""
    q, k, v = (random(rows * length, heads, 128) for _ in range(3))
    offsets = torch.arange(0, rows * length + 1, length, device=DEVICE)

    def plain() -> Tensor:
        wide = [t.view(rows, length, heads, 128).transpose(1, 2) for t in (q, k, v)]
        return F.gelu(wide[0] @ wide[1].transpose(2, 3)) @ wide[2]

    times = medians({"bf16": plain, "fp8_block": lambda: gdpa_forward(q, k, v, offsets, offsets, max_q=length, max_k=length)})
    return beside_bf16("attention forward", times, 4 * heads * 128 * rows * length * length)


def beside_bf16(what: str, times: dict[str, float], flops: int) -> list[dict[str, Any]]:
    return [{"what": f"{what}, {name}", "ms": ms, "tflops": flops / ms / 1e9, "over_bf16": times["bf16"] / ms} for name, ms in times.items()]


def timings() -> Iterator[dict[str, Any]]:
    work: list[tuple[Callable[..., list[dict[str, Any]]], tuple[int, ...]]] = [(layers, shape) for shape in STEPPED]
    work += [(passes, (rows, columns)) for rows, columns in sorted({(rows, columns) for rows, _, columns in TIMED})]
    work += [(products, shape) for shape in TIMED] + [(attention, shape) for shape in ATTENDED] + [(fused, shape) for shape in FUSED]
    for measure, shape in work:
        try:
            found = measure(*shape)
        except Exception as failure:  # as in checks
            found = [{"what": f"{measure.__name__} failed: {failure!r:.300}"}]
        for record in found:
            record = {"shape": "x".join(map(str, shape)), **{k: round(v, 4) if isinstance(v, float) else v for k, v in record.items()}}
            print(record, flush=True)
            yield record


def about(script: str, results: Path) -> dict[str, str]:
    """Where and how it was measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python packages/gem-precision/benchmarks/{script} --json {results.name}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("this benchmark needs a Hopper GPU (sm90)", file=sys.stderr)
        return 3
    found: dict[str, Any] = {"about": about("linear.py", given.json), "checks": checks(), "timings": []}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(found, indent=1))
    for record in timings():
        found["timings"].append(record)
        given.json.write_text(json.dumps(found, indent=1))  # what there is stays if the rest does not end
    return 0 if all(check["holds"] for check in found["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
