"""Linear layers whose products run on Hopper's FP8 tensor cores: ``fp8_block`` for speed.

E4M3 everywhere, with scales for 1 x 128 of activations and gradients and for 128 x 128 of weights, all powers of two: the recipe of arXiv 2412.19437.
Casts are ours, products are those of ``torch._scaled_mm``, which promotes partial sums to float32 every 128 elements. The numbers are those of the
emulation up to the order of sums and the rounding of the results to bfloat16.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

BLOCK = 128


def unfit(module: nn.Linear, device_type: str) -> list[str]:
    """Why a layer cannot run natively here; empty where it can."""
    reasons = []
    if device_type != "cuda":
        reasons.append(f"the run is on {device_type}, the products need a CUDA device")
    elif torch.cuda.get_device_capability() != (9, 0):
        reasons.append(f"block-scaled products need sm90, this is sm{''.join(map(str, torch.cuda.get_device_capability()))}")
    for name, width in (("inputs", module.in_features), ("outputs", module.out_features)):
        if width % BLOCK:
            reasons.append(f"{width} {name} are no multiple of {BLOCK}")
    if find_spec("triton") is None:
        reasons.append("triton is not installed")
    return reasons


class NativeForward:
    """The forward of a layer, an attribute of the module. The weight is cast once for each version of it, not in every micro-batch."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module
        self._cast: tuple[int, tuple[Tensor, ...]] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            flat = x.reshape(-1, x.shape[-1])
            out: Tensor = _Native.apply(flat.to(torch.bfloat16), self.module.weight, self._weight())  # type: ignore[no-untyped-call]
            if self.module.bias is not None:
                out = out + self.module.bias.to(out.dtype)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _weight(self) -> tuple[Tensor, ...]:
        from gem_precision.kernels.cast import cast_square

        weight = self.module.weight
        if self._cast is None or self._cast[0] != weight._version:
            self._cast = weight._version, cast_square(weight.detach())
        return self._cast[1]


class _Native(torch.autograd.Function):
    """``x w^T`` of ``[n, in]`` bfloat16 and ``[out, in]``, bfloat16. Keeps the cast activations, half the bytes, in the place of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: tuple[Tensor, ...]) -> Tensor:
        from gem_precision.kernels.cast import cast_both

        low, scales, turned, turned_scales = cast_both(x)
        w, w_scales, w_turned, w_turned_scales = cast
        ctx.save_for_backward(turned, turned_scales, w_turned, w_turned_scales)
        ctx.rows, ctx.dtype = x.shape[0], weight.dtype
        return _product(low, w, scales, w_scales)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from gem_precision.kernels.cast import cast_both

        x_turned, x_scales, w_turned, w_scales = ctx.saved_tensors
        low, scales, turned, turned_scales = cast_both(grad.contiguous())
        dx = _product(low, w_turned, scales, w_scales)[: ctx.rows] if ctx.needs_input_grad[0] else None
        dw = _product(turned, x_turned, turned_scales, x_scales).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _product(left: Tensor, right: Tensor, left_scales: Tensor, right_scales: Tensor) -> Tensor:
    """``left right^T`` of ``[m, k]`` and ``[n, k]`` E4M3: bfloat16; zeros where ``m`` or ``k`` is 0."""
    if not left.numel():
        return torch.zeros(left.shape[0], right.shape[0], dtype=torch.bfloat16, device=left.device)
    out: Tensor = torch._scaled_mm(left, right.t(), left_scales, right_scales.t(), out_dtype=torch.bfloat16)
    return out


def lower_natively(module: nn.Linear) -> None:
    """Change a layer in place. Touches no tensor."""
    vars(module)["forward"] = NativeForward(module)
