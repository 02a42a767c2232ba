"""Norms of rows that write ``fp8_block``: the cast of what a linear layer reads costs no pass of its own.

RMSNorm: arXiv 1910.07467. LayerNorm: arXiv 1607.06450. Backward, with g = dy gamma and n the normed row: dx = r (g - mean(g) - n mean(g n)), where
mean(g) is left out for RMS.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Literal

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import LAUNCH, SIDE, Both, require_matrix
from gem_precision.kernels.language import BLOCK, MULTIPROCESSORS, QUARTER, store_both, store_square, tl, triton

Norm = Literal["rms", "layer"]
CHUNK, PLAIN_CHUNK = 8192, 4096
"""Numbers, in whole rows, that a program of the backward kernel holds at once, with sums for gamma and beta and without."""
WIDEST = 4096
"""Columns of a row that it holds."""
AHEAD = 24
"""Strips of 128 rows by which statistics run ahead: long enough to have ended when the tiles begin, and short enough for the cache."""
STAGES = 3
"""Tiles on their way while the statistics of one are computed."""
PART, PARTS = tl.constexpr(32), tl.constexpr(4)
"""Rows of a program of statistics, and such programs of a strip."""
WIDE = 512
"""Columns that a program of statistics reads at once; half as many where it reads a branch too, which would not leave room for two programs."""


@triton.jit
def _read(x, branch, r, c, stride, branch_stride, mask):
    """Rows ``r`` and columns ``c`` of x, float32; with a branch of their sum, rounded to x's dtype, as everybody else reads it."""
    tile = tl.load(x + r[:, None] * stride + c[None, :], mask=mask, other=0.0)
    if branch is not None:
        added = tl.load(branch + r[:, None] * branch_stride + c[None, :], mask=mask, other=0.0)
        tile = (tile.to(tl.float32) + added.to(tl.float32)).to(tile.dtype)
    return tile.to(tl.float32)


