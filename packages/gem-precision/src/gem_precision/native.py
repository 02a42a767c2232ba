"""Linear layers whose products run on the FP8 tensor cores of Hopper: the recipe ``fp8_block`` for speed.

E4M3 everywhere, scales for 1 x 128 of activations and gradients and for 128 x 128 of weights, all powers of two: the recipe of arXiv 2412.19437.
Numbers are those of the emulation up to the order of sums and the rounding of outputs and input gradients to bfloat16. The weight gradient is
float32. Not measured on hardware yet, so nothing chooses it automatically.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

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

NAME = "fp8_block_native"
_RULE = PRESETS["fp8_block"].rule()


def why_not(device: Device, shape: LinearShape) -> list[str]:
    """Why a layer cannot run natively; none if it can."""
    reasons = []
    if device.arch != 90:
        where = device.type if device.arch is None else f"sm{device.arch}"
        reasons.append(f"its products need the FP8 tensor cores of Hopper (sm90), this is {where}")
    for name, width in (("inputs", shape.inputs), ("outputs", shape.outputs)):
        if width % 128 or not width:
            reasons.append(f"{width} {name} are no multiple of 128")
    if find_spec("triton") is None:
        reasons.append("triton is not installed: python3 -m pip install 'gem-precision[native]'")
    return reasons


def native_linear(x: Tensor, weight: Tensor, rule: LinearRule, held: HeldWeight, watch: Watch | None = None) -> Tensor:
    """``x weight^T`` in ``fp8_block``.

    Args:
        x: ``[rows, in]``, any floating dtype.
        weight: ``[out, in]``.
        rule: that of ``fp8_block``.
        held: keeps the weight's cast until the weight changes.
        watch: as in ``gem_precision.linear.LowForward``; while something watches, operands are rounded a second time for it.

    Returns:
        ``[rows, out]`` bfloat16.

    Raises:
        KernelUnavailable: another rule.
    """
    if rule != _RULE:
        so = "it computes the formats of fp8_block, with low weight gradients, without stochastic rounding and without a Hadamard transform"
        raise KernelUnavailable(f"linear backend {NAME!r} for {rule.label}", so, "Leave these options out, or name 'fp8_block_emulated'.")
    out: Tensor = _Native.apply(x, weight, held, watch)  # type: ignore[no-untyped-call]
    return out


class _Native(torch.autograd.Function):
    """Keeps the cast activations, transposed, in the place of ``x``: half the bytes of bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, held: HeldWeight, watch: Watch | None) -> Tensor:
        from gem_precision.kernels.cast import cast_both
        from gem_precision.kernels.product import product

        low = cast_both(x.contiguous())
        ctx.save_for_backward(weight, low.turned.elements, low.turned.scales)
        ctx.held, ctx.watch, ctx.rows, ctx.dtype = held, watch, x.shape[0], x.dtype
        if watch is not None:
            watch("inputs", x, quantize(x, _RULE.inputs))
            if not held.travelled:
                watch("weights", weight, held.rounded(weight, transposed=False))
        return product(low.along, _cast(held, weight).along)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        from gem_precision.kernels.cast import Operand, cast_both
        from gem_precision.kernels.product import product

        weight, elements, scales = ctx.saved_tensors
        low = cast_both(grad.contiguous())
        if ctx.watch is not None:
            ctx.watch("grads", grad, quantize(grad, _RULE.grads))
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = product(low.along, _cast(ctx.held, weight).turned)[: ctx.rows].to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            dw = product(low.turned, Operand(elements, scales, square=False), torch.float32).to(weight.dtype)
        return dx, dw, None, None


def _cast(held: HeldWeight, weight: Tensor) -> "Both":
    """The weight in E4M3, cast once for each value of it. One that has travelled rounded is exact in the format already."""
    from gem_precision.kernels.cast import cast_weight

    return held.get(held.operand(weight, transposed=False) if held.travelled else weight, NAME, cast_weight)
