"""The ``triton`` backend of the movers of jagged tensors: joining, splitting, padding and unpadding, each a copy in one pass over the tokens.

All four are one kernel: packed tokens to another place (``scatter``) or back (``gather``), and each is the gradient of its opposite. Values may have
any trailing shape and any dtype, integers and bool included.
"""

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.jagged import Parts
from gem_core.spec import KernelUnavailable, MachineError
from gem_kernels.ops import host
from gem_kernels.ops.direct import differentiable, differentiable_lists, direct

RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Values are copied as integers of their size: no arithmetic touches them."""
ALL = 2**62
"""No limit on the tokens of a row."""


@cache
def _kernels() -> Any:
    return import_module("gem_kernels.ops.jagged.triton")


def _raw(x: Tensor) -> Tensor:
    """``[tokens, width]`` of integers, contiguous."""
    if x.element_size() not in RAW:
        raise KernelUnavailable("moving jagged values with backend 'triton'", f"the values are {x.dtype}", "Use backend='reference'.")
    return x.contiguous().reshape(x.shape[0], -1).view(RAW[x.element_size()])


def _move(packed: Tensor, other: Tensor, offsets: Tensor, base: Tensor, skip: Tensor | None, limit: int, *, scatter: bool) -> None:
    """Copy between packed tokens ``[tokens, ...]`` and ``other [places, ...]``, both contiguous; see ``move_kernel``."""
    tokens, rows = packed.shape[0], offsets.shape[0] - 1
    if not packed.numel():
        return
    if not host.interpreted() and not packed.is_cuda:
        raise MachineError("moving jagged values with backend 'triton'", f"the values lie on {packed.device}", "Move them to a GPU.")
    width = packed.numel() // tokens
    block = min(1 << (width - 1).bit_length(), 1024)
    tile = max(1, 4096 // block) if not host.interpreted() else 16
    host.launch(
        _kernels().move_kernel, packed, -(-tokens // tile), packed=_raw(packed), other=_raw(other), offsets=offsets, base=base, skip=skip, rows=rows,
        tokens=tokens, steps=rows.bit_length() + 1, limit=limit, WIDTH=width, TOKENS=tile, BLOCK=block, SCATTER=scatter,
    )  # fmt: skip


def _befores(out_offsets: Tensor, offsets: Sequence[Tensor]) -> list[Tensor]:
    """Where the tokens of each part begin in each row of what the parts are joined to."""
    found, base = [], out_offsets[:-1]
    for part in offsets:
        found.append(base)
        base = base + part.diff()
    return found


@torch.library.custom_op("gem_kernels::jagged_join", mutates_args=())
def _join(parts: Sequence[Tensor], offsets: Sequence[Tensor], out_offsets: Tensor) -> Tensor:
    out = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    for part, own, base in zip(parts, offsets, _befores(out_offsets, offsets), strict=True):
        _move(part.contiguous(), out, own, base, None, ALL, scatter=True)
    return out


@torch.library.custom_op("gem_kernels::jagged_part", mutates_args=())
def _part(values: Tensor, offsets: Sequence[Tensor], out_offsets: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = [values.new_empty((size, *values.shape[1:])) for size in sizes]
    values = values.contiguous()
    for part, own, base in zip(parts, offsets, _befores(out_offsets, offsets), strict=True):
        _move(part, values, own, base, None, ALL, scatter=False)
    return parts


@torch.library.custom_op("gem_kernels::jagged_spread", mutates_args=())
def _spread(values: Tensor, offsets: Tensor, skip: Tensor | None, max_length: int, fill: float) -> Tensor:
    rows = offsets.shape[0] - 1
    out = values.new_full((rows, max_length, *values.shape[1:]), fill)
    base = torch.arange(rows, device=offsets.device) * max_length
    _move(values.contiguous(), out.flatten(0, 1), offsets, base, skip, max_length, scatter=True)
    return out


@torch.library.custom_op("gem_kernels::jagged_collect", mutates_args=())
def _collect(dense: Tensor, offsets: Tensor, skip: Tensor | None, total: int) -> Tensor:
    rows, max_length = dense.shape[:2]
    out = dense.new_empty((total, *dense.shape[2:]))
    base = torch.arange(rows, device=offsets.device) * max_length
    _move(out, dense.contiguous().flatten(0, 1), offsets, base, skip, max_length, scatter=False)
    return out


@_join.register_fake
def _(parts: Sequence[Tensor], offsets: Sequence[Tensor], out_offsets: Tensor) -> Tensor:
    return parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))


@_part.register_fake
def _(values: Tensor, offsets: Sequence[Tensor], out_offsets: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [values.new_empty((size, *values.shape[1:])) for size in sizes]


@_spread.register_fake
def _(values: Tensor, offsets: Tensor, skip: Tensor | None, max_length: int, fill: float) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, max_length, *values.shape[1:]))


@_collect.register_fake
def _(dense: Tensor, offsets: Tensor, skip: Tensor | None, total: int) -> Tensor:
    return dense.new_empty((total, *dense.shape[2:]))


def _save_join(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    parts, offsets, out_offsets = inputs
    ctx.save_for_backward(*offsets, out_offsets)
    ctx.sizes = [part.shape[0] for part in parts]


def _join_backward(ctx: Any, grad: Tensor) -> Any:
    *offsets, out_offsets = ctx.saved_tensors
    return direct(_part, grad, offsets, out_offsets, ctx.sizes), [None] * len(offsets), None


def _save_part(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, offsets, out_offsets, _ = inputs
    ctx.save_for_backward(*offsets, out_offsets)


def _part_backward(ctx: Any, grads: Sequence[Tensor]) -> Any:
    *offsets, out_offsets = ctx.saved_tensors
    return direct(_join, list(grads), offsets, out_offsets), [None] * len(offsets), None, None


def _save_spread(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.total = inputs[0].shape[0]


def _spread_backward(ctx: Any, grad: Tensor) -> Any:
    return direct(_collect, grad, *ctx.saved_tensors, ctx.total), None, None, None, None


def _save_collect(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])
    ctx.max_length = inputs[0].shape[1]


def _collect_backward(ctx: Any, grad: Tensor) -> Any:
    return direct(_spread, grad, *ctx.saved_tensors, ctx.max_length, 0.0), None, None, None


_join_op = differentiable_lists(_join, _join_backward, _save_join)
_part_op = differentiable_lists(_part, _part_backward, _save_part)
_spread_op = differentiable(_spread, _spread_backward, _save_spread)
_collect_op = differentiable(_collect, _collect_backward, _save_collect)


def jagged_concat(parts: Parts) -> tuple[Tensor, Tensor]:
    """Join jagged tensors row by row; as ``gem_core.ops.jagged_concat``."""
    out_offsets = torch.stack([offsets for _, offsets in parts]).sum(0)
    return _join_op([values for values, _ in parts], [offsets for _, offsets in parts], out_offsets), out_offsets


def jagged_split(values: Tensor, offsets: Tensor, part_offsets: Sequence[Tensor], *, totals: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Undo ``jagged_concat``; as ``gem_core.ops.jagged_split``."""
    sizes = list(totals) if totals is not None else [int(part[-1]) for part in part_offsets]
    return tuple(_part_op(values, list(part_offsets), offsets, sizes))


def jagged_pad(values: Tensor, offsets: Tensor, *, max_length: int, fill: float = 0.0, truncate: str | None = None) -> Tensor:
    """Packed rows to padded rows; as ``gem_core.ops.jagged_pad``."""
    skip = (offsets.diff() - max_length).clamp(min=0) if truncate == "left" else None
    out: Tensor = _spread_op(values, offsets, skip, max_length, float(fill))
    return out


def jagged_unpad(dense: Tensor, offsets: Tensor, *, total: int | None = None) -> Tensor:
    """Padded rows to packed rows; as ``gem_core.ops.jagged_unpad``."""
    out: Tensor = _collect_op(dense, offsets, None, int(offsets[-1]) if total is None else total)
    return out
