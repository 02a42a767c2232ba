"""The ``triton``, ``gluon`` and ``gluon_fp8`` backends of ``gdpa``: custom ops with fake and autograd registration, FLOP formulas.

Importing this module needs no triton; the first call does.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.gdpa import flops
from gem_core.spec import RequestError
from gem_kernels.ops.direct import differentiable, unwatched
from gem_kernels.ops.gdpa.call import Call
from gem_kernels.ops.host import block_width, row_lengths


def gdpa(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, **options: Any) -> Tensor:
    """Generalised dot-product attention by portable Triton; arguments and meaning are those of ``gem_core.ops.gdpa``.

    Accumulates in float32. Tokens beyond ``max_q`` get zeros, keys beyond ``max_k`` are not seen.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    return _attend("triton", q, k, v, q_offsets, k_offsets, **options)


def gluon(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, **options: Any) -> Tensor:
    """As ``gdpa``, by kernels for Hopper that copy by its copy engine and multiply by warpgroups; 16-bit dtypes.

    The gradient of a shared query is the portable kernel's. A value width that is no power of two is padded.
    """
    missing = max(block_width(v.shape[-1]), 32) - v.shape[-1]
    if not missing:
        return _attend("gluon", q, k, v, q_offsets, k_offsets, **options)
    return _attend("gluon", q, k, F.pad(v, (0, missing)), q_offsets, k_offsets, **options)[..., :-missing].contiguous()


def gluon_fp8(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, **options: Any) -> Tensor:
    """As ``gluon``, forward by the FP8 tensor cores of Hopper (``common.hopper.fp8``); gradients are those of ``gluon``, of the operands as given.

    Raises:
        KernelUnavailable: other than bfloat16 heads of 128 without a window, a query that rows share, or an activation other than GELU and SiLU.
    """
    return _attend("gluon_fp8", q, k, v, q_offsets, k_offsets, **options)


def _attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str = "gelu",
    scale: float = 1.0,
    scale_position: str = "inside",
    window: int | None = None,
) -> Tensor:
    if scale_position not in ("inside", "after"):
        raise RequestError(f"gdpa scale_position={scale_position!r}", "it is neither 'inside' nor 'after'", "Choose one of the two.")
    after = scale_position == "after"
    out: Tensor = _op(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, float(scale), after, window, backend)
    return out


def _call(*settings: Any) -> Call:
    names = ("q", "k", "v", "q_offsets", "k_offsets", "max_q", "max_k", "activation", "scale", "scale_after", "window", "backend")
    return Call(op="gdpa", **dict(zip(names, settings, strict=True)))


@torch.library.custom_op("gem_kernels::gdpa", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    return _call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window, backend).forward()


@torch.library.custom_op("gem_kernels::gdpa_query_grad", mutates_args=())
def _query_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    return _call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window, backend).query_grad(dout)


@torch.library.custom_op("gem_kernels::gdpa_key_grad", mutates_args=())
def _key_grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _call(q, k, v, q_offsets, k_offsets, max_q, max_k, activation, scale, scale_after, window, backend).key_grad(dout)


def _rows(q_offsets: Tensor | None, k: Tensor, k_offsets: Tensor | None) -> int:
    if q_offsets is not None:
        return q_offsets.shape[0] - 1
    return k.shape[0] if k_offsets is None else k_offsets.shape[0] - 1


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None, *rest: Any) -> Tensor:
    tokens = q.shape[0] if q_offsets is not None else q.shape[0] * _rows(None, k, k_offsets)
    return q.new_empty((tokens, q.shape[1], v.shape[-1]))


@_query_grad.register_fake
def _(dout: Tensor, q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape)


@_key_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    settings = (*ctx.saved_tensors, *ctx.settings)
    if unwatched((dout, *settings)):
        call = _call(*settings)
        query_grad, key_grad = call.query_grad, call.key_grad
    else:
        query_grad, key_grad = (lambda given, op=op: op(given, *settings) for op in (_query_grad, _key_grad))
    dq = query_grad(dout) if ctx.needs_input_grad[0] else None
    dk, dv = key_grad(dout) if ctx.needs_input_grad[1] or ctx.needs_input_grad[2] else (None, None)
    return (dq, dk, dv, *(None,) * 9)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.gdpa, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    max_q: int,
    max_k: int,
    activation: str,
    scale: float,
    scale_after: bool,
    window: int | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    rows = _rows(q_offsets, k, k_offsets)

    def lengths(offsets: Tensor | None, longest: int) -> Sequence[int]:
        return [longest] * int(rows) if offsets is None else row_lengths(offsets, longest)

    return flops(
        q_lengths=lengths(q_offsets, max_q),
        k_lengths=lengths(k_offsets, max_k),
        heads=q.shape[1],
        dim=q.shape[-1],
        v_dim=v.shape[-1],
        window=window,
    )


@register_flop_formula([torch.ops.gem_kernels.gdpa_query_grad, torch.ops.gem_kernels.gdpa_key_grad], get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **kwargs: Any) -> int:
    """Each pass has two of the four gradient products; the recomputed scores are not model FLOPs."""
    return _forward_flops(*args, **kwargs)
