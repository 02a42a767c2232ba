"""Gradients of RMSNorm and a matmul in one pass on Hopper: every row is read once, and only the gradient of x is written.

Two programs share a tile of rows, one for each half of the columns of x: each keeps its half of the matrix in shared memory and its half of the
matrix's gradient in registers, and reads the other rows whole, which the second program finds in L2. With n the normed rows, r their factors and c
the mean of gradient times value over a normed row:

- ``after``: dz = r (g - n c) with g = dout gamma; dx = dz w, dw = dzᵀ x. n is the result where there is no gamma.
- ``before``: dx = r (dout w - n c), dw = doutᵀ n, with n = r x. There c needs no product: over the columns of x, the sum of (dout w) n is that of
  dout (out - bias) over those of the result.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM113

from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.language import barriers

PART = gl.constexpr(32)
"""Rows of which gradients are made at once: few, to leave the matrix's gradient its registers."""


@gluon.jit
def _produce(
    dout_desc, other_desc, x_desc, weight_desc, tiles, douts, others, xs, ws, w_full, dout_full, other_full, x_full, dout_free, other_free, x_free,
    ROWS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    column = gl.program_id(0) % 2 * HALF
    mbarrier.expect(w_full.index(0), weight_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(weight_desc, [0, column], w_full.index(0), ws)
    copied = 0
    for tile in range(gl.program_id(0) // 2, tiles, gl.num_programs(0) // 2):
        stage = copied % STAGES
        phase = ((copied // STAGES) & 1) ^ 1
        mbarrier.wait(other_free.index(stage), phase)
        mbarrier.expect(other_full.index(stage), other_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(other_desc, [tile * ROWS, 0], other_full.index(stage), others.index(stage))
        mbarrier.wait(dout_free.index(stage), phase)
        mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(dout_desc, [tile * ROWS, 0], dout_full.index(stage), douts.index(stage))
        mbarrier.wait(x_free.index(stage), phase)
        mbarrier.expect(x_full.index(stage), x_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(x_desc, [tile * ROWS, column], x_full.index(stage), xs.index(stage))
        copied += 1


@gluon.jit
def _by_warp(values, BLOCK: gl.constexpr):
    """``[rows, BLOCK]`` added over the rows that each warp holds: ``[8, BLOCK]``."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [8, 1], [1, 0])
    return gl.convert_layout(gl.sum(values.reshape([PART // 8, 8, BLOCK]), 0), layout)


@gluon.jit
def _after_rows(dout_tile, n_tile, r, gamma, first, rows, of_gamma, of_bias, WIDTH: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr,
                SUMS: gl.constexpr):  # fmt: skip
    """Put the gradient before the norm in the place of ``dout``, and add up the columns' gradients."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [8, 1], [1, 0])
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    lanes = gl.arange(0, PART, gl.SliceLayout(1, layout))
    for part in gl.static_range(ROWS // PART):
        row = lanes + (first + part * PART)
        factor = gl.load(r + row, mask=row < rows, other=0.0)
        n = n_tile.slice(part * PART, PART, 0).load(layout).to(gl.float32)
        g = dout_tile.slice(part * PART, PART, 0).load(layout).to(gl.float32)
        if SUMS:
            of_gamma += _by_warp(g * n, BLOCK)
        if gamma is not None:
            g = g * gl.load(gamma + columns, mask=columns < WIDTH, other=0.0).to(gl.float32)[None, :]
        mean = gl.sum(g * n, 1) * (1.0 / WIDTH)
        dz = (g - n * mean[:, None]) * factor[:, None]
        if SUMS:
            of_bias += _by_warp(dz, BLOCK)
        dout_tile.slice(part * PART, PART, 0).store(dz.to(dout_tile.dtype))
    return of_gamma, of_bias


@gluon.jit
def _before_rows(dout_tile, out_tile, bias, of_bias, WIDTH: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SUMS: gl.constexpr,
                 OF_ROW: gl.constexpr):  # fmt: skip
    """``[ROWS]``: sums of ``dout (out - bias)``."""
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [8, 1], [1, 0])
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    g = dout_tile.load(layout).to(gl.float32)
    values = out_tile.load(layout).to(gl.float32)
    if bias is not None:
        values = values - gl.load(bias + columns, mask=columns < WIDTH, other=0.0).to(gl.float32)[None, :]
    if SUMS:
        of_bias += gl.convert_layout(gl.sum(g.reshape([ROWS // 8, 8, BLOCK]), 0), layout)
    return gl.convert_layout(gl.sum(g * values, 1), OF_ROW), of_bias


@gluon.jit
def _consume(
    dx_desc, r, gamma, bias, dweight, dcolumns, rows, tiles, douts, others, xs, ws, w_full, dout_full, other_full, x_full,
    dout_free, other_free, x_free,
    BEFORE: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    RESULT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, HALF // 2, 16])
    MATRIX: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, HALF, 16])
    COLUMNS: gl.constexpr = gl.BlockedLayout([1, BLOCK // 32], [1, 32], [8, 1], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
    SUMS: gl.constexpr = dcolumns is not None
    kind: gl.constexpr = xs.dtype
    lanes = gl.arange(0, ROWS, OF_ROW)
    nothing = gl.zeros([ROWS, HALF], gl.float32, RESULT)
    dw = gl.zeros([BLOCK, HALF], gl.float32, MATRIX)
    of_gamma = gl.zeros([8, BLOCK], gl.float32, COLUMNS)
    of_bias = gl.zeros([8, BLOCK], gl.float32, COLUMNS)
    half = gl.program_id(0) % 2
    done = 0
    mbarrier.wait(w_full.index(0), 0)
    for tile in range(gl.program_id(0) // 2, tiles, gl.num_programs(0) // 2):
        stage = done % STAGES
        phase = (done // STAGES) & 1
        dout_tile, x_tile = douts.index(stage), xs.index(stage)
        if BEFORE:
            row = lanes + tile * ROWS
            factor = gl.load(r + row, mask=row < rows, other=0.0)
        mbarrier.wait(other_full.index(stage), phase)
        mbarrier.wait(dout_full.index(stage), phase)
        if BEFORE:
            total, of_bias = _before_rows(dout_tile, others.index(stage), bias, of_bias, WIDTH, BLOCK, ROWS, SUMS, OF_ROW)
            mbarrier.wait(x_full.index(stage), phase)
            n = x_tile.load(RESULT).to(gl.float32) * factor[:, None]
            x_tile.store(n.to(kind))
        else:
            of_gamma, of_bias = _after_rows(
                dout_tile, others.index(stage), r, gamma, tile * ROWS, rows, of_gamma, of_bias, WIDTH, BLOCK, ROWS, SUMS
            )  # fmt: skip
            mbarrier.wait(x_full.index(stage), phase)
        mbarrier.arrive(other_free.index(stage), count=1)
        fence_async_shared()
        product = warpgroup_mma(dout_tile, ws, nothing, use_acc=False, is_async=True)
        dw_acc = warpgroup_mma(dout_tile.permute([1, 0]), x_tile, warpgroup_mma_init(dw), is_async=True)
        # The tile before has left meanwhile, through the memory of its x.
        tma.store_wait(0)
        mbarrier.arrive(x_free.index((done + STAGES - 1) % STAGES), count=1, pred=done > 0)
        dx, dw = warpgroup_mma_wait(0, deps=[product, dw_acc])
        mbarrier.arrive(dout_free.index(stage), count=1)
        if BEFORE:
            dx = (dx - x_tile.load(RESULT).to(gl.float32) * (total * (1.0 / INNER))[:, None]) * factor[:, None]
        x_tile.store(dx.to(kind))
        fence_async_shared()
        tma.async_copy_shared_to_global(dx_desc, [tile * ROWS, half * HALF], x_tile)
        done += 1
    tma.store_wait(0)
    o = gl.arange(0, BLOCK, gl.SliceLayout(1, MATRIX))
    i = gl.arange(0, HALF, gl.SliceLayout(0, MATRIX)) + half * HALF
    at = dweight + gl.program_id(0) // 2 * (WIDTH * INNER) + o[:, None] * INNER + i[None, :]
    gl.store(at, dw, mask=(o < WIDTH)[:, None] & (i < INNER)[None, :])
    if SUMS:
        w = gl.arange(0, 8, gl.SliceLayout(1, COLUMNS))
        c = gl.arange(0, BLOCK, gl.SliceLayout(0, COLUMNS))
        here = dcolumns + gl.program_id(0) // 2 * (16 * WIDTH) + w[:, None] * WIDTH + c[None, :]
        inside = (c < WIDTH)[None, :] & (w < 8 - 8 * half)[:, None]
        gl.store(here, of_gamma, mask=inside)
        gl.store(here + 8 * WIDTH, of_bias, mask=inside)


@gluon.jit(do_not_specialize=["rows", "tiles"])
def norm_linear_grad_kernel(
    dout_desc, other_desc, x_desc, weight_desc, dx_desc, r, gamma, bias, dweight, dcolumns, rows, tiles,
    BEFORE: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, HALF: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Write dx, and parts of the other gradients for each pair of programs: ``dweight [pairs, WIDTH, INNER]`` and, unless None, ``dcolumns
    [pairs, 2, 8, WIDTH]`` of gamma (``after``) and of the bias, all float32.

    ``other`` is n ``after`` and the result ``before``; ``r [rows]`` float32. ``gamma`` is that of ``after``; ``before`` it is in ``weight``, and the
    gradient of the weight is without it. ``tiles`` counts each tile twice, for its two programs.
    """
    douts = gl.allocate_shared_memory(dout_desc.dtype, [STAGES, ROWS, BLOCK], dout_desc.layout)
    others = gl.allocate_shared_memory(other_desc.dtype, [STAGES, ROWS, BLOCK], other_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, HALF], x_desc.layout)
    ws = gl.allocate_shared_memory(weight_desc.dtype, [BLOCK, HALF], weight_desc.layout)
    w_full = barriers(1, 1)
    dout_full, other_full, x_full = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1)
    dout_free, other_free, x_free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    tiles = tiles // 2
    gl.warp_specialize(
        [
            (_consume, (dx_desc, r, gamma, bias, dweight, dcolumns, rows, tiles, douts, others, xs, ws, w_full, dout_full, other_full, x_full,
                        dout_free, other_free, x_free, BEFORE, WIDTH, INNER, ROWS, BLOCK, HALF, STAGES)),
            (_produce, (dout_desc, other_desc, x_desc, weight_desc, tiles, douts, others, xs, ws, w_full, dout_full, other_full, x_full,
                        dout_free, other_free, x_free, ROWS, HALF, STAGES)),
        ],
        [1],
        [24],
    )  # fmt: skip
