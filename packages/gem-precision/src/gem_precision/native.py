"""Linear layers whose products run on FP8 tensor cores: ``fp8_block`` and ``fp8_square`` on Hopper, ``mxfp8`` on Blackwell.

Numbers are those of the emulation up to the order of sums and the rounding of outputs and input gradients to bfloat16; the weight gradient is
float32. ``fp8_block`` is the recipe of arXiv 2412.19437: E4M3 everywhere, scales for 1 x 128 of activations and gradients and for 128 x 128 of
weights, here powers of two. ``fp8_square`` has 128 x 128 blocks of activations too, so that the weight gradient takes the library's faster
product. Both are right on an H200, and faster than bfloat16 where ``no_gain`` has no reason. ``mxfp8`` has not been measured on hardware yet, so
nothing chooses it automatically.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_core.spec import KernelUnavailable
from gem_precision.backends import Device, LinearShape
from gem_precision.formats import quantize
from gem_precision.linear import LinearRule, Watch
from gem_precision.presets import PRESETS
from gem_precision.weights import HeldWeight

if TYPE_CHECKING:
    from gem_precision.kernels.cast import Both

NAMES = {recipe: f"{recipe}_native" for recipe in ("fp8_block", "fp8_square", "mxfp8")}
"""The backend of each recipe that has one."""

INPUT_COST, OUTPUT_COST = 600, 560
"""Multiply-adds of a row that FP8 has to save before a layer has paid for what an input and an output cost it: the casts of both, and of an output
also its bias and the bias's gradient. Fitted to steps of nine shapes on an H200 (``benchmarks/results/h200-casts.json``), and right about each, in
both recipes."""


class Kernels(NamedTuple):
    """Of one recipe: casts of activations, of gradients, of these with sums over rows, of weights; and ``left right^T + bias`` of operands."""

    cast: Callable[[Tensor], "Both"]
    cast_grad: Callable[[Tensor], "Both"]
    cast_and_sum: Callable[[Tensor], tuple["Both", Tensor]]
    cast_weight: Callable[[Tensor], "Both"]
    product: Callable[..., Tensor]


def kernels_of(recipe: str) -> Kernels:
    """Imports Triton."""
    if recipe == "mxfp8":
        from gem_precision.kernels.mx import mx_and_sum, mx_both, mx_product

        return Kernels(mx_both, mx_both, mx_and_sum, mx_both, mx_product)
    from gem_precision.kernels.cast import TALL, cast_and_sum, cast_both, cast_squares, cast_weight
    from gem_precision.kernels.product import product

    if recipe == "fp8_square":
        return Kernels(cast_squares, partial(cast_both, multiple=TALL), partial(cast_and_sum, multiple=TALL), cast_weight, product)
    return Kernels(cast_both, cast_both, cast_and_sum, cast_weight, product)


def why_not(device: Device, shape: LinearShape) -> list[str]:
    """Why a layer cannot run as ``fp8_block_native`` or ``fp8_square_native``; none if it can."""
    return _reasons(device, shape, 90, "the FP8 tensor cores of Hopper")


def no_gain(_: Device, shape: LinearShape) -> list[str]:
    """Why ``fp8_block_native`` or ``fp8_square_native`` would be no faster than bfloat16; none if it would."""
    saved, spent = shape.inputs * shape.outputs, INPUT_COST * shape.inputs + OUTPUT_COST * shape.outputs
    if saved > spent:
        return []
    return [
        f"a matrix of {shape.inputs} x {shape.outputs} is no faster than in bfloat16, as measured on an H200: its casts take what its products save "
        f"(inputs x outputs is {saved:,}, {INPUT_COST} x inputs + {OUTPUT_COST} x outputs {spent:,})"
    ]


def mx_why_not(device: Device, shape: LinearShape) -> list[str]:
    """Why a layer cannot run as ``mxfp8_native``; none if it can."""
    return _reasons(device, shape, 100, "the block-scaled tensor cores of Blackwell")


def _reasons(device: Device, shape: LinearShape, arch: int, cores: str) -> list[str]:
    reasons = []
    if device.arch != arch:
        where = f"sm{device.arch}" if device.arch is not None else device.name if device.type == "cuda" else device.type
        reasons.append(f"its products need {cores} (sm{arch}), this is {where}")
    for name, width in (("inputs", shape.inputs), ("outputs", shape.outputs)):
        if width % 128 or not width:
            reasons.append(f"{width} {name} are no multiple of 128")
    if find_spec("triton") is None:
        reasons.append("triton is not installed: python3 -m pip install 'gem-precision[native]'")
    return reasons


def native_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` in ``fp8_block``.

    Args:
        x: ``[rows, in]``, any floating dtype.
        weight: ``[out, in]``.
        rule: that of ``fp8_block``.
        held: keeps the weight's cast until the weight changes.
        watch: as in ``gem_precision.linear.LowForward``; while something watches, operands are rounded a second time for it.
        bias: ``[out]``; its gradient is summed in float32 by the cast of the output gradient.

    Returns:
        ``[rows, out]`` bfloat16.

    Raises:
        KernelUnavailable: another rule.
    """
    return _native("fp8_block", x, weight, rule, held, watch, bias)


