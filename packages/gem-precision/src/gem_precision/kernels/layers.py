"""A norm before a linear layer, and two linear layers with an activation between them, in ``fp8_block`` with every cast but those of outer gradients
fused into what produces the operand."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_precision.kernels.activation import Activation, activation_both
from gem_precision.kernels.cast import SIDE, TALL, Both, Operand, cast_and_sum, cast_both
from gem_precision.kernels.norm import Norm, norm_both, norm_grad
from gem_precision.kernels.product import product


def norm_linear(
    x: Tensor,
    weight: Tensor,
    cast: Both,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm,
    branch: Tensor | None = None,
    square: bool = False,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """``N(x + branch) weight^T + bias``, and ``x + branch``.

    One kernel adds, norms and casts; the gradient of the sum is added where that of the norm is made.

    Args:
        x: ``[rows, in]``, ``in`` at most 4,096.
        weight: ``[out, in]``; its gradient is float32 before it takes the weight's dtype.
        cast: the weight in 128 x 128 blocks, of ``cast_weight``.
        gamma, beta: ``[in]``, ones and zeros by default; beta with a gamma, and for a layer norm alone.
        bias: ``[out]``.
        norm: its kind.
        branch: ``[rows, in]`` of x's dtype.
        square: the normed rows in 128 x 128 blocks (``fp8_square``), which makes the weight gradient a faster product, instead of 1 x 128.
        eps: added to the mean square.

    Returns:
        ``[rows, out]`` bfloat16, and ``[rows, in]`` of x's dtype: x itself without a branch.
    """
    out: tuple[Tensor, Tensor] = _NormLinear.apply(x, branch, weight, cast, gamma, beta, bias, norm, square, eps)  # type: ignore[no-untyped-call]
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


def _weight_grad(grad: Both, operand: Operand, weight: Tensor) -> Tensor:
    """``grad^T operand``, the operand given transposed."""
    return product(grad.turned, operand, torch.float32).to(weight.dtype)


class _NormLinear(torch.autograd.Function):
    """Keeps the sum that the norm read, statistics of rows, and the normed rows cast and transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        cast: Both,
        gamma: Tensor | None,
        beta: Tensor | None,
        bias: Tensor | None,
        norm: Norm,
        square: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)  # of the sum, which nobody may read
        branch = None if branch is None else branch.contiguous()
        low, total, means, inverses = norm_both(x.contiguous(), gamma, beta, norm=norm, branch=branch, square=square, eps=eps)
        ctx.save_for_backward(total, weight, gamma, means, inverses, low.turned.elements, low.turned.scales)
        ctx.cast, ctx.norm, ctx.square, ctx.shifted = cast, norm, square, beta is not None
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(low.along, cast.along, bias=bias)[: x.shape[0]], total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, more: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return more, more if ctx.needs_input_grad[1] else None, *(None,) * 8
        total, weight, gamma, means, inverses, elements, scales = ctx.saved_tensors
        grad, multiple, db = grad.contiguous(), TALL if ctx.square else SIDE, None
        if ctx.bias_dtype is None:
            low = cast_both(grad, multiple)
        else:
            low, sums = cast_and_sum(grad, multiple)
            db = sums.to(ctx.bias_dtype)
        dn = product(low.along, ctx.cast.turned)[: total.shape[0]]
        dx, by_gamma, by_beta = norm_grad(total, dn, gamma, means, inverses, norm=ctx.norm, more=more)
        dw = _weight_grad(low, Operand(elements, scales, square=ctx.square), weight)
        columns = (None if sums is None else sums.to(gamma.dtype) for sums in (by_gamma, by_beta if ctx.shifted else None))
        return dx, dx if ctx.needs_input_grad[1] else None, dw, None, *columns, db, None, None, None


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
        d_second = _weight_grad(low, Operand(active_elements, active_scales, square=False), second)
        d_active = product(low.along, ctx.casts[1].turned)[:rows]
        d_hidden = activation_both(hidden, ctx.activation, d_active)
        d_first = _weight_grad(d_hidden, Operand(x_elements, x_scales, square=False), first)
        dx = product(d_hidden.along, ctx.casts[0].turned)[:rows].to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, d_first, d_second, None, None
