"""The ``triton`` backend of ``block_attention``: custom ops with fake and autograd registration, FLOP formulas. The first call imports triton."""

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gem_core.ops.block_attention import flops
from gem_core.spec import KernelUnavailable
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, direct
from gem_kernels.ops.limits import MAX_BLOCK, MAX_BLOCK_WIDTH

TILE = 64
"""Tokens of a tile, for blocks up to it: smaller blocks share one."""


class Config(NamedTuple):
    """Tokens of a program in tiles, warps, stages of the load pipeline, and registers a thread (None: as many as it wants)."""

    tiles: int
    warps: int
    stages: int
    registers: int | None


FORWARD = Config(8, 4, 2, None)
TURNED = Config(8, 4, 1, 168)
"""Forward with rotation, and where shared memory is short."""
BACKWARD = Config(8, 4, 1, None)
TURNED_BACKWARD = Config(1, 4, 1, None)
WIDE = Config(1, 8, 1, None)
"""Float32 inputs, and blocks above ``TILE``."""
INTERPRETER = Config(2, 1, 1, None)


def choose(kernel: str, tile: int, *, wide_dtype: bool, turned: bool, roomy: bool) -> Config:
    """The configuration of a CUDA launch of ``forward`` or ``backward``, measured on an H200."""
    if wide_dtype or tile > TILE:
        return WIDE
    if kernel == "backward":
        return TURNED_BACKWARD if turned else BACKWARD
    return FORWARD if roomy and not turned else TURNED


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
    out: Tensor = _op(q, k, v, offsets, rope, max_length, block, factor, rope_on_v)
    return out


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.block_attention.triton")


Settings = tuple[int, int, float, bool]
"""``max_length, block, scale, rope_on_v``."""


def _run(kernel: str, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, rope: Tensor | None, settings: Settings, **results: Any) -> None:
    max_length, block, scale, rope_on_v = settings
    rows, heads, dim, v_dim = offsets.shape[0] - 1, q.shape[1], q.shape[2], v.shape[2]
    tile = TILE if block <= TILE else MAX_BLOCK
    span = tile // block * block
    options = {"wide_dtype": q.element_size() > 2, "turned": rope is not None, "roomy": host.roomy(q)}
    config = INTERPRETER if host.interpreted() else choose(kernel, tile, **options)
    chunk = span * config.tiles
    host.launch(
        getattr(_kernels(), f"{kernel}_kernel"), q, rows * heads * -(-max_length // chunk), q=q, k=k, v=v, rope=rope, offsets=offsets, rows=rows,
        heads=heads, total=q.shape[0], max_length=max_length, scale=scale,
        q_token=q.stride(0), q_head=q.stride(1), k_token=k.stride(0), k_head=k.stride(1), v_token=v.stride(0), v_head=v.stride(1),
        rope_token=0 if rope is None else rope.stride(0), DIM=dim, V_DIM=v_dim, BLOCK=block, SPAN=span, ROWS=tile, CHUNK=chunk,
        BLOCK_D=host.block_width(dim), BLOCK_V=host.block_width(v_dim), ROPE=rope is not None, ROPE_V=rope_on_v,
        FAST=host.approximate(q), PRECISION=host.precision(q), STAGES=config.stages, num_warps=config.warps,
        maxnreg=config.registers, **results,
    )  # fmt: skip


@torch.library.custom_op("gem_kernels::block_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, rope: Tensor | None, max_length: int, block: int, scale: float, rope_on_v: bool
) -> Tensor:
    host.check_call("block_attention", q, (k, v), width=max(q.shape[-1], v.shape[-1]), limit=MAX_BLOCK_WIDTH)
    q, k, v = host.readable(q, k, v)
    shape = (q.shape[0], q.shape[1], v.shape[-1])
    if offsets.shape[0] < 2 or max_length == 0:
        return q.new_zeros(shape)
    out = q.new_empty(shape)
    angles = None if rope is None else host.readable(rope)[0]
    _run("forward", q, k, v, offsets, angles, (max_length, block, scale, rope_on_v), out=out)
    return out


@torch.library.custom_op("gem_kernels::block_attention_grad", mutates_args=())
def _grad(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, rope: Tensor | None, max_length: int, block: int, scale: float, rope_on_v: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = host.readable(q, k, v)
    if offsets.shape[0] < 2 or max_length == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    angles = None if rope is None else host.readable(rope)[0]
    settings = (max_length, block, scale, rope_on_v)
    _run("backward", q, k, v, offsets, angles, settings, dout=dout.contiguous(), dq=dq, dk=dk, dv=dv)
    return dq, dk, dv


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))


@_grad.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    grads = direct(_grad, dout, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 6)


_op = differentiable(_forward, _backward, _save)


@register_flop_formula(torch.ops.gem_kernels.block_attention, get_raw=True)
def _forward_flops(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, rope: Any, max_length: int, block: int, *args: Any, **kwargs: Any) -> int:
    return flops(lengths=host.row_lengths(offsets, max_length), heads=q.shape[1], dim=q.shape[2], v_dim=v.shape[2], block=block)


@register_flop_formula(torch.ops.gem_kernels.block_attention_grad, get_raw=True)
def _backward_flops(dout: Tensor, *args: Any, **kwargs: Any) -> int:
    """Four gradient products; the recomputed scores are not model FLOPs."""
    return 2 * _forward_flops(*args, **kwargs)
