"""A norm before a linear layer, and two linear layers with an activation between them, in ``fp8_block`` with every cast but those of outer gradients
fused into what produces the operand."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_precision.kernels.activation import Activation, activation_both
from gem_precision.kernels.cast import Both, Operand, cast_and_sum, cast_both
from gem_precision.kernels.norm import norm_both, norm_grad
from gem_precision.kernels.product import product


def norm_linear(
    x: Tensor, weight: Tensor, cast: Both, gamma: Tensor, beta: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """``N(x) weight^T + bias``: a layer norm with ``beta``, without it an RMS norm.

    Args:
        x: ``[rows, in]``, ``in`` at most 4,096.
        weight: ``[out, in]``; its gradient is float32 before it takes the weight's dtype.
        cast: the weight in 128 x 128 blocks, of ``cast_weight``.
        gamma, beta: ``[in]``.
        bias: ``[out]``.
        eps: added to the mean square.

    Returns:
        ``[rows, out]`` bfloat16.
    """
    out: Tensor = _NormLinear.apply(x, weight, cast, gamma, beta, bias, eps)  # type: ignore[no-untyped-call]
    return out


def mlp(x: Tensor, first: Tensor, second: Tensor, casts: tuple[Both, Both], activation: Activation) -> Tensor:
    """``f(x first^T) second^T``.

    Args:
        x: ``[rows, in]``.
        first, second: ``[hidden, in]`` and ``[out, hidden]``.
        casts: both weights in 128 x 128 blocks.
        activation: f.

    Returns:
        ``[rows, out]`` bfloat16.
    """
    out: Tensor = _Mlp.apply(x, first, second, casts, activation)  # type: ignore[no-untyped-call]
    return out


def _weight_grad(grad: Both, elements: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """``grad^T operand``, the operand given transposed."""
    return product(grad.turned, Operand(elements, scales, square=False), torch.float32).to(weight.dtype)


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cast: Both, gamma: Tensor, beta: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        low, means, inverses = norm_both(x, gamma, beta, eps=eps)
        ctx.save_for_backward(x, weight, gamma, means, inverses, low.turned.elements, low.turned.scales)
        ctx.cast, ctx.layer, ctx.bias_dtype = cast, beta is not None, None if bias is None else bias.dtype
        return product(low.along, cast.along, bias=bias)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gamma, means, inverses, elements, scales = ctx.saved_tensors
        grad, db = grad.contiguous(), None
        if ctx.bias_dtype is None:
            low = cast_both(grad)
        else:
            low, sums = cast_and_sum(grad)
            db = sums.to(ctx.bias_dtype)
        dn = product(low.along, ctx.cast.turned)[: x.shape[0]]
        dx, by_gamma, by_beta = norm_grad(x, dn, gamma, means, inverses, norm="layer" if ctx.layer else "rms")
        dw = _weight_grad(low, elements, scales, weight)
        return dx, dw, None, by_gamma.to(gamma.dtype), by_beta.to(gamma.dtype) if ctx.layer else None, db, None


class _Mlp(torch.autograd.Function):
    """Keeps the hidden values before the activation in bfloat16, and the transposed casts of both layers' inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: Tensor, second: Tensor, casts: tuple[Both, Both], activation: Activation) -> Tensor:
        low = cast_both(x.contiguous())
        hidden = product(low.along, casts[0].along)[: x.shape[0]]
        active = activation_both(hidden, activation)
        ctx.save_for_backward(first, second, hidden, low.turned.elements, low.turned.scales, active.turned.elements, active.turned.scales)
        ctx.casts, ctx.activation, ctx.dtype = casts, activation, x.dtype
        return product(active.along, casts[1].along)[: x.shape[0]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, second, hidden, x_elements, x_scales, active_elements, active_scales = ctx.saved_tensors
        rows = hidden.shape[0]
        low = cast_both(grad.contiguous())
        d_second = _weight_grad(low, active_elements, active_scales, second)
        d_active = product(low.along, ctx.casts[1].turned)[:rows]
        d_hidden = activation_both(hidden, ctx.activation, d_active)
        d_first = _weight_grad(d_hidden, x_elements, x_scales, first)
        dx = product(d_hidden.along, ctx.casts[0].turned)[:rows].to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, d_first, d_second, None, None
