"""A norm and a matmul in one pass, for 16-bit inputs: the norm's rows never travel to memory on their own.

``after``: a program computes whole rows of x wᵀ in registers, norms and stores them. ``before``: a norm only scales rows (and for LayerNorm subtracts
a multiple of the weights' row sums), so the product is computed from the rows as they are and meets their statistics at the end.

Programs stay, one an SM, and take tile after tile: the next one's rows are on their way while one is stored. x, weight and out are descriptors.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.ops.norm_linear.rows import load_columns, normalise

_VARYING = ["rows", "tiles"]


@triton.jit(do_not_specialize=_VARYING)
def after_kernel(
    x, weight, bias, gamma, beta, out, factors, rows, tiles, eps,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x wᵀ + bias), and what the norm multiplied each row by, ``factors [rows]`` float32, unless None. ``INNER``: columns
    of x."""
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for k in tl.range(0, INNER, STEP, num_stages=STAGES):
            acc = tl.dot(x.load([tile * ROWS, k]), tl.trans(weight.load([0, k])), acc)
        n, r = normalise(acc + load_columns(bias, 0.0, WIDTH, BLOCK), eps, LAYER, WIDTH, BLOCK)
        if factors is not None:
            row = tile * ROWS + tl.arange(0, ROWS)
            tl.store(factors + row, r, mask=row < rows)
        y = n * load_columns(gamma, 1.0, WIDTH, BLOCK) + load_columns(beta, 0.0, WIDTH, BLOCK)
        out.store([tile * ROWS, 0], y.to(out.dtype))


@triton.jit(do_not_specialize=_VARYING)
def before_kernel(
    x, weight, bias, factors, means, sums, out, rows, tiles,
    LAYER: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``out [rows, WIDTH]`` = N(x) wᵀ + bias with the norm's scale and shift already in ``weight`` and ``bias``; ``factors`` and ``means`` as
    ``rows.statistics_kernel`` writes them, ``sums [WIDTH]`` float32 are the sums of the weight's rows.

    The statistics are not taken from the tiles in shared memory: Triton 3.6 does not order the copy engine's next write into a tile after reads of it
    other than those of the matrix product.
    """
    column_tiles = tl.cdiv(WIDTH, BLOCK)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row = tile // column_tiles * ROWS
        column = tile % column_tiles * BLOCK
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        for k in tl.range(0, INNER, STEP, num_stages=STAGES):
            acc = tl.dot(x.load([row, k]), tl.trans(weight.load([column, k])), acc)
        r = row + tl.arange(0, ROWS)
        c = column + tl.arange(0, BLOCK)
        if LAYER:
            acc -= tl.load(means + r, mask=r < rows, other=0.0)[:, None] * tl.load(sums + c, mask=c < WIDTH, other=0.0)[None, :]
        acc *= tl.load(factors + r, mask=r < rows, other=0.0)[:, None]
        if bias is not None:
            acc += tl.load(bias + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
        out.store([row, column], acc.to(out.dtype))
