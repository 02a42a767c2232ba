"""Norms of rows that write ``fp8_block``: the cast of what a linear layer reads costs no pass of its own.

RMSNorm: arXiv 1910.07467. LayerNorm: arXiv 1607.06450. Backward, with g = dy gamma and n the normed row: dx = r (g - mean(g) - n mean(g n)), where
mean(g) is left out for RMS.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import LAUNCH, SIDE, Both, load_quarter, require_matrix
from gem_precision.kernels.language import BLOCK, MULTIPROCESSORS, QUARTER, store_both, tl, triton

Norm = Literal["rms", "layer"]
CHUNK = 16
"""Rows of whole width that a program of the backward kernel holds at once; of at most ``WIDEST`` columns."""
WIDEST = 4096
AHEAD = 24
"""Strips of 128 rows by which statistics run ahead: long enough to have ended when the tiles begin, and short enough for the cache."""
STAGES = 3
"""Tiles on their way while the statistics of one are computed."""
PART, PARTS, WIDE = tl.constexpr(32), tl.constexpr(4), tl.constexpr(512)
"""Rows of a program of statistics, such programs of a strip, and columns that one reads at once."""


@triton.jit
def _statistics(x, r, stride, rows, columns, eps, LAYER: tl.constexpr, STAGES: tl.constexpr):
    """Mean (zeros for RMS) and 1 / deviation of ``PART`` rows; the means and squares of blocks of columns are merged, so nothing cancels."""
    mean, squares = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    for first in tl.range(0, columns, WIDE, num_stages=STAGES):
        c = first + tl.arange(0, WIDE)
        inside = (c < columns)[None, :]
        tile = tl.load(x + r[:, None] * stride + c[None, :], mask=(r < rows)[:, None] & inside, other=0.0).to(tl.float32)
        if LAYER:
            count = tl.minimum(columns - first, WIDE)
            here = tl.sum(tile, 1) / count
            centred = tl.where(inside, tile - here[:, None], 0.0)
            change = here - mean
            share = count / (first + count)
            mean += change * share
            squares += tl.sum(centred * centred, 1) + change * change * (first * share)
        else:
            squares += tl.sum(tile * tile, 1)
    return mean, 1.0 / tl.sqrt(squares / columns + eps)


@triton.jit
def _normed(quarter, means, inverses, gamma, beta, row, column, rows, LAYER: tl.constexpr):
    """A quarter, normed; rows behind the last are zeros."""
    c, r = column + tl.arange(0, BLOCK), row + 4 * tl.arange(0, QUARTER)
    y = quarter
    if LAYER:
        y -= tl.load(means + r, mask=r < rows, other=0.0)[:, None]
    y = y * tl.load(inverses + r, mask=r < rows, other=0.0)[:, None] * tl.load(gamma + c).to(tl.float32)[None, :]
    if LAYER:
        y = tl.where((r < rows)[:, None], y + tl.load(beta + c).to(tl.float32)[None, :], 0.0)
    return y


@triton.jit
def norm_kernel(
    x,
    gamma,
    beta,
    stride,
    rows,
    columns,
    padded,
    eps,
    out,
    out_scale,
    turned,
    turned_scale,
    means,
    inverses,
    ready,
    ahead,
    LAYER: tl.constexpr,
    STAGES: tl.constexpr,
):
    """In turns of programs for the statistics of a strip of 128 rows, and one for each tile of a strip whose statistics were ``ahead`` turns before:
    a strip is read for the second time while the cache still has it.

    A tile waits for programs of lower numbers, which themselves wait for nothing; a GPU starts programs in the order of their numbers.

    Args:
        means, inverses: ``[rows]``, the statistics.
        ready: int32 zeros ``[padded / 128]``: programs of each strip that have stored their statistics.
    """
    across = columns // BLOCK
    turn, place = tl.program_id(0) // (across + PARTS), tl.program_id(0) % (across + PARTS)
    row_tile = turn - ahead
    if place < PARTS:
        if turn < padded // BLOCK:
            r = turn.to(tl.int64) * BLOCK + place * PART + tl.arange(0, PART)
            mean, inverse = _statistics(x, r, stride, rows, columns, eps, LAYER, STAGES)
            tl.store(means + r, mean, mask=r < rows)
            tl.store(inverses + r, inverse, mask=r < rows)
            tl.debug_barrier()  # all threads have stored theirs
            tl.atomic_add(ready + turn, 1, sem="release")
    elif row_tile >= 0:
        row = row_tile.to(tl.int64) * BLOCK
        column_tile = place - PARTS
        column = column_tile * BLOCK
        q0 = load_quarter(x, row, column, stride, rows)
        q1 = load_quarter(x, row + 1, column, stride, rows)
        q2 = load_quarter(x, row + 2, column, stride, rows)
        q3 = load_quarter(x, row + 3, column, stride, rows)
        while tl.atomic_add(ready + row_tile, 0, sem="acquire") < PARTS:
            pass
        q0 = _normed(q0, means, inverses, gamma, beta, row, column, rows, LAYER)
        q1 = _normed(q1, means, inverses, gamma, beta, row + 1, column, rows, LAYER)
        q2 = _normed(q2, means, inverses, gamma, beta, row + 2, column, rows, LAYER)
        q3 = _normed(q3, means, inverses, gamma, beta, row + 3, column, rows, LAYER)
        store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale)


one_row_kernel = triton.jit(norm_kernel.fn, do_not_specialize=["rows"])
"""For one row. Where the number of rows is compiled in as 1, all rows behind the first are one zero, and ptxas of CUDA 12.8 packs two pairs
of E4M3 that are the same register without the upper one: rows that pad a layer norm came out as garbage on an H200. No run has shown yet that this
helps; what ptxas makes of it has no such pack."""


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
        strips = padded // SIDE
        written = (*both.words(), means, inverses, torch.zeros(strips, dtype=torch.int32, device=x.device))
        how = {"LAYER": beta is not None, "STAGES": STAGES, **LAUNCH}
        kernel = one_row_kernel if rows == 1 else norm_kernel
        kernel[((strips + AHEAD) * (columns // SIDE + int(PARTS)),)](x, gamma, shift, x.stride(0), rows, columns, padded, eps, *written, AHEAD, **how)
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
