"""The ``triton`` backend of ``add_norm``: the row kernels of ``norm_linear`` alone. The first call imports triton.

Forward reads x, residual, gate and concat once and writes the result once; backward reads the first three and the upstream gradient once and writes
the gradient of the sum, which x and residual share, and that of the gate. The gradient of concat is a part of the upstream one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.add_norm import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, unwatched
from gem_kernels.ops.limits import MAX_NORM_WIDTH
from gem_kernels.ops.norm_linear.rows_launch import Maybe, norm_rows, norm_rows_grad
from gem_kernels.ops.places import grad_memory


def add_norm(
    x: Tensor,
    residual: Tensor | None = None,
    *,
    norm: str = "layer",
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    gate: Tensor | None = None,
    concat: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """A norm of a sum, times a gate; shapes and meaning are those of ``gem_core.ops.add_norm``.

    Raises:
        KernelUnavailable: dtype, width or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    out: Tensor = _op(x, residual, gamma, beta, gate, concat, norm == "layer", float(eps))
    return out


def _rows(*tensors: Maybe) -> list[Any]:
    """Rows ``[rows, width]`` as the kernels read them, a vector as one row. Done inside the custom ops, where autograd records no views."""
    return [None if t is None else host.readable(t.reshape(-1, t.shape[-1]))[0] for t in tensors]


def _out(x: Tensor, concat: Maybe) -> torch.Size:
    return x.shape if concat is None else torch.Size((*x.shape[:-1], 3 * x.shape[-1]))


@torch.library.custom_op("gem_kernels::add_norm", mutates_args=())
def _forward(
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    gate: Tensor | None,
    concat: Tensor | None,
    layer: bool,
    eps: float,
) -> Tensor:
    host.check_call("add_norm", x, (residual, gamma, beta, gate, concat))
    if x.shape[-1] > MAX_NORM_WIDTH:
        raise KernelUnavailable("add_norm with backend 'triton'", f"rows of {x.shape[-1]} are above {MAX_NORM_WIDTH}", "Use backend='reference'.")
    *given, factor, beside = _rows(x, residual, gamma, beta, gate, concat)
    return norm_rows(*given, gate=factor, concat=beside, layer=layer, eps=eps)[0].view(_out(x, concat))


@torch.library.custom_op("gem_kernels::add_norm_grad", mutates_args=())
def _grad(
    dy: Tensor,
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    gate: Tensor | None,
    layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the sum, gamma, beta and the gate; empty tensors for what is not there."""
    dz, *others = _gradients(dy, x, residual, gamma, beta, gate, layer, eps)
    dgamma, dbeta, dgate = (x.new_empty(0) if grad is None else grad for grad in others)
    return dz, dgamma, dbeta, dgate


def _gradients(
    dy: Tensor, x: Tensor, residual: Maybe, gamma: Maybe, beta: Maybe, gate: Maybe, layer: bool, eps: float, *, dgate: Maybe = None
) -> tuple[Tensor, Maybe, Maybe, Maybe]:
    """``dy`` is three times as wide as x if the gate and something else stood before the result; ``dgate`` is memory as for ``norm_rows_grad``."""
    width, dbeside = x.shape[-1], None
    if dy.shape[-1] != width:
        dbeside, dy = dy[..., :width], dy[..., 2 * width :]
    *given, factor = _rows(x, residual, gamma, beta, gate)
    found = norm_rows_grad(dy, *given, gate=factor, dgate=dgate, dbeside=dbeside, layer=layer, eps=eps)
    if dgate is None and found.dgate is not None:  # memory that was given goes back as that very tensor
        dgate = found.dgate.view(x.shape)
    return found.dz.view(x.shape), found.dgamma, found.dbeta, dgate


@_forward.register_fake
def _(x: Tensor, residual: Any, gamma: Any, beta: Any, gate: Any, concat: Maybe, *rest: Any) -> Tensor:
    return x.new_empty(_out(x, concat))


@_grad.register_fake
def _(dy: Tensor, x: Tensor, residual: Any, *rest: Any) -> Any:
    return (x.new_empty(x.shape), *(x.new_empty(0 if t is None else t.shape) for t in rest[:3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.concat, ctx.settings = inputs[5] is not None, inputs[6:]


def _backward(ctx: Any, dy: Tensor) -> tuple[Maybe, ...]:
    given = ctx.saved_tensors
    x, gate = given[0], given[4]
    if unwatched((dy, *given)):
        at = sum(t is not None for t in given[:4])  # only tensors have edges
        place = grad_memory(ctx.next_functions[at : at + 1], (gate,))[0] if gate is not None and gate.dim() == 2 else None
        dz, *others = _gradients(dy, *given, *ctx.settings, dgate=place)
    else:
        dz, *others = _grad(dy, *given, *ctx.settings)
    grads = (None if t is None else grad for t, grad in zip(given, (dz, dz, *others), strict=True))
    width = x.shape[-1]
    return (*grads, dy[..., width : 2 * width] if ctx.concat else None, None, None)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula([torch.ops.gem_kernels.add_norm, torch.ops.gem_kernels.add_norm_grad], get_raw=True)
def _flops(*args: Any, **kwargs: Any) -> int:
    return flops()
