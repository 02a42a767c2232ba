"""Casts to ``fp8_block``: a matrix along both of its axes in one pass over it, and one in 128 x 128 blocks.

A training step contracts each operand of a linear layer along two axes: activations along features forward and along tokens in the weight gradient,
output gradients the other way round. FP8 tensor cores of Hopper read operands whose contraction axis is the contiguous one, so each operand is
written twice: as it is, and transposed.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from dataclasses import dataclass

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.language import (
    BLOCK,
    MULTIPROCESSORS,
    QUARTER,
    store_both,
    store_square,
    tl,
    triton,
)
from gem_precision.kernels.words import cast_words_kernel

SIDE = int(BLOCK)
LAUNCH = {"num_warps": 8, "maxnreg": 128}
"""Of the kernels that write tiles. So many registers a thread at most let two programs share a multiprocessor: one loads while the other stores."""
TILE_BY_TILE = {"STAGES": 1, **LAUNCH}
"""Of a cast on words without sums: a program a tile."""
SUMMED = {"STAGES": 3, "num_warps": 8, "maxnreg": 168}
"""Of one with sums, which a program keeps in registers from tile to tile: ``PROGRAMS`` of them. With three stages the next tile comes while one is
cast; with two, not before. Of the launches that an H200 has timed, this and the other were the fastest for 4,096 columns (benchmarks/results)."""
PROGRAMS = MULTIPROCESSORS
"""Of a cast with sums: as many as run at once."""
TALL = 4 * SIDE
"""Rows are padded to a multiple of it where one of two operands that are contracted along them has 128 x 128 blocks, which the library wants."""
FARTHEST = 1 << 24
"""Rows, columns and numbers from row to row of a matrix up to which places inside a tile fit in 32 bits."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in ``fp8_block`` whose last axis is to be contracted.

    Args:
        elements: ``[rows, columns]`` E4M3, both multiples of 128, contiguous.
        scales: float32 powers of two: ``[rows, columns / 128]`` with its rows next to each other for blocks of 1 x 128, or
            ``[rows / 128, columns / 128]``, contiguous, for blocks of 128 x 128.
        square: whether blocks are 128 x 128.
    """

    elements: Tensor
    scales: Tensor
    square: bool

    def dequantize(self) -> Tensor:
        """``element * scale``, ``[rows, columns]`` float32, exact."""
        scales = self.scales.repeat_interleave(SIDE, 0) if self.square else self.scales
        return self.elements.float() * scales.repeat_interleave(SIDE, 1)


@dataclass(frozen=True, slots=True)
class Both:
    """A matrix in ``fp8_block`` as it is, ``along`` its rows, and ``turned``, transposed; rows that pad it are zeros."""

    along: Operand
    turned: Operand

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, multiple: int = SIDE) -> "Both":
        """Room for ``[rows, columns]`` in 1 x 128 blocks, rows padded to a ``multiple``. ``columns`` is a multiple of 128."""
        padded = -(-rows // multiple) * multiple
        sides = []
        for high, wide in ((padded, columns), (columns, padded)):
            elements = torch.empty(high, wide, dtype=torch.float8_e4m3fn, device=device)
            sides.append(Operand(elements, torch.empty(wide // SIDE, high, device=device).t(), square=False))
        return cls(*sides)

    @classmethod
    def squares(cls, rows: int, columns: int, device: torch.device, *, each: bool) -> "Both":
        """Room for ``[rows, columns]`` in 128 x 128 blocks; with ``each`` ``along`` repeats a block's scale for each row, and rows are padded to
        ``TALL``, as for activations."""
        multiple = TALL if each else SIDE
        padded = -(-rows // multiple) * multiple
        one = torch.empty(columns // SIDE, padded, device=device).t() if each else torch.empty(padded // SIDE, columns // SIDE, device=device)
        elements, turned = (torch.empty(*size, dtype=torch.float8_e4m3fn, device=device) for size in ((padded, columns), (columns, padded)))
        turned_scales = torch.empty(columns // SIDE, padded // SIDE, device=device)
        return cls(Operand(elements, one, square=not each), Operand(turned, turned_scales, square=True))

    def words(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernels write: elements and scales, then those of the transpose, whose elements are words of four."""
        return self.along.elements, self.along.scales, self.turned.elements.view(torch.int32), self.turned.scales


@triton.jit
def load_quarter(x, row, column, stride, rows):
    """Rows ``row + 4 g`` and columns from ``column`` on: ``[32, 128]`` float32, zeros from ``rows`` on."""
    r = row + 4 * tl.arange(0, QUARTER)
    c = column + tl.arange(0, BLOCK)
    return tl.load(x + r[:, None] * stride + c[None, :], mask=(r < rows)[:, None], other=0.0).to(tl.float32)


@triton.jit
def cast_both_kernel(x, stride, rows, columns, padded, out, out_scale, turned, turned_scale, sums, SUM: tl.constexpr):
    """A tile; with ``SUM`` also the sums of its columns, ``sums [padded / 128, columns]``."""
    tiles = columns // BLOCK
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    q0 = load_quarter(x, row, column, stride, rows)
    q1 = load_quarter(x, row + 1, column, stride, rows)
    q2 = load_quarter(x, row + 2, column, stride, rows)
    q3 = load_quarter(x, row + 3, column, stride, rows)
    store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale)
    if SUM:
        tl.store(sums + row_tile.to(tl.int64) * columns + column + tl.arange(0, BLOCK), tl.sum(q0 + q1 + q2 + q3, 0))