@triton.jit
def _statistics(
    x, branch, total, r, stride, branch_stride, rows, columns, eps, LAYER: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Mean (zeros for RMS) and 1 / deviation of ``PART`` rows; the means and squares of blocks of columns are merged, so nothing cancels. With a
    branch the sum goes to ``total [rows, columns]``."""
    mean, squares = tl.zeros([PART], tl.float32), tl.zeros([PART], tl.float32)
    for first in tl.range(0, columns, WIDE, num_stages=STAGES):
        c = first + tl.arange(0, WIDE)
        inside = (c < columns)[None, :]
        mask = (r < rows)[:, None] & inside
        tile = _read(x, branch, r, c, stride, branch_stride, mask)
        if branch is not None:
            tl.store(total + r[:, None] * columns + c[None, :], tile.to(total.dtype.element_ty), mask=mask)
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
def _quarter(x, branch, row, column, stride, branch_stride, rows):
    """As ``load_quarter``, of the sum with a branch."""
    r = row + 4 * tl.arange(0, QUARTER)
    return _read(x, branch, r, column + tl.arange(0, BLOCK), stride, branch_stride, (r < rows)[:, None])


@triton.jit
def _normed(quarter, means, inverses, gamma, beta, row, column, rows, LAYER: tl.constexpr):
    """A quarter, normed; rows behind the last are zeros."""
    c, r = column + tl.arange(0, BLOCK), row + 4 * tl.arange(0, QUARTER)
    y = quarter
    if LAYER:
        y -= tl.load(means + r, mask=r < rows, other=0.0)[:, None]
    y = y * tl.load(inverses + r, mask=r < rows, other=0.0)[:, None]
    if gamma is not None:
        y = y * tl.load(gamma + c).to(tl.float32)[None, :]
    if beta is not None:
        y = tl.where((r < rows)[:, None], y + tl.load(beta + c).to(tl.float32)[None, :], 0.0)
    return y


@triton.jit
def norm_kernel(
    x, branch, total, gamma, beta, stride, branch_stride, rows, columns, padded, eps, out, out_scale, turned, turned_scale, means, inverses, ready,
    ahead,
    LAYER: tl.constexpr, SQUARE: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """In turns of programs for the statistics of a strip of 128 rows, and one for each tile of a strip whose statistics were ``ahead`` turns before:
    a strip is read for the second time while the cache still has it.

    A tile waits for programs of lower numbers, which themselves wait for nothing; a GPU starts programs in the order of their numbers. It reads x and
    the branch again, not their sum, and so before it waits.

    Args:
        branch: None, or what is added to x before the norm, shaped as x.
        total: None, or with a branch ``[rows, columns]`` for the sum.
        gamma, beta: ``[columns]``, None for ones and for zeros.
        means, inverses: ``[rows]``, the statistics.
        ready: int32 zeros ``[padded / 128]``: programs of each strip that have stored their statistics.
    """
    across = columns // BLOCK
    turn, place = tl.program_id(0) // (across + PARTS), tl.program_id(0) % (across + PARTS)
    row_tile = turn - ahead
    if place < PARTS:
        if turn < padded // BLOCK:
            r = turn.to(tl.int64) * BLOCK + place * PART + tl.arange(0, PART)
            mean, inverse = _statistics(x, branch, total, r, stride, branch_stride, rows, columns, eps, LAYER, WIDE, STAGES)
            tl.store(means + r, mean, mask=r < rows)
            tl.store(inverses + r, inverse, mask=r < rows)
            tl.debug_barrier()  # all threads have stored theirs
            tl.atomic_add(ready + turn, 1, sem="release")
    elif row_tile >= 0:
        row = row_tile.to(tl.int64) * BLOCK
        column_tile = place - PARTS
        column = column_tile * BLOCK
        q0 = _quarter(x, branch, row, column, stride, branch_stride, rows)
        q1 = _quarter(x, branch, row + 1, column, stride, branch_stride, rows)
        q2 = _quarter(x, branch, row + 2, column, stride, branch_stride, rows)
        q3 = _quarter(x, branch, row + 3, column, stride, branch_stride, rows)
        while tl.atomic_add(ready + row_tile, 0, sem="acquire") < PARTS:
            pass
        q0 = _normed(q0, means, inverses, gamma, beta, row, column, rows, LAYER)
        q1 = _normed(q1, means, inverses, gamma, beta, row + 1, column, rows, LAYER)
        q2 = _normed(q2, means, inverses, gamma, beta, row + 2, column, rows, LAYER)
        q3 = _normed(q3, means, inverses, gamma, beta, row + 3, column, rows, LAYER)
        if SQUARE:
            store_square(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale, EACH=True)
        else:
            store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale)


one_row_kernel = triton.jit(norm_kernel.fn, do_not_specialize=["rows"])
"""For one row. Where the number of rows is compiled in as 1, all rows behind the first are one zero, and ptxas of CUDA 12.8 packs two pairs
of E4M3 that are the same register without the upper one: rows that pad a layer norm came out as garbage on an H200. This one has no such pack, and
its tests pass there."""


@triton.jit
def norm_grad_kernel(
    x, dy, more, gamma, means, inverses, dx, sums, stride, rows, columns, chunks, LAYER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Chunks of ``ROWS`` rows, every ``programs``-th: ``dx [rows, columns]``; and ``sums [programs, 2, columns]`` of dy n and dy.

    Args:
        more: None, or a gradient of x from elsewhere to be added, ``[rows, columns]``.
        gamma: None for ones; then there is nobody to read the sums, and they are None.
    """
    c = tl.arange(0, WIDTH)
    inside = c < columns
    by_scale, by_shift = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        r = tl.cast(chunk, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (r < rows)[:, None] & inside[None, :]
        places = r[:, None] * columns + c[None, :]
        z = tl.load(x + r[:, None] * stride + c[None, :], mask=mask, other=0.0)
        grad = tl.load(dy + places, mask=mask, other=0.0)
        if more is not None:
            added = tl.load(more + places, mask=mask, other=0.0)
        mean, inverse = tl.load(means + r, mask=r < rows, other=0.0), tl.load(inverses + r, mask=r < rows, other=0.0)
        n = tl.where(mask, (z.to(tl.float32) - mean[:, None]) * inverse[:, None], 0.0)
        g = grad.to(tl.float32)
        if gamma is not None:
            by_scale += tl.sum(g * n, 0)
            by_shift += tl.sum(g, 0)
            g *= tl.load(gamma + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        dz = g - n * (tl.sum(g * n, 1) / columns)[:, None]
        if LAYER:
            dz = dz - (tl.sum(g, 1) / columns)[:, None]
        dz *= inverse[:, None]
        if more is not None:
            dz += added.to(tl.float32)
        tl.store(dx + places, dz.to(dx.dtype.element_ty), mask=mask)
    if gamma is not None:
        place = sums + tl.program_id(0).to(tl.int64) * 2 * columns + c
        tl.store(place, by_scale, mask=inside)
        tl.store(place + columns, by_shift, mask=inside)


def norm_both(
    x: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    norm: Norm,
    branch: Tensor | None = None,
    square: bool = False,
    eps: float = 1e-5,
) -> tuple[Both, Tensor, Tensor, Tensor]:
    """``N(x + branch)`` as the operand of products.

    Args:
        x: ``[rows, columns]``, columns a multiple of 128 and next to each other; any floating dtype.
        gamma, beta: ``[columns]``, ones and zeros by default; beta for a layer norm alone.
        norm: its kind.
        branch: shaped as x and of its dtype.
        square: in 128 x 128 blocks, as ``cast_squares`` gives them, instead of in 1 x 128 blocks along either axis.
        eps: added to the mean square.

    Returns:
        The operand; what the norm reads, x or ``x + branch`` rounded to x's dtype; and the statistics of rows for the gradient: means (zeros for RMS)
        and inverse deviations, ``[rows]`` float32.

    Raises:
        RequestError: shapes, dtypes or layouts that do not fit.
    """
    require_matrix("norm_both", x)
    rows, columns = x.shape
    if norm == "rms" and beta is not None:
        raise RequestError("norm_both", "an RMS norm has no beta", "Leave it out.")
    for name, vector in (("gamma", gamma), ("beta", beta)):
        if vector is not None and (vector.shape != (columns,) or not vector.is_contiguous()):
            raise RequestError("norm_both", f"{name} is {list(vector.shape)} for {columns} columns", f"Give [{columns}], contiguous.")
    if branch is not None:
        require_matrix("norm_both", branch)
        if (branch.shape, branch.dtype) != (x.shape, x.dtype):
            so = f"x is {x.dtype} {list(x.shape)} and the branch {branch.dtype} {list(branch.shape)}"
            raise RequestError("norm_both", so, "Give two of one shape and dtype.")
    both = Both.squares(rows, columns, x.device, each=True) if square else Both.empty(rows, columns, x.device)
    total = x if branch is None else torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    means, inverses = torch.empty(2, rows, device=x.device)
    if x.numel():
        padded = both.along.elements.shape[0]
        strips = padded // SIDE
        read = (x, branch, None if branch is None else total, gamma, beta, x.stride(0), 0 if branch is None else branch.stride(0))
        written = (*both.words(), means, inverses, torch.zeros(strips, dtype=torch.int32, device=x.device))
        how = {"LAYER": norm == "layer", "SQUARE": square, "WIDE": WIDE if branch is None else WIDE // 2, "STAGES": STAGES, **LAUNCH}
        kernel = one_row_kernel if rows == 1 else norm_kernel
        kernel[((strips + AHEAD) * (columns // SIDE + int(PARTS)),)](*read, rows, columns, padded, eps, *written, AHEAD, **how)
    return both, total, means, inverses


def norm_grad(
    x: Tensor, dy: Tensor, gamma: Tensor | None, means: Tensor, inverses: Tensor, *, norm: Norm, more: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``N(x)`` by x, gamma and beta.

    Args:
        x: ``[rows, columns]``, at most 4,096 columns: what the norm read.
        dy: ``[rows, columns]``, the gradient of ``N(x)``.
        gamma: ``[columns]``; None for ones, and no gradients of gamma and beta.
        means, inverses: what ``norm_both`` gave.
        norm: its kind.
        more: ``[rows, columns]``, a gradient of x from elsewhere, which is added.

    Returns:
        ``[rows, columns]`` of x's dtype, and two of ``[columns]`` float32 (the last one is not meaningful for ``rms``).
    """
    rows, columns = x.shape
    if columns > WIDEST:
        raise RequestError("norm_grad", f"rows have {columns} columns", f"Give at most {WIDEST}.")
    width = triton.next_power_of_2(columns)
    held = max(1, (PLAIN_CHUNK if gamma is None else CHUNK) // width)
    chunks = -(-rows // held)
    programs = chunks if gamma is None else min(chunks, 4 * MULTIPROCESSORS)
    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    sums = None if gamma is None else torch.empty(programs, 2, columns, device=x.device)
    if programs:
        told = (x, dy.contiguous(), None if more is None else more.contiguous(), gamma, means, inverses, dx, sums)
        warps = 4 if gamma is None else 8
        norm_grad_kernel[(programs,)](*told, x.stride(0), rows, columns, chunks, LAYER=norm == "layer", ROWS=held, WIDTH=width, num_warps=warps)
    if sums is None:
        return dx, None, None
    by_gamma, by_beta = sums.sum(0)
    return dx, by_gamma, by_beta
