"""The ``triton`` backend of ``block_attention``: custom ops with fake and autograd registration, FLOP formulas. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.block_attention import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.common.tuning import tuned
from gem_kernels.ops import host
from gem_kernels.ops.block_attention.configs import INTERPRETER, TILE, Key, choose
from gem_kernels.ops.direct import differentiable, unwatched
from gem_kernels.ops.limits import MAX_BLOCK, MAX_BLOCK_WIDTH
from gem_kernels.ops.norm_linear.rows_launch import norm_rows_grad
from gem_kernels.ops.places import NOWHERE, grad_memory, parts_in
from gem_kernels.ops.ragged import copied, ragged


def key_of(direction: str, q: Tensor, v: Tensor, tile: int, *, turned: bool, normed: bool) -> Key:
    """The bucketed facts of one launch."""
    width = host.block_width(max(q.shape[-1], v.shape[-1]))
    return Key(direction, tile, width, q.element_size() > 2, turned, normed, host.roomy(q))


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_length: int,
    block: int = 64,
    scale: float | None = None,
    rope: Tensor | None = None,
    rope_on_v: bool = False,
    q_gain: Tensor | None = None,
    k_gain: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Softmax attention inside the diagonal blocks of each row; shapes and meaning are those of ``gem_core.ops.block_attention``.

    Raises:
        KernelUnavailable: dtype, head size, block or device that this backend does not take.
        MachineError: triton is missing, or the tensors lie on the CPU and the interpreter is off.
    """
    limit = TILE if q.dtype is torch.float32 else MAX_BLOCK
    if block > limit:
        so = f"a block of {block} is above {limit}, the most in {q.dtype}"
        raise KernelUnavailable("block_attention with backend 'triton'", so, "Use backend='reference'.")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    out: Tensor = _op(q, k, v, q_gain, k_gain, offsets, rope, max_length, block, factor, rope_on_v, float(eps))
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.block_attention.triton")


@cache
def _hopper() -> Any:
    return import_module("gem_kernels.ops.block_attention.hopper_launch")


def _on_hopper(q: Tensor, v: Tensor, block: int, *, changed: bool) -> bool:
    """Whether the kernels for Hopper take tensors that the copy engine addresses: where q and k are changed on their way into the products, which
    costs the portable ones most."""
    return changed and block <= TILE and {q.shape[-1], v.shape[-1]} <= {64, 128}


Settings = tuple[int, int, float, bool, float]
"""``max_length, block, scale, rope_on_v, eps``."""
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]
"""``q, k, v, q_gain, k_gain, offsets, rope``."""


def _inputs(q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, offsets: Tensor, rope: Tensor | None) -> Inputs:
    """As the kernels read them."""
    q, k, v = host.readable(q, k, v)
    gains = tuple(None if gain is None else gain.contiguous() for gain in (q_gain, k_gain))
    return q, k, v, gains[0], gains[1], offsets, None if rope is None else host.readable(rope)[0]


def _run(kernel: str, inputs: Inputs, settings: Settings, results: dict[str, Tensor], *, dout: Tensor | None = None) -> None:
    """Launch a kernel, which writes ``results``."""
    q, k, v, q_gain, k_gain, offsets, rope = inputs
    max_length, block, scale, rope_on_v, eps = settings
    rows, heads, dim, v_dim = offsets.shape[0] - 1, q.shape[1], q.shape[2], v.shape[2]
    normed, upstream = q_gain is not None, {} if dout is None else {"dout": dout}
    tile = TILE if block <= TILE else MAX_BLOCK
    span = tile // block * block
    engine = copied(q, k, v, *upstream.values())
    if engine and _on_hopper(q, v, block, changed=normed or rope is not None):
        _hopper().run(kernel, inputs, settings, results, dout)
        return
    key = key_of(kernel, q, v, tile, turned=rope is not None, normed=normed)
    config = INTERPRETER if host.interpreted() else tuned("block_attention", key, choose(key))
    chunk = span * config.tiles
    arguments: dict[str, Any] = {"q": q, "k": k, "v": v, **upstream}
    if engine:
        arguments = {name: ragged(x, tile) for name, x in arguments.items()}
    arguments |= results | {f"{name}_desc": ragged(x, tile) if engine else None for name, x in results.items()}
    if dout is not None:
        arguments |= {f"{name.upper()}_PARTS": parts_in(x) for name, x in results.items()}
    host.launch(
        getattr(_kernels(), f"{kernel}_kernel"), q, rows * heads * -(-max_length // chunk), rope=rope, q_gain=q_gain, k_gain=k_gain, offsets=offsets,
        rows=rows, heads=heads, total=q.shape[0], max_length=max_length, scale=scale, eps=eps,
        q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1), v_token=v.stride(0), v_head=v.stride(1),
        rope_token=0 if rope is None else rope.stride(0), DIM=dim, V_DIM=v_dim, BLOCK=block, SPAN=span, ROWS=tile, CHUNK=chunk,
        BLOCK_D=host.block_width(dim), BLOCK_V=host.block_width(v_dim), ROPE=rope is not None, ROPE_V=rope_on_v, NORM=normed,
        FAST=host.approximate(q), PRECISION=host.precision(q), STAGES=config.stages, ENGINE=engine, num_warps=config.warps,
        maxnreg=config.registers, **arguments,
    )  # fmt: skip


