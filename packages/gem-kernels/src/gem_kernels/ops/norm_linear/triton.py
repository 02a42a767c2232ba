"""A norm and a matmul in one pass, for 16-bit inputs: the norm's rows never travel to memory on their own.

``after``: a program computes whole rows of x wᵀ in registers, norms and stores them. ``before``: a norm only scales rows (and for LayerNorm subtracts
a multiple of the weights' row sums), so the product is computed from the rows as they are, their statistics beside it in the same loop, and both meet
at the end. Sums of squares are taken about the first value of a row, which keeps them exact where a row's mean is far from zero.

Programs stay, one an SM, and take tile after tile. ``FLAT``: the next one's rows are on their way while one is stored. x, weight and out are
descriptors.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.ops.norm_linear.rows import load_columns, load_tile, normalise, store_tile

_VARYING = ["rows", "tiles"]


@triton.jit(do_not_specialize=_VARYING)
def after_kernel(
    x, weight, bias, residual, gamma, beta, out, total, rows, tiles, eps, residual_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x wᵀ + bias + residual), ``total`` the same before the norm unless None. ``INNER``: columns of x."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for k in tl.range(0, INNER, STEP, num_stages=STAGES):
            acc = tl.dot(x.load([tile * ROWS, k]), tl.trans(weight.load([0, k])), acc)
        acc += load_columns(bias, 0.0, WIDTH, BLOCK)
        first = tl.cast(tile, tl.int64) * ROWS
        if residual is not None:
            acc += load_tile(residual, first, rows, residual_stride, WIDTH, ROWS, BLOCK)
        if total is not None:
            store_tile(total, acc, first, rows, WIDTH, WIDTH, ROWS, BLOCK)
        n, _ = normalise(acc, eps, LAYER, WIDTH, BLOCK)
        y = n * load_columns(gamma, 1.0, WIDTH, BLOCK) + load_columns(beta, 0.0, WIDTH, BLOCK)
        out.store([tile * ROWS, 0], y.to(out.dtype))


@triton.jit(do_not_specialize=_VARYING)
def before_kernel(
    x, weight, bias, residual, pivots, sums, out, total, rows, tiles, eps, x_stride, residual_stride,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x + residual) wᵀ + bias with the norm's scale and shift already in ``weight`` and ``bias``; ``sums [WIDTH]`` float32
    are the sums of the weight's rows, ``pivots`` points to x, ``total`` is what was normed unless None.
    """
    column_tiles = tl.cdiv(WIDTH, BLOCK)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLAT):
        row = tile // column_tiles * ROWS
        column = tile % column_tiles * BLOCK
        r = tl.cast(tile // column_tiles, tl.int64) * ROWS + tl.arange(0, ROWS)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        moved = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        pivot = tl.zeros([ROWS], tl.float32)
        if LAYER:
            pivot = tl.load(pivots + r * x_stride, mask=r < rows, other=0.0).to(tl.float32)
            if residual is not None:
                pivot += tl.load(residual + r * residual_stride, mask=r < rows, other=0.0).to(tl.float32)
        for k in tl.range(0, INNER, STEP, num_stages=STAGES):
            x_tile = x.load([row, k])
            z = x_tile.to(tl.float32)
            inner = k + tl.arange(0, STEP)
            inside = (r < rows)[:, None] & (inner < INNER)[None, :]
            if residual is not None:
                z += tl.load(residual + r[:, None] * residual_stride + inner[None, :], mask=inside, other=0.0).to(tl.float32)
                x_tile = z.to(x_tile.dtype)
                if total is not None:  # noqa: SIM102 - a compile-time choice and a run-time one
                    if column == 0:
                        tl.store(total + r[:, None] * INNER + inner[None, :], x_tile, mask=inside)
            if LAYER:
                z = z - pivot[:, None]
                if INNER % STEP != 0:
                    z = tl.where((inner < INNER)[None, :], z, 0.0)
                moved += tl.sum(z, 1)
            squares += tl.sum(z * z, 1)
            acc = tl.dot(x_tile, tl.trans(weight.load([column, k])), acc)
        c = column + tl.arange(0, BLOCK)
        squares = squares * (1.0 / INNER)
        if LAYER:
            moved = moved * (1.0 / INNER)
            squares = squares - moved * moved
            acc -= (pivot + moved)[:, None] * tl.load(sums + c, mask=c < WIDTH, other=0.0)[None, :]
        acc *= (1.0 / tl.sqrt(tl.maximum(squares, 0.0) + eps))[:, None]
        if bias is not None:
            acc += tl.load(bias + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], acc.to(out.dtype))
