"""The backends ``triton``, ``gluon`` and ``gluon_fp8`` of ``jagged_attention``: checks, custom ops with their fake and autograd forms, FLOP formulas.

Importing this module needs no triton; the first call does.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.jagged_attention import flops
from gem_kernels.ops.direct import differentiable, unwatched
from gem_kernels.ops.host import block_width, row_lengths
from gem_kernels.ops.jagged_attention.call import Call


def triton(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention by portable Triton; arguments, meaning and errors are those of ``gem_core.ops.jagged_attention``.

    Accumulates in float32. Tokens beyond ``max_q`` get zeros, keys beyond ``max_k`` are not seen.

    Raises:
        KernelUnavailable: dtype, head size or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    return _attend("triton", q, k, v, q_offsets, k_offsets, **options)


def gluon(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """As ``triton``, by kernels for Hopper that copy by its copy engine and multiply by warpgroups; 16-bit dtypes, no bias.

    The gradient of a shared query is the portable kernel's. A value width that is no power of two is padded.
    """
    missing = max(block_width(v.shape[-1]), 32) - v.shape[-1]
    if not missing:
        return _attend("gluon", q, k, v, q_offsets, k_offsets, **options)
    found = _attend("gluon", q, k, F.pad(v, (0, missing)), q_offsets, k_offsets, **options)
    if isinstance(found, tuple):
        return found[0][..., :-missing].contiguous(), found[1]
    return found[..., :-missing].contiguous()


def gluon_fp8(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """As ``gluon``, forward by the FP8 tensor cores of Hopper (``common.hopper.fp8``); gradients are those of ``gluon``, of the operands as given, at
    the output and statistics of this forward pass.

    Raises:
        KernelUnavailable: other than bfloat16 heads of 128 without mask, window or bias, or a query that rows share.
    """
    return _attend("gluon_fp8", q, k, v, q_offsets, k_offsets, **options)


def _attend(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
    bias: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out, lse = _op(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, causal, window, backend)
    return (out, torch.where(lse == torch.inf, -torch.inf, lse * math.log(2.0)).t()) if return_lse else out


def _call(*settings: Any, **edges: Any) -> Call:
    names = ("q", "k", "v", "q_offsets", "k_offsets", "bias", "max_q", "max_k", "scale", "causal", "window", "backend")
    return Call(op="jagged_attention", **dict(zip(names, settings, strict=True)), **edges)


@torch.library.custom_op("gem_kernels::jagged_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _call(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, causal, window, backend).forward()


@torch.library.custom_op("gem_kernels::jagged_attention_query_grad", mutates_args=())
def _query_grad(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Gradient of q, and ``delta`` ``[heads, out_tokens]`` float32, the sum of ``dout * out`` over each head."""
    return _call(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, causal, window, backend).query_grad(dout, out, lse)


@torch.library.custom_op("gem_kernels::jagged_attention_key_grad", mutates_args=())
def _key_grad(
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    return _call(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, causal, window, backend).key_grad(dout, delta, lse)


@torch.library.custom_op("gem_kernels::jagged_attention_bias_grad", mutates_args=())
def _bias_grad(
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    backend: str,
) -> Tensor:
    return _call(q, k, v, q_offsets, k_offsets, bias, max_q, max_k, scale, causal, window, backend).bias_grad(dout, delta, lse)


def _out_tokens(q: Tensor, q_offsets: Tensor | None, k_offsets: Tensor) -> int:
    return q.shape[0] * (k_offsets.shape[0] - 1 if q_offsets is None else 1)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    tokens = _out_tokens(q, q_offsets, k_offsets)
    return q.new_empty((tokens, q.shape[1], v.shape[-1])), q.new_empty((q.shape[1], tokens), dtype=torch.float32)


@_query_grad.register_fake
def _(dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), lse.new_empty(lse.shape)


@_key_grad.register_fake
def _(dout: Tensor, delta: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape)


@_bias_grad.register_fake
def _(
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor,
    *rest: Any,
) -> Tensor:
    return bias.new_empty(bias.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.settings = inputs[6:]


def _backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    settings = (*tensors, *ctx.settings)
    if unwatched((dout, *tensors)):
        call = _call(*settings, edges=ctx.next_functions[:3])
        query_grad, key_grad, bias_grad = call.query_grad, call.key_grad, call.bias_grad
    else:
        query_grad, key_grad, bias_grad = (lambda *given, op=op: op(*given, *settings) for op in (_query_grad, _key_grad, _bias_grad))
    dq, delta = query_grad(dout, out, lse)
    dk = dv = dbias = None
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        dk, dv = key_grad(dout, delta, lse)
    if ctx.needs_input_grad[5]:
        dbias = bias_grad(dout, delta, lse)
    return (dq, dk, dv, None, None, dbias, *(None,) * 6)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.jagged_attention, get_raw=True)
def _forward_flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor,
    bias: Tensor | None,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: int | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    return flops(
        q_lengths=max_q if q_offsets is None else row_lengths(q_offsets, max_q),
        k_lengths=row_lengths(k_offsets, max_k),
        heads=q.shape[1],
        dim=q.shape[-1],
        v_dim=v.shape[-1],
        causal=causal,
        window=window,
    )


@register_flop_formula([torch.ops.gem_kernels.jagged_attention_query_grad, torch.ops.gem_kernels.jagged_attention_key_grad], get_raw=True)
def _backward_flops(dout: Tensor, x: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> int:
    """Each pass has two of the four gradient products; the recomputed scores are not model FLOPs."""
    return _forward_flops(*args, **kwargs)
