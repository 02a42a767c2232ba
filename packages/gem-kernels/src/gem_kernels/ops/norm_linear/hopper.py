"""A norm and a matmul in one pass on Hopper, where the whole matrix fits into shared memory: each program loads it once and streams rows past it.

One producer warp copies tiles of rows, two warpgroups take them in turn: while one makes statistics and stores, the other multiplies. What ``before``
and ``after`` compute is told in ``triton``; here ``before`` takes its statistics from the rows in shared memory, about their mean.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from gem_kernels.common.hopper.language import accumulator, barriers

PART = gl.constexpr(64)
"""Columns of x that statistics are taken from at once: one panel of shared memory."""


@gluon.jit
def _tiles_here(tiles):
    return (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _produce(x_desc, weight_desc, tiles, xs, ws, w_full, x_full, x_free, ROWS: gl.constexpr, STAGES: gl.constexpr):
    mbarrier.expect(w_full.index(0), weight_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(weight_desc, [0, 0], w_full.index(0), ws)
    for t in range(_tiles_here(tiles)):
        stage = t % STAGES
        mbarrier.wait(x_free.index(stage), ((t // STAGES) & 1) ^ 1)
        mbarrier.expect(x_full.index(stage), x_desc.block_type.nbytes)
        row = (gl.program_id(0) + t * gl.num_programs(0)) * ROWS
        tma.async_copy_global_to_shared(x_desc, [row, 0], x_full.index(stage), xs.index(stage))


@gluon.jit
def _moment(x_tile, mean, INNER: gl.constexpr, WIDE: gl.constexpr, ROWS: gl.constexpr, POWER: gl.constexpr):
    """``[ROWS]``: sums of the rows of a tile of ``WIDE`` columns, of which ``INNER`` count, or of their squares, about ``mean`` if there is one."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    columns = gl.arange(0, PART, gl.SliceLayout(0, layout))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(WIDE // PART):
        z = x_tile.slice(part * PART, PART, 1).load(layout).to(gl.float32)
        if mean is not None:
            z = z - mean[:, None]
            if (part + 1) * PART > INNER:
                z = gl.where((columns < INNER - part * PART)[None, :], z, 0.0)
        if POWER == 2:
            z = z * z
        total += gl.sum(z, 1)
    return total


@gluon.jit
def _columns(base, columns, fallback, WIDTH: gl.constexpr):
    """A vector of ``WIDTH`` columns as float32, or the number ``fallback`` where there is none."""
    found = fallback
    if base is not None:
        found = gl.load(base + columns, mask=columns < WIDTH, other=0.0).to(gl.float32)[None, :]
    return found


@gluon.jit
def _consume(
    out_desc, factors, bias, gamma, beta, sums, rows, tiles, eps, xs, ws, outs, w_full, x_full, x_free,
    W: gl.constexpr, BEFORE: gl.constexpr, LAYER: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    RESULT: gl.constexpr = accumulator(BLOCK)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, RESULT)
    kind: gl.constexpr = xs.dtype
    columns = gl.arange(0, BLOCK, gl.SliceLayout(0, RESULT))
    lanes = gl.arange(0, ROWS, OF_ROW)
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, RESULT)
    mbarrier.wait(w_full.index(0), 0)
    for t in range(W, _tiles_here(tiles), 2):
        stage = t % STAGES
        x_tile = xs.index(stage)
        mbarrier.wait(x_full.index(stage), (t // STAGES) & 1)
        product = warpgroup_mma(x_tile, ws.permute([1, 0]), nothing, use_acc=False, is_async=True)
        # The result of the tile before has left meanwhile, through the memory of its rows if both are of one size.
        tma.store_wait(0)
        if BLOCK == WIDE:
            mbarrier.arrive(x_free.index((t + 2 * STAGES - 2) % STAGES), count=1, pred=t > 1)
        if BEFORE:
            mean = None
            if LAYER:
                mean = _moment(x_tile, None, INNER, WIDE, ROWS, 1) * (1.0 / INNER)
            squares = _moment(x_tile, mean, INNER, WIDE, ROWS, 2)
            acc = warpgroup_mma_wait(0, deps=[product])
            if LAYER:
                acc -= gl.convert_layout(mean, OF_ROW)[:, None] * _columns(sums, columns, 0.0, WIDTH)
            r = gl.convert_layout(1.0 / gl.sqrt_rn(squares * (1.0 / INNER) + eps), OF_ROW)
            y = acc * r[:, None] + _columns(bias, columns, 0.0, WIDTH)
        else:
            acc = warpgroup_mma_wait(0, deps=[product])
            acc += _columns(bias, columns, 0.0, WIDTH)
            if LAYER:
                acc -= (gl.sum(acc, 1) * (1.0 / WIDTH))[:, None]
                if WIDTH != BLOCK:
                    acc = gl.where((columns < WIDTH)[None, :], acc, 0.0)
            r = 1.0 / gl.sqrt_rn(gl.sum(acc * acc, 1) * (1.0 / WIDTH) + eps)
            y = acc * r[:, None] * _columns(gamma, columns, 1.0, WIDTH) + _columns(beta, columns, 0.0, WIDTH)
        first = (gl.program_id(0) + t * gl.num_programs(0)) * ROWS
        if factors is not None:
            gl.store(factors + first + lanes, r, mask=lanes < rows - first)
        out_tile = x_tile if BLOCK == WIDE else outs.index(W)
        out_tile.store(y.to(kind))
        fence_async_shared()
        if BLOCK != WIDE:
            # Not before: what is stored shows that the rows that its norm read have arrived.
            mbarrier.arrive(x_free.index(stage), count=1)
        tma.async_copy_shared_to_global(out_desc, [first, 0], out_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "tiles"])
def norm_linear_kernel(
    x_desc, weight_desc, out_desc, factors, bias, gamma, beta, sums, rows, tiles, eps,
    BEFORE: gl.constexpr, LAYER: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Result of ``WIDTH`` columns in tiles of ``BLOCK``, from x of ``INNER`` columns in tiles of ``WIDE``, and the factor of each row,
    ``factors [rows]`` float32, unless None; ``sums`` as in ``triton``, for LayerNorm before the product."""
    ws = gl.allocate_shared_memory(weight_desc.dtype, [BLOCK, WIDE], weight_desc.layout)
    xs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, WIDE], x_desc.layout)
    outs = xs
    if BLOCK != WIDE:
        outs = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS, BLOCK], out_desc.layout)
    w_full, x_full, x_free = barriers(1, 1), barriers(STAGES, 1), barriers(STAGES, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out_desc, factors, bias, gamma, beta, sums, rows, tiles, eps, xs, ws, outs, w_full, x_full, x_free,
                        0, BEFORE, LAYER, WIDTH, INNER, ROWS, BLOCK, WIDE, STAGES)),
            (_consume, (out_desc, factors, bias, gamma, beta, sums, rows, tiles, eps, xs, ws, outs, w_full, x_full, x_free,
                        1, BEFORE, LAYER, WIDTH, INNER, ROWS, BLOCK, WIDE, STAGES)),
            (_produce, (x_desc, weight_desc, tiles, xs, ws, w_full, x_full, x_free, ROWS, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