@triton.jit
def cast_squares_kernel(x, stride, rows, columns, padded, out, out_scale, turned, turned_scale, EACH: tl.constexpr):
    """A tile in one block; arguments as ``store_square`` has them."""
    tiles = columns // BLOCK
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    q0 = load_quarter(x, row, column, stride, rows)
    q1 = load_quarter(x, row + 1, column, stride, rows)
    q2 = load_quarter(x, row + 2, column, stride, rows)
    q3 = load_quarter(x, row + 3, column, stride, rows)
    store_square(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale, EACH)


def cast_both(x: Tensor, multiple: int = SIDE) -> Both:
    """A matrix in 1 x 128 blocks along either axis: ``fp8_e4m3_1x128`` of it and of its transpose.

    Args:
        x: ``[rows, columns]``, columns a multiple of 128 and next to each other; any floating dtype.
        multiple: to which rows are padded, itself one of 128.

    Raises:
        RequestError: another shape or layout.
    """
    require_matrix("cast_both", x)
    return _cast(x, multiple, summed=False)[0]


def cast_and_sum(x: Tensor, multiple: int = SIDE) -> tuple[Both, Tensor]:
    """As ``cast_both``, and in the same pass the sums over rows, ``[columns]`` float32: of an output gradient that is the gradient of a bias.

    Raises:
        RequestError: as ``cast_both``.
    """
    require_matrix("cast_and_sum", x)
    both, sums = _cast(x, multiple, summed=True)
    return both, sums.sum(0)


def _cast(x: Tensor, multiple: int, *, summed: bool) -> tuple[Both, Tensor]:
    """And sums of the columns of groups of rows, ``[groups, columns]`` float32, if they are asked for."""
    rows, columns = x.shape
    both = Both.empty(rows, columns, x.device, multiple)
    padded, across, pairs = both.along.elements.shape[0], columns // SIDE, comes_in_pairs(x)
    strips = padded // SIDE
    groups = min(strips, max(1, PROGRAMS // max(1, across))) if pairs and summed else strips
    sums = torch.empty(groups if summed else 0, columns, device=x.device)
    if x.numel() and pairs:
        elements, *others = both.words()
        written = (elements.view(torch.int16), *others, sums)
        cast_words_kernel[(groups * across,)](
            x.detach().view(torch.int32), x.stride(0) // 2, rows, columns, padded, *written, SUM=summed, **(SUMMED if summed else TILE_BY_TILE)
        )
    elif x.numel():
        cast_both_kernel[(groups * across,)](x, x.stride(0), rows, columns, padded, *both.words(), sums, SUM=summed, **LAUNCH)
    return both, sums


def comes_in_pairs(x: Tensor) -> bool:
    """It can be read as 32-bit words of two bfloat16, and is not too far-flung for their kernel."""
    even = x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.dtype == torch.bfloat16 and even and max(x.stride(0), *x.shape) < FARTHEST


def cast_weight(weight: Tensor) -> Both:
    """A weight in 128 x 128 blocks, ``fp8_e4m3_128x128``: as it is and transposed, the same elements and scales.

    Args:
        weight: ``[outputs, inputs]``, both multiples of 128, inputs next to each other; any floating dtype.

    Raises:
        RequestError: another shape or layout.
    """
    require_matrix("cast_weight", weight)
    if weight.shape[0] % SIDE:
        raise RequestError("cast_weight", f"the weight has {weight.shape[0]} rows", f"Give a multiple of {SIDE}.")
    return _squares(weight, each=False)


def cast_squares(x: Tensor) -> Both:
    """A matrix in 128 x 128 blocks, ``fp8_e4m3_128x128``, as products read activations: ``along`` with the scale of its block for each row, as a left
    operand has one, and ``turned`` with one for each block, as a right operand may. Rows are padded to a multiple of 512.

    Args:
        x: as in ``cast_both``.

    Raises:
        RequestError: as ``cast_both``.
    """
    require_matrix("cast_squares", x)
    return _squares(x, each=True)


def _squares(x: Tensor, *, each: bool) -> Both:
    rows, columns = x.shape
    both = Both.squares(rows, columns, x.device, each=each)
    if x.numel():
        padded = both.along.elements.shape[0]
        tiles = padded // SIDE * (columns // SIDE)
        cast_squares_kernel[(tiles,)](x, x.stride(0), rows, columns, padded, *both.words(), EACH=each, num_warps=8)
    return both


def require_matrix(asked: str, x: Tensor) -> None:
    """Floating, ``[rows, columns]`` with columns a multiple of 128, next to each other."""
    if x.dim() != 2 or not x.is_floating_point():
        raise RequestError(asked, f"the operand is {x.dtype} {list(x.shape)}", "Give a floating-point matrix.")
    if x.shape[1] % SIDE or (x.shape[0] > 1 and x.stride(0) < x.shape[1]) or (x.numel() and x.stride(1) != 1):
        so = f"the operand is {list(x.shape)} with strides {list(x.stride())}"
        raise RequestError(asked, so, f"Give columns that are a multiple of {SIDE} and lie next to each other.")
