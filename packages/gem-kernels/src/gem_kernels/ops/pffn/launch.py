"""The ``triton`` backend of ``pffn``: a norm kernel, the gdpa kernels and a kernel that adds, norms and adds. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import KernelUnavailable
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct
from gem_kernels.ops.gdpa.launch import gdpa
from gem_kernels.ops.limits import MAX_NORM_WIDTH, MAX_WIDTH
from gem_kernels.ops.norm_linear.rows_launch import norm_rows, norm_rows_grad, row_tile

JUMPING = "gelu_fast"
"""Its slope jumps by 0.17 at both ends of the polynomial."""
HALVED = (torch.bfloat16,)
"""Dtypes so coarse that rounding the normed queries carries some scores across such a jump, and gradients out of the bound of the conformance suite:
there the queries are the sum of two tensors of the dtype, side by side, and the keys are seen twice. torch's counter of FLOPs counts both."""


def pffn(
    q0: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    *,
    max_q: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    eps: float = 1e-5,
) -> Tensor:
    """The personalised feed-forward block; shapes and meaning are those of ``gem_core.ops.pffn``.

    Raises:
        KernelUnavailable: dtype, width or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    flat = q0.flatten(1).contiguous()
    if activation == JUMPING and q0.dtype in HALVED:
        if q0.shape[2] > MAX_WIDTH // 2:
            so = f"{JUMPING} takes queries in two halves, and head size {q0.shape[2]} is above {MAX_WIDTH // 2}"
            raise KernelUnavailable("pffn with backend 'triton'", so, "Use backend='reference'.")
        ln, k = _halves_op(q0, float(eps)), torch.cat([k, k], dim=-1)
    else:
        ln = _norm_op(flat, float(eps)).view_as(q0)
    options: dict[str, Any] = {"activation": activation, "scale": scale, "scale_position": scale_position}
    o = gdpa(ln, k, v, q_offsets, None, max_q=max_q, max_k=k.shape[1], **options)
    out: Tensor = _out_op(o.flatten(1), flat, q_offsets, max_q, float(eps))
    return out.view_as(q0)


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.pffn.triton")


@torch.library.custom_op("gem_kernels::pffn_norm", mutates_args=())
def _norm(x: Tensor, eps: float) -> Tensor:
    host.check_call("pffn", x)
    if x.shape[1] > MAX_NORM_WIDTH:
        raise KernelUnavailable("pffn with backend 'triton'", f"tokens of {x.shape[1]} are above {MAX_NORM_WIDTH}", "Use backend='reference'.")
    return norm_rows(x, None, None, None, layer=True, eps=eps)[0]


@torch.library.custom_op("gem_kernels::pffn_norm_halves", mutates_args=())
def _halves(q0: Tensor, eps: float) -> Tensor:
    """``LayerNorm(q0)`` ``[tokens, heads, 2 dim]``: rounded, and beside it what rounding has lost."""
    host.check_call("pffn", q0)
    whole = _norm(q0.flatten(1).float(), eps).view(q0.shape)
    high = whole.to(q0.dtype)
    return torch.cat([high, (whole - high).to(q0.dtype)], dim=-1)


@torch.library.custom_op("gem_kernels::pffn_norm_grad", mutates_args=())
def _norm_grad(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    return norm_rows_grad(dy, x, None, None, None, layer=True, eps=eps)[0]


def _run(kernel: Any, x: Tensor, offsets: Tensor, max_q: int, eps: float, **tensors: Any) -> None:
    tile, block, warps = row_tile(x.shape[1])
    rows = offsets.shape[0] - 1
    host.launch(
        kernel, x, rows * -(-max_q // tile), offsets=offsets, rows=rows, total=x.shape[0], max_q=max_q, eps=eps, WIDTH=x.shape[1], ROWS=tile,
        BLOCK=block, num_warps=warps, **tensors,
    )  # fmt: skip


@torch.library.custom_op("gem_kernels::pffn_out", mutates_args=())
def _out(o: Tensor, q0: Tensor, offsets: Tensor, max_q: int, eps: float) -> Tensor:
    if offsets.shape[0] < 2 or max_q == 0:
        return q0.new_zeros(q0.shape)
    out = q0.new_empty(q0.shape)
    _run(_kernels().forward_kernel, q0, offsets, max_q, eps, o=o.contiguous(), q0=q0, out=out)
    return out


@torch.library.custom_op("gem_kernels::pffn_out_grad", mutates_args=())
def _out_grad(dy: Tensor, o: Tensor, q0: Tensor, offsets: Tensor, max_q: int, eps: float) -> tuple[Tensor, Tensor]:
    if offsets.shape[0] < 2 or max_q == 0:
        return q0.new_zeros(q0.shape), q0.new_zeros(q0.shape)
    do, dq0 = q0.new_empty(q0.shape), q0.new_empty(q0.shape)
    _run(_kernels().backward_kernel, q0, offsets, max_q, eps, o=o.contiguous(), q0=q0, dy=dy.contiguous(), do=do, dq0=dq0)
    return do, dq0


@_norm.register_fake
def _(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_halves.register_fake
def _(q0: Tensor, eps: float) -> Tensor:
    return q0.new_empty((*q0.shape[:2], 2 * q0.shape[2]))


@_norm_grad.register_fake
def _(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@_out.register_fake
def _(o: Tensor, q0: Tensor, *rest: Any) -> Tensor:
    return q0.new_empty(q0.shape)


@_out_grad.register_fake
def _(dy: Tensor, o: Tensor, q0: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q0.new_empty(q0.shape), q0.new_empty(q0.shape)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.eps = inputs[1]


def _norm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return direct(_norm_grad, dy, *ctx.saved_tensors, ctx.eps), None


def _halves_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    """Both halves have the gradient of their sum."""
    (q0,) = ctx.saved_tensors
    one = dy[..., : q0.shape[2]].flatten(1).contiguous()
    return direct(_norm_grad, one, q0.flatten(1).contiguous(), ctx.eps).view(q0.shape), None


def _save_out(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.settings = inputs[3:]


def _out_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*direct(_out_grad, dy, *ctx.saved_tensors, *ctx.settings), None, None, None)


_norm_op = differentiable(_norm, _norm_backward, _save_norm)
_halves_op = differentiable(_halves, _halves_backward, _save_norm)
_out_op = differentiable(_out, _out_backward, _save_out)
