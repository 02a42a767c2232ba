"""A norm and a matmul in one pass, for 16-bit inputs: the norm's rows never travel to memory on their own.

``after``: a program computes whole rows of x wᵀ in registers, norms and stores them. ``before``: a norm only scales rows (and for LayerNorm subtracts
a multiple of the weights' row sums), so the product is computed from the rows as they are, their statistics beside it in the same loop, and both meet
at the end. Sums of squares are taken about the first value of a row, which keeps them exact where a row's mean is far from zero.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.ops.norm_linear.rows import load_columns, load_tile, normalise, store_tile

_VARYING = ["rows", "tiles"]


@triton.jit
def _load(base, r, c, rows, columns, stride, FULL: tl.constexpr):
    """``[len(r), len(c)]`` in its own dtype, zeros outside; ``FULL``: the columns need no mask."""
    mask = (r < rows)[:, None]
    if not FULL:
        mask = mask & (c < columns)[None, :]
    return tl.load(base + r[:, None] * stride + c[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=_VARYING)
def after_kernel(
    x, weight, bias, residual, gamma, beta, out, total, rows, tiles, eps, x_stride, weight_stride, residual_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x wᵀ + bias + residual), ``total`` the same before the norm unless None. ``INNER``: columns of x."""
    c = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile * ROWS
        r = first + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for k in range(0, INNER, STEP):
            inner = k + tl.arange(0, STEP)
            x_tile = _load(x, r, inner, rows, INNER, x_stride, INNER % STEP == 0)
            w_tile = _load(weight, c, inner, WIDTH, INNER, weight_stride, INNER % STEP == 0)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc)
        acc += load_columns(bias, 0.0, WIDTH, BLOCK)
        if residual is not None:
            acc += load_tile(residual, first, rows, residual_stride, WIDTH, ROWS, BLOCK)
        if total is not None:
            store_tile(total, acc, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        n, _ = normalise(acc, eps, LAYER, WIDTH, BLOCK)
        y = n * load_columns(gamma, 1.0, WIDTH, BLOCK) + load_columns(beta, 0.0, WIDTH, BLOCK)
        store_tile(out, y, first, rows, WIDTH, WIDTH, ROWS, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def before_kernel(
    x, weight, bias, residual, sums, out, total, rows, tiles, eps, x_stride, weight_stride, residual_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x + residual) wᵀ + bias with the norm's scale and shift already in ``weight`` and ``bias``; ``sums [WIDTH]`` float32
    are the sums of the weight's rows, ``total`` what was normed unless None.
    """
    column_tiles = tl.cdiv(WIDTH, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile // column_tiles * ROWS
        column = tile % column_tiles * BLOCK
        r = first + tl.arange(0, ROWS)
        c = column + tl.arange(0, BLOCK)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        moved = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        pivot = tl.zeros([ROWS], tl.float32)
        if LAYER:
            pivot = tl.load(x + r * x_stride, mask=r < rows, other=0.0).to(tl.float32)
            if residual is not None:
                pivot += tl.load(residual + r * residual_stride, mask=r < rows, other=0.0).to(tl.float32)
        for k in range(0, INNER, STEP):
            inner = k + tl.arange(0, STEP)
            x_tile = _load(x, r, inner, rows, INNER, x_stride, INNER % STEP == 0)
            w_tile = _load(weight, c, inner, WIDTH, INNER, weight_stride, INNER % STEP == 0)
            z = x_tile.to(tl.float32)
            if residual is not None:
                z += _load(residual, r, inner, rows, INNER, residual_stride, INNER % STEP == 0).to(tl.float32)
                x_tile = z.to(x_tile.dtype)
                if total is not None:
                    if column == 0:
                        at = total + r[:, None] * INNER + inner[None, :]
                        tl.store(at, x_tile, mask=(r < rows)[:, None] & (inner < INNER)[None, :])
            if LAYER:
                z = z - pivot[:, None]
                if INNER % STEP != 0:
                    z = tl.where((inner < INNER)[None, :], z, 0.0)
                moved += tl.sum(z, 1)
            squares += tl.sum(z * z, 1)
            acc = tl.dot(x_tile, tl.trans(w_tile), acc)
        inside = c < WIDTH
        if LAYER:
            moved = moved * (1.0 / INNER)
            squares = squares * (1.0 / INNER) - moved * moved
            acc -= (pivot + moved)[:, None] * tl.load(sums + c, mask=inside, other=0.0)[None, :]
        else:
            squares = squares * (1.0 / INNER)
        acc *= (1.0 / tl.sqrt(tl.maximum(squares, 0.0) + eps))[:, None]
        if bias is not None:
            acc += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        tl.store(out + r[:, None] * WIDTH + c[None, :], acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & inside[None, :])