@torch.library.custom_op("gem_kernels::block_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    offsets: Tensor,
    rope: Tensor | None,
    max_length: int,
    block: int,
    scale: float,
    rope_on_v: bool,
    eps: float,
) -> Tensor:
    host.check_call("block_attention", q, (k, v, q_gain, k_gain), width=max(q.shape[-1], v.shape[-1]), limit=MAX_BLOCK_WIDTH)
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    if offsets.shape[0] < 2 or max_length == 0 or q.shape[0] == 0:
        return q.new_zeros(shape)
    out = q.new_empty(shape)
    _run("forward", _inputs(q, k, v, q_gain, k_gain, offsets, rope), (max_length, block, scale, rope_on_v, eps), {"out": out})
    return out


@torch.library.custom_op("gem_kernels::block_attention_grad", mutates_args=())
def _grad(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    offsets: Tensor,
    rope: Tensor | None,
    max_length: int,
    block: int,
    scale: float,
    rope_on_v: bool,
    eps: float,
) -> list[Tensor]:
    settings, grads = (max_length, block, scale, rope_on_v, eps), [t.new_empty(t.shape) for t in (q, k, v)]
    return _gradients(dout, (q, k, v, q_gain, k_gain, offsets, rope), settings, grads)


def _gradients(dout: Tensor, inputs: Inputs, settings: Settings, grads: list[Tensor]) -> list[Tensor]:
    """Gradients of q, k and v, which are written to ``grads``, and of both gains where there are any."""
    q, k, _, q_gain, k_gain, offsets, _ = inputs
    max_length, _, _, _, eps = settings
    gains = [] if q_gain is None or k_gain is None else [q_gain, k_gain]
    if offsets.shape[0] < 2 or max_length == 0 or q.shape[0] == 0:
        return [*(grad.zero_() for grad in grads), *map(torch.zeros_like, gains)]
    _run("backward", _inputs(*inputs), settings, dict(zip(("dq", "dk", "dv"), grads, strict=True)), dout=dout.contiguous())
    if q_gain is None or k_gain is None:
        return grads
    grads[0], dq_gain = _through_norm(grads[0], q, q_gain, eps)  # one after the other: each frees what it replaces
    grads[1], dk_gain = _through_norm(grads[1], k, k_gain, eps)
    return [*grads, dq_gain, dk_gain]


def _through_norm(dy: Tensor, x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of heads and gain by that of the normed heads."""
    flat = x.reshape(-1, x.shape[-1])
    dx, dgain, *_ = norm_rows_grad(dy.view(-1, dy.shape[-1]), flat, None, gain.contiguous(), None, layer=False, eps=eps)
    assert dgain is not None  # as there is a gain
    return dx.view(x.shape), dgain


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))


@_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, *rest: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (q, k, v, q_gain, k_gain) if t is not None]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.settings = inputs[7:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    inputs: Inputs = ctx.saved_tensors
    if unwatched((dout, *inputs)):
        q, k, v, q_gain, *_ = inputs
        edges = ctx.next_functions[:3]
        # Gradients of normed heads go through the norm, which gives those of q and k memory of its own.
        memory = grad_memory(edges if q_gain is None else (*NOWHERE[:2], edges[2]), (q, k, v))
        grads = _gradients(dout, inputs, ctx.settings, memory)
    else:
        grads = _grad(dout, *inputs, *ctx.settings)
    return (*grads, *(None,) * (12 - len(grads)))


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.block_attention, get_raw=True)
def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, q_gain: Any, k_gain: Any, offsets: Tensor, rope: Any, max_length: int, block: int, *args: Any, **kwargs: Any
) -> int:
    return flops(lengths=host.row_lengths(offsets, max_length), heads=q.shape[1], dim=q.shape[2], v_dim=v.shape[2], block=block)


@register_flop_formula(torch.ops.gem_kernels.block_attention_grad, get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **kwargs: Any) -> int:
    """Four gradient products; the recomputed scores are not model FLOPs."""
    return 2 * _forward_flops(*args, **kwargs)