def native_square_linear(
    x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None, bias: Tensor | None = None
) -> Tensor:
    """``x weight^T + bias`` in ``fp8_square``; as ``native_linear``."""
    return _native("fp8_square", x, weight, rule, held, watch, bias)


def native_mx_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None, bias: Tensor | None = None) -> Tensor:
    """``x weight^T + bias`` in ``mxfp8``; as ``native_linear``.

    Raises:
        KernelUnavailable: another rule, or a weight that came rounded from other ranks: its two orientations differ.
    """
    if held.travelled:
        so = "weights that travel in mxfp8 are rounded along each axis apart, which its cast cannot tell"
        raise KernelUnavailable(f"linear backend {NAMES['mxfp8']!r} of a gathered weight", so, "Name 'mxfp8_emulated'.")
    return _native("mxfp8", x, weight, rule, held, watch, bias)


def _native(recipe: str, x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None, bias: Tensor | None) -> Tensor:
    if rule != PRESETS[recipe].rule():
        so = f"it computes the formats of {recipe}, with low weight gradients, without stochastic rounding and without a Hadamard transform"
        raise KernelUnavailable(f"linear backend {NAMES[recipe]!r} for {rule.label}", so, f"Leave these options out, or name '{recipe}_emulated'.")
    out: Tensor = _Native.apply(x, weight, bias, rule, held, watch, kernels_of(recipe))  # type: ignore[no-untyped-call]
    return out


class _Native(torch.autograd.Function):
    """Keeps the cast activations, transposed, in the place of ``x``: half the bytes of bfloat16."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rule: LinearRule, held: HeldWeight, watch: Watch | None, kernels: Kernels
    ) -> Tensor:
        low = kernels.cast(x.contiguous())
        ctx.save_for_backward(weight, low.turned.elements, low.turned.scales)
        ctx.rule, ctx.held, ctx.watch, ctx.kernels = rule, held, watch, kernels
        ctx.rows, ctx.dtype, ctx.bias_dtype = x.shape[0], x.dtype, None if bias is None else bias.dtype
        ctx.operand = partial(type(low.turned), square=low.turned.square)
        if watch is not None:
            watch("inputs", x, quantize(x, rule.inputs))
            if not held.travelled:
                watch("weights", weight, held.rounded(weight, transposed=False))
        return kernels.product(low.along, _cast(held, weight, kernels).along, bias=bias)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, elements, scales = ctx.saved_tensors
        kernels: Kernels = ctx.kernels
        dx = dw = db = None
        if ctx.needs_input_grad[2]:
            low, sums = kernels.cast_and_sum(grad.contiguous())
            db = sums.to(ctx.bias_dtype)
        else:
            low = kernels.cast_grad(grad.contiguous())
        if ctx.watch is not None:
            ctx.watch("grads", grad, quantize(grad, ctx.rule.grads))
        if ctx.needs_input_grad[0]:
            dx = kernels.product(low.along, _cast(ctx.held, weight, kernels).turned)[: ctx.rows].to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = kernels.product(low.turned, ctx.operand(elements, scales), torch.float32).to(weight.dtype)
        return dx, dw, db, None, None, None, None


def _cast(held: HeldWeight, weight: Tensor, kernels: Kernels) -> "Both":
    """The weight in E4M3, cast once for each value of it. One that has travelled rounded is exact in the format already."""
    return held.get(held.operand(weight, transposed=False) if held.travelled else weight, "native", kernels.cast_weight)
