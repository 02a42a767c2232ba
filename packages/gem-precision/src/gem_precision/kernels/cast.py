"""Casts to FP8 E4M3 with power-of-two scales for 128 elements, along both axes of a matrix in one pass over it.

A training step contracts each operand of a linear layer along two axes: activations along features forward and along tokens in the weight gradient,
output gradients the other way round. One pass reads the matrix once and writes it twice: as it is, with scales along its rows, and transposed, with
scales along its columns. Scales and elements are those of ``gem_precision.formats``: ``fp8_e4m3_1x128`` and ``fp8_e4m3_128x128``.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
from torch import Tensor

from gem_core.spec import MachineError

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MachineError("casts to FP8", "triton is not installed", "Install it (Linux only): python3 -m pip install 'triton>=3.6'.") from error

BLOCK = 128


@triton.jit
def _scale_exponent(bits):
    """The exponent ``e`` of the smallest power of two with ``amax / 2^e <= 448``, by the bits of ``amax``, a float32 that is not negative."""
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # 448 is 1.75 * 2^8
    return tl.minimum(tl.maximum(exponent, -126), 126)  # so that 2^e and 2^-e are normal numbers; a block of zeros gets the smallest


@triton.jit
def _power(exponent):
    """``2^exponent`` float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _scale(bits, exponent):
    """The scale; NaN for a block that holds a NaN or an infinity."""
    return tl.where(bits >= 0x7F800000, float("nan"), _power(exponent))


@triton.jit
def _cast_both(x, stride, rows, columns, padded, out, out_scale, turned, turned_scale, SIZE: tl.constexpr):
    """One tile of ``[128, 128]``: ``out [padded, columns]`` with ``out_scale [columns / 128, padded]``, ``turned [columns, padded]`` with
    ``turned_scale [padded / 128, columns]``. Rows from ``rows`` to ``padded`` are zeros."""
    r = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=inside, other=0.0).to(tl.float32)
    bits = tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    along_row, along_column = tl.max(bits, axis=1), tl.max(bits, axis=0)
    row_exponent, column_exponent = _scale_exponent(along_row), _scale_exponent(along_column)
    by_row = (tile * _power(-row_exponent)[:, None]).to(tl.float8e4nv)
    by_column = (tile * _power(-column_exponent)[None, :]).to(tl.float8e4nv)
    kept = (c < columns)[None, :]
    tl.store(out + r[:, None] * columns + c[None, :], by_row, mask=kept)
    tl.store(turned + c[:, None].to(tl.int64) * padded + r[None, :], tl.trans(by_column), mask=(c < columns)[:, None])
    tl.store(out_scale + tl.program_id(1).to(tl.int64) * padded + r, _scale(along_row, row_exponent))
    tl.store(turned_scale + tl.program_id(0).to(tl.int64) * columns + c, _scale(along_column, column_exponent), mask=c < columns)


@triton.jit
def _cast_square(x, stride, columns, rows, out, turned, scale, scale_stride, turned_scale, turned_stride, SIZE: tl.constexpr):
    """One tile with one scale: ``out [rows, columns]`` and ``turned [columns, rows]``."""
    r = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    tile = tl.load(x + r[:, None].to(tl.int64) * stride + c[None, :]).to(tl.float32)
    bits = tl.max(tl.max(tile.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1), axis=0)
    exponent = _scale_exponent(bits)
    low = (tile * _power(-exponent)).to(tl.float8e4nv)
    tl.store(out + r[:, None].to(tl.int64) * columns + c[None, :], low)
    tl.store(turned + c[:, None].to(tl.int64) * rows + r[None, :], tl.trans(low))
    value = _scale(bits, exponent)
    tl.store(scale + tl.program_id(0) * scale_stride + tl.program_id(1), value)
    tl.store(turned_scale + tl.program_id(1) * turned_stride + tl.program_id(0), value)


def cast_both(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix in 1 x 128 blocks along either axis.

    Args:
        x: ``[rows, columns]``, columns a multiple of 128 and next to each other; any floating dtype.

    Returns:
        With ``padded`` the rows rounded up to a multiple of 128, and zeros in the additional ones:

        - ``[padded, columns]`` E4M3 and ``[padded, columns / 128]`` float32 scales, whose rows are next to each other;
        - ``[columns, padded]`` E4M3, transposed, and ``[columns, padded / 128]`` float32 scales, whose rows are next to each other.
    """
    rows, columns = x.shape
    padded = -(-rows // BLOCK) * BLOCK
    out = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    turned = torch.empty(columns, padded, dtype=torch.float8_e4m3fn, device=x.device)
    out_scale = torch.empty(columns // BLOCK, padded, device=x.device)
    turned_scale = torch.empty(padded // BLOCK, columns, device=x.device)
    if padded:
        grid = (padded // BLOCK, columns // BLOCK)
        _cast_both[grid](x, x.stride(0), rows, columns, padded, out, out_scale, turned, turned_scale, SIZE=BLOCK, num_warps=8)
    return out, out_scale.t(), turned, turned_scale.t()


def cast_square(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A matrix in 128 x 128 blocks, as it is and transposed: the same elements and scales.

    Args:
        x: ``[rows, columns]``, both multiples of 128, columns next to each other.

    Returns:
        ``[rows, columns]`` E4M3 and ``[rows / 128, columns / 128]`` float32; ``[columns, rows]`` and ``[columns / 128, rows / 128]``. Rows of scales
        begin at multiples of four, as the library wants them.
    """
    rows, columns = x.shape
    tall, wide = rows // BLOCK, columns // BLOCK
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    turned = torch.empty(columns, rows, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(tall, -(-wide // 4) * 4, device=x.device)
    turned_scale = torch.empty(wide, -(-tall // 4) * 4, device=x.device)
    _cast_square[(tall, wide)](
        x, x.stride(0), columns, rows, out, turned, scale, scale.stride(0), turned_scale, turned_scale.stride(0), SIZE=BLOCK, num_warps=8
    )
    return out, scale[:, :wide], turned, turned_scale[:, :tall]
