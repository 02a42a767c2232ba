"""Norms of rows that write ``fp8_block``: the cast of what a linear layer reads costs no pass of its own.

RMSNorm: arXiv 1910.07467. LayerNorm: arXiv 1607.06450. Backward, with g = dy gamma and n the normed row: dx = r (g - mean(g) - n mean(g n)), where
mean(g) is left out for RMS.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import MAXNREG, SIDE, Both, load_quarter, require_matrix
from gem_precision.kernels.language import BLOCK, MULTIPROCESSORS, QUARTER, store_both, tl, triton

Norm = Literal["rms", "layer"]
CHUNK = 16
"""Rows of whole width that a program of the backward kernel holds at once; of at most ``WIDEST`` columns."""
WIDEST = 4096


@triton.jit
def _quarters(x):
    """``[32, 4]`` as the four ``[32]`` that belong to the quarters of a tile."""
    even, odd = tl.split(tl.reshape(x, [QUARTER, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _statistics(x, row, stride, rows, columns, eps, LAYER: tl.constexpr):
    """Mean (zeros for RMS) and 1 / deviation of 128 rows, ``[32, 4]``; the means and squares of blocks of columns are merged, so nothing cancels."""
    r = row + 4 * tl.arange(0, QUARTER)[:, None] + tl.arange(0, 4)[None, :]
    mean, squares = tl.zeros([QUARTER, 4], tl.float32), tl.zeros([QUARTER, 4], tl.float32)
    for first in range(0, columns, BLOCK):
        places = x + r[:, :, None] * stride + (first + tl.arange(0, BLOCK))[None, None, :]
        tile = tl.load(places, mask=(r < rows)[:, :, None], other=0.0).to(tl.float32)
        if LAYER:
            here = tl.sum(tile, 2) * (1.0 / BLOCK)
            centred = tile - here[:, :, None]
            change = here - mean
            share = BLOCK / (first + BLOCK)
            mean += change * share
            squares += tl.sum(centred * centred, 2) + change * change * (first * share)
        else:
            squares += tl.sum(tile * tile, 2)
    return mean, 1.0 / tl.sqrt(squares / columns + eps)


@triton.jit
def _normed(x, mean, inverse, gamma, beta, row, column, stride, rows, LAYER: tl.constexpr):
    """A quarter, normed; rows behind the last are zeros."""
    c = column + tl.arange(0, BLOCK)
    y = (load_quarter(x, row, column, stride, rows) - mean[:, None]) * inverse[:, None] * tl.load(gamma + c).to(tl.float32)[None, :]
    if LAYER:
        y += tl.load(beta + c).to(tl.float32)[None, :]
    return tl.where((row + 4 * tl.arange(0, QUARTER) < rows)[:, None], y, 0.0)


@triton.jit
def norm_kernel(x, gamma, beta, stride, rows, columns, padded, eps, out, out_scale, turned, turned_scale, means, inverses, LAYER: tl.constexpr):
    """128 rows: their statistics, then their normed values in 1 x 128 blocks along either axis."""
    row_tile = tl.program_id(0)
    row = row_tile.to(tl.int64) * BLOCK
    mean, inverse = _statistics(x, row, stride, rows, columns, eps, LAYER)
    r = row + 4 * tl.arange(0, QUARTER)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(means + r, mean, mask=r < rows)
    tl.store(inverses + r, inverse, mask=r < rows)
    m0, m1, m2, m3 = _quarters(mean)
    i0, i1, i2, i3 = _quarters(inverse)
    for column_tile in range(columns // BLOCK):
        column = column_tile * BLOCK
        q0 = _normed(x, m0, i0, gamma, beta, row, column, stride, rows, LAYER)
        q1 = _normed(x, m1, i1, gamma, beta, row + 1, column, stride, rows, LAYER)
        q2 = _normed(x, m2, i2, gamma, beta, row + 2, column, stride, rows, LAYER)
        q3 = _normed(x, m3, i3, gamma, beta, row + 3, column, stride, rows, LAYER)
        store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale)


@triton.jit
def norm_grad_kernel(
    x, dy, gamma, means, inverses, dx, sums, stride, rows, columns, chunks, LAYER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Chunks of ``ROWS`` rows, every ``programs``-th: ``dx [rows, columns]``; and ``sums [programs, 2, columns]`` of dy n and dy."""
    c = tl.arange(0, WIDTH)
    inside = c < columns
    scale = tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)
    by_scale, by_shift = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        r = tl.cast(chunk, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & inside[None, :]
        mean, inverse = tl.load(means + r, mask=r < rows, other=0.0), tl.load(inverses + r, mask=r < rows, other=0.0)
        n = (tl.load(x + r[:, None] * stride + c[None, :], mask=mask, other=0.0).to(tl.float32) - mean[:, None]) * inverse[:, None]
        n = tl.where(mask, n, 0.0)
        grad = tl.load(dy + r[:, None] * columns + c[None, :], mask=mask, other=0.0).to(tl.float32)
        by_scale += tl.sum(grad * n, 0)
        by_shift += tl.sum(grad, 0)
        g = grad * scale[None, :]
        dz = g - n * (tl.sum(g * n, 1) / columns)[:, None]
        if LAYER:
            dz = dz - (tl.sum(g, 1) / columns)[:, None]
        tl.store(dx + r[:, None] * columns + c[None, :], (dz * inverse[:, None]).to(dx.dtype.element_ty), mask=mask)
    place = sums + tl.program_id(0).to(tl.int64) * 2 * columns + c
    tl.store(place, by_scale, mask=inside)
    tl.store(place + columns, by_shift, mask=inside)


def norm_both(x: Tensor, gamma: Tensor, beta: Tensor | None = None, *, eps: float = 1e-5) -> tuple[Both, Tensor, Tensor]:
    """``N(x)`` in 1 x 128 blocks along either axis: a layer norm with ``beta``, without it an RMS norm.

    Args:
        x: ``[rows, columns]``, columns a multiple of 128 and next to each other; any floating dtype.
        gamma, beta: ``[columns]``.
        eps: added to the mean square.

    Returns:
        The operand, and the statistics of rows for the gradient: means (zeros for RMS) and inverse deviations, ``[rows]`` float32.

    Raises:
        RequestError: shapes or layouts that do not fit.
    """
    require_matrix("norm_both", x)
    rows, columns = x.shape
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None and (vector.shape != (columns,) or not vector.is_contiguous()):
            raise RequestError("norm_both", f"{name} is {list(vector.shape)} for {columns} columns", f"Give [{columns}], contiguous.")
    both = Both.empty(rows, columns, x.device)
    means, inverses = torch.empty(2, rows, device=x.device)
    if x.numel():
        padded, shift = both.along.elements.shape[0], gamma if beta is None else beta
        written = (*both.words(), means, inverses)
        norm_kernel[(padded // SIDE,)](
            x, gamma, shift, x.stride(0), rows, columns, padded, eps, *written, LAYER=beta is not None, num_warps=8, maxnreg=MAXNREG
        )
    return both, means, inverses


def norm_grad(x: Tensor, dy: Tensor, gamma: Tensor, means: Tensor, inverses: Tensor, *, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``N(x)`` by x, gamma and beta.

    Args:
        x, dy: ``[rows, columns]``, at most 4,096 columns.
        gamma: ``[columns]``.
        means, inverses: what ``norm_both`` gave.
        norm: its kind.

    Returns:
        ``[rows, columns]`` of x's dtype, and two of ``[columns]`` float32 (the last one is not meaningful for ``rms``).
    """
    rows, columns = x.shape
    if columns > WIDEST:
        raise RequestError("norm_grad", f"rows have {columns} columns", f"Give at most {WIDEST}.")
    width = triton.next_power_of_2(columns)
    held = max(1, CHUNK * 512 // width)
    chunks = -(-rows // held)
    programs = min(chunks, 4 * MULTIPROCESSORS)
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    sums = torch.empty(programs, 2, columns, device=x.device)
    if programs:
        dy = dy.contiguous()
        norm_grad_kernel[(programs,)](
            x, dy, gamma, means, inverses, dx, sums, x.stride(0), rows, columns, chunks, LAYER=norm == "layer", ROWS=held, WIDTH=width, num_warps=8
        )
    by_gamma, by_beta = sums.sum(0)
    return dx, by_gamma, by_beta
