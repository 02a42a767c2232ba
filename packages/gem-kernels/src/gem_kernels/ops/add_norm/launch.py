"""The ``triton`` backend of ``add_norm``: the row kernels of ``norm_linear`` alone. The first call imports triton.

Forward reads x, residual and gate once and writes the result once; backward reads them and the upstream gradient once and writes the gradient of the
sum, which x and residual share, and that of the gate.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.add_norm import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct
from gem_kernels.ops.limits import MAX_NORM_WIDTH
from gem_kernels.ops.norm_linear.rows_launch import Maybe, norm_rows, norm_rows_grad


def add_norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    norm: str = "layer",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A norm of a sum, times a gate; shapes and meaning are those of ``gem_core.ops.add_norm``.

    Raises:
        KernelUnavailable: dtype, width or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    out: Tensor = _op(x, residual, gamma, beta, gate, norm == "layer", float(eps))
    return out


def _rows(*tensors: Maybe) -> list[Any]:
    """Rows ``[rows, width]`` as the kernels read them, a vector as one row. Done inside the custom ops, where autograd records no views."""
    return [None if t is None else host.readable(t.reshape(-1, t.shape[-1]))[0] for t in tensors]


@torch.library.custom_op("gem_kernels::add_norm", mutates_args=())
def _forward(x: Tensor, residual: Tensor | None, gamma: Tensor | None, beta: Tensor | None, gate: Tensor | None, layer: bool, eps: float) -> Tensor:
    host.check_call("add_norm", x, (residual, gamma, beta, gate))
    if x.shape[-1] > MAX_NORM_WIDTH:
        raise KernelUnavailable("add_norm with backend 'triton'", f"rows of {x.shape[-1]} are above {MAX_NORM_WIDTH}", "Use backend='reference'.")
    *given, factor = _rows(x, residual, gamma, beta, gate)
    return norm_rows(*given, gate=factor, layer=layer, eps=eps)[0].view(x.shape)


@torch.library.custom_op("gem_kernels::add_norm_grad", mutates_args=())
def _grad(
    dy: Tensor, x: Tensor, residual: Tensor | None, gamma: Tensor | None, beta: Tensor | None, gate: Tensor | None, layer: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum, gamma, beta and the gate; empty tensors for what is not there."""
    *given, factor = _rows(x, residual, gamma, beta, gate)
    dz, dgamma, dbeta, dgate, *_ = norm_rows_grad(dy, *given, gate=factor, layer=layer, eps=eps)
    dgamma, dbeta = (x.new_empty(0) if grad is None else grad for grad in (dgamma, dbeta))
    return dz.view(x.shape), dgamma, dbeta, x.new_empty(0) if dgate is None else dgate.view(x.shape)


@_forward.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@_grad.register_fake
def _(dy: Tensor, x: Tensor, residual: Any, *rest: Any) -> Any:
    return (x.new_empty(x.shape), *(x.new_empty(0 if t is None else t.shape) for t in rest[:3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Maybe, ...]:
    given = ctx.saved_tensors
    dz, *others = direct(_grad, dy, *given, *ctx.settings)
    grads = (dz, dz, *others)
    return (*(None if t is None else grad for t, grad in zip(given, grads, strict=True)), None, None)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula([torch.ops.gem_kernels.add_norm, torch.ops.gem_kernels.add_norm_grad], get_raw=True)
def _flops(*args: Any, **kwargs: Any) -> int:
    return flops()
