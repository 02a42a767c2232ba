"""MXFP8 for the block-scaled tensor cores of Blackwell (sm100): casts with a scale for 32 elements along either axis, and products.

Compiled for that hardware, never run on it: nothing chooses these automatically.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import LAUNCH, SIDE, Both, Operand, load_quarter, require_matrix
from gem_precision.kernels.language import (
    BLOCK,
    INTERPRETED,
    QUARTER,
    TensorDescriptor,
    inverse_scale,
    magnitude,
    scale_code,
    store_turned,
    tl,
    triton,
)

GROUP = tl.constexpr(32)
"""Elements that share a scale."""
GROUPS = tl.constexpr(4)
"""Scales of a tile along either axis."""


@dataclass(frozen=True, slots=True)
class MxOperand(Operand):
    """A matrix in MXFP8 whose last axis is to be contracted: ``[rows, columns]`` E4M3, and ``[rows, columns / 32]`` E8M0 scales as uint8."""

    def dequantize(self) -> Tensor:
        one = torch.ones(self.scales.shape, device=self.scales.device)
        powers = torch.where(self.scales == 255, torch.nan, torch.ldexp(one, self.scales.int() - 127))
        return self.elements.float() * powers.repeat_interleave(32, 1)


@triton.jit
def _store_mx_quarter(quarter, out, out_scale, row, column, columns):
    blocks = tl.reshape(quarter, [QUARTER, GROUPS, GROUP])
    bits = tl.max(magnitude(blocks), 2)
    rows = row + 4 * tl.arange(0, QUARTER)
    elements = tl.reshape(blocks * inverse_scale(bits)[:, :, None], [QUARTER, BLOCK]).to(tl.float8e4nv)
    tl.store(out + rows[:, None] * columns + (column + tl.arange(0, BLOCK))[None, :], elements)
    places = rows[:, None] * (columns // GROUP) + (column // GROUP + tl.arange(0, GROUPS))[None, :]
    tl.store(out_scale + places, scale_code(bits))


@triton.jit
def mx_both_kernel(x, stride, rows, columns, padded, out, out_scale, turned, turned_scale):
    """A tile of 128 x 128 in blocks of 1 x 32 along either axis; elements as in ``store_both``, ``turned_scale [columns, padded / 32]``."""
    tiles = columns // BLOCK
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    q0 = load_quarter(x, row, column, stride, rows)
    q1 = load_quarter(x, row + 1, column, stride, rows)
    q2 = load_quarter(x, row + 2, column, stride, rows)
    q3 = load_quarter(x, row + 3, column, stride, rows)
    _store_mx_quarter(q0, out, out_scale, row, column, columns)
    _store_mx_quarter(q1, out, out_scale, row + 1, column, columns)
    _store_mx_quarter(q2, out, out_scale, row + 2, column, columns)
    _store_mx_quarter(q3, out, out_scale, row + 3, column, columns)
    # 32 rows that follow each other are 8 of each quarter
    most = tl.maximum(tl.maximum(magnitude(q0), magnitude(q1)), tl.maximum(magnitude(q2), magnitude(q3)))
    bits = tl.max(tl.reshape(most, [GROUPS, QUARTER // GROUPS, BLOCK]), 1)
    factor = tl.reshape(tl.broadcast_to(inverse_scale(bits)[:, None, :], [GROUPS, QUARTER // GROUPS, BLOCK]), [QUARTER, BLOCK])
    store_turned(q0, q1, q2, q3, factor, turned, row, column.to(tl.int64), padded // 4)
    c = column.to(tl.int64) + tl.arange(0, BLOCK)
    places = c[:, None] * (padded // GROUP) + (row // GROUP + tl.arange(0, GROUPS))[None, :]
    tl.store(turned_scale + places, tl.trans(scale_code(bits)))


@triton.jit
def _whole(elements, codes):
    """What they stand for, float32; for the interpreter, which has no product with scales."""
    powers = tl.where(codes == 255, 0x7FC00000, tl.maximum(codes.to(tl.int32) << 23, 0x400000)).to(tl.float32, bitcast=True)
    return tl.reshape(tl.reshape(elements.to(tl.float32), [BLOCK, GROUPS, GROUP]) * powers[:, :, None], [BLOCK, BLOCK])


@triton.jit
def mx_product_kernel(left, right, left_scale, right_scale, out, columns, blocks):
    """A tile of 128 x 128 of ``left right^T``; scales are ``[rows, 4 * blocks]`` and ``[columns, 4 * blocks]``."""
    tiles = columns // BLOCK
    row, column = tl.program_id(0) // tiles * BLOCK, tl.program_id(0) % tiles * BLOCK
    r = row + tl.arange(0, BLOCK).to(tl.int64)
    c = column + tl.arange(0, BLOCK).to(tl.int64)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for block in range(blocks):
        group = (tl.arange(0, GROUPS) + block * GROUPS)[None, :]
        a, b = left.load([row, block * BLOCK]), right.load([column, block * BLOCK])
        a_scale = tl.load(left_scale + r[:, None] * (blocks * GROUPS) + group)
        b_scale = tl.load(right_scale + c[:, None] * (blocks * GROUPS) + group)
        if INTERPRETED:
            total = tl.dot(_whole(a, a_scale), tl.trans(_whole(b, b_scale)), total)
        else:
            total = tl.dot_scaled(a, a_scale, "e4m3", b.T, b_scale, "e4m3", total)
    tl.store(out + r[:, None] * columns + c[None, :], total.to(out.dtype.element_ty))


def mx_both(x: Tensor) -> Both:
    """A matrix in MXFP8 along either axis: ``mxfp8_e4m3`` of it and of its transpose, as ``MxOperand``.

    Args:
        x: ``[rows, columns]``, columns a multiple of 128 and next to each other; any floating dtype.

    Raises:
        RequestError: another shape or layout.
    """
    require_matrix("mx_both", x)
    rows, columns = x.shape
    padded = -(-rows // SIDE) * SIDE
    sides = []
    for high, wide in ((padded, columns), (columns, padded)):
        elements = torch.empty(high, wide, dtype=torch.float8_e4m3fn, device=x.device)
        sides.append(MxOperand(elements, torch.empty(high, wide // 32, dtype=torch.uint8, device=x.device), square=False))
    both = Both(*sides)
    if x.numel():
        mx_both_kernel[(padded // SIDE * (columns // SIDE),)](x, x.stride(0), rows, columns, padded, *both.words(), **LAUNCH)
    return both


def mx_and_sum(x: Tensor) -> tuple[Both, Tensor]:
    """As ``mx_both``, and the sums over rows, ``[columns]`` float32.

    Raises:
        RequestError: as ``mx_both``.
    """
    return mx_both(x), x.sum(0, dtype=torch.float32)


def mx_product(left: Operand, right: Operand, dtype: torch.dtype = torch.bfloat16, *, bias: Tensor | None = None) -> Tensor:
    """``left right^T + bias`` of ``[m, k]``, ``[n, k]`` in MXFP8 and ``[n]``: ``[m, n]``; nothing but the bias where ``k`` is 0.

    Raises:
        RequestError: operands of another format, or axes that do not fit.
    """
    (m, k), n = left.elements.shape, right.elements.shape[0]
    if right.elements.shape[1] != k or not (isinstance(left, MxOperand) and isinstance(right, MxOperand)):
        so = f"they are [{m}, {k}] and {list(right.elements.shape)}, {type(left).__name__} and {type(right).__name__}"
        raise RequestError("MXFP8 product of two operands", so, "Give [m, k] and [n, k] of mx_both.")
    if 0 in (m, n, k):
        out = torch.zeros(m, n, dtype=dtype, device=left.elements.device)
    else:
        out = torch.empty(m, n, dtype=dtype, device=left.elements.device)
        boxes = [TensorDescriptor.from_tensor(operand.elements, [SIDE, SIDE]) for operand in (left, right)]
        mx_product_kernel[((m // SIDE) * (n // SIDE),)](*boxes, left.scales, right.scales, out, n, k // SIDE, num_warps=8, num_stages=4)
    return out if bias is None else out.add_(bias)
