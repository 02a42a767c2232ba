"""Slopes of HSTU's scores, kept by the pass over the keys, and the gradient of the queries as their product with the keys.

A pass of its own over queries and keys makes the scores and ``dout vᵀ`` again, two products of its three; slopes of 16 bits cost 2 bytes a score to
write and as many to read. Only what a causal mask leaves is kept: squares of 64 keys by 64 queries, those of one block of queries one after another.
Short rows lose by it: theirs are not kept, and the pass of its own has only their tiles.

A square is stored as the registers of the pass over the keys have it: sixteen bytes of a thread at once, and nothing moves. Sixteen by sixteen scores
stand together, so that a warp of the second pass finds its own queries; it turns eight by eight of them at a time.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.items import item_of, items_here, read_row
from gem_kernels.common.hopper.language import accumulator, barriers, copies, keys_seen, load

STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [32, 0], [64, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[128, 0], [256, 0]],
        block_bases=[],
        shape=[512, 8],
    )
)
"""``accumulator(64)`` by pieces of sixteen bytes: of 16 keys (a warp's), of 16 queries, of a thread."""
LOADED = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[4, 0], [8, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
"""The same memory as rows of 64, read by the warps that have its queries."""


@gluon.jit
def tiles_of_long_rows(records, count, long):
    """How many of ``count`` tiles are of rows of which ``long`` tokens or more are used: they come first in a list."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        enough = gl.load(records + middle * 8 + 3) >= long
        low = gl.where(enough, middle + 1, low)
        high = gl.where(enough, high, middle)
    return low


@gluon.jit
def first_square(records, item, heads, start, block, longest, squares):
    """The first square of a block of queries of an item's row. A head has ``squares``; a row, of up to ``longest`` blocks, begins behind as many as
    the blocks of all rows before it can have."""
    row = gl.load(records + item // heads * 8)
    return item % heads * squares + (start // 64 + row) * (longest + 1) // 2 + block * (block + 1) // 2


@gluon.jit
def keep(slopes, square, ds, wanted):
    """Store ``ds`` ``[64 keys, 64 queries]`` of a warpgroup if ``wanted``: a mask, as a branch would stand between products."""
    # Keys are 16 k + 8 e + r, queries 16 q + 8 d + 2 c + b: r and c are a thread's.
    pieces = gl.convert_layout(ds.reshape([4, 2, 8, 4, 2, 4, 2]).permute([0, 3, 2, 5, 4, 1, 6]).reshape([512, 8]), STORED)
    rows = gl.arange(0, 512, gl.SliceLayout(1, STORED))
    columns = gl.arange(0, 8, gl.SliceLayout(0, STORED))
    gl.store(slopes + square.to(gl.int64) * 4096 + (rows[:, None] * 8 + columns[None, :]), pieces, mask=wanted)


@gluon.jit
def turned(x):
    """Eight by eight values of a warp, two beside each other in each thread, transposed."""
    return gl.inline_asm_elementwise("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)


@gluon.jit
def queries_of(square, LAYOUT: gl.constexpr):
    """``[64 queries, 64 keys]`` from a square in shared memory ``[64, 64]``."""
    x = turned(square.load(LOADED))
    # Where the pieces were k, q, r, c, d, e, b, keys 2 c + b now are a thread's, and queries r.
    return gl.convert_layout(x.reshape([4, 4, 8, 4, 2, 2, 2]).permute([1, 4, 2, 0, 5, 3, 6]).reshape([64, 64]), LAYOUT)


@gluon.jit
def _produce(slopes_desc, k_desc, records, total, heads, k_head, longest, squares, ds, ks, full, free, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    copied = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        item = item_of(tile, total)
        first, start, used, _ = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = keys_seen(first, used, used, 0, BLOCK_M, True, False)
        square = first_square(records, item, heads, start, first // 64, longest, squares)
        for j in range(copies(begin, end, 64)):
            stage = copied % STAGES
            mbarrier.wait(free.index(stage), ((copied // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), k_desc.block_type.nbytes + 2 * slopes_desc.block_type.nbytes)
            load(k_desc, start, used, j * 64, item % heads * k_head, full.index(stage), ks.index(stage))
            for w in gl.static_range(2):
                # Squares that nobody needs are copies of nothing: zeros, which take no bandwidth.
                rows = gl.where((first + w * 64 < used) & (j <= first // 64 + w), 64, 0)
                load(slopes_desc, (square + w * (first // 64 + 1) + j) * rows, rows, 0, 0, full.index(stage), ds.index(stage * 2 + w))
            copied += 1


@gluon.jit
def _consume(
    dq, records, total, heads, dq_token, ds, ks, full, free,
    W: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    OUT: gl.constexpr = accumulator(D)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    columns = gl.arange(0, D, gl.SliceLayout(0, OUT))
    queries = gl.arange(0, 64, gl.SliceLayout(1, OUT))
    copied = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        first, start, used, length = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = keys_seen(first, used, used, 0, BLOCK_M, True, False)
        n = copies(begin, end, 64)
        mine = first + W * 64
        seen = gl.where(mine < used, gl.minimum(n, mine // 64 + 1), 0)
        out = gl.zeros([64, D], gl.float32, OUT)
        stage = copied % STAGES
        if seen > 0:
            mbarrier.wait(full.index(stage), (copied // STAGES) & 1)
            slopes = queries_of(ds.index(stage * 2 + W).reshape([64, 64]), OPERAND)
            acc = warpgroup_mma_init(out)
            for j in range(1, seen):
                acc = warpgroup_mma(slopes, ks.index(stage).reshape([64, D]), acc, is_async=True)
                next_stage = (copied + j) % STAGES
                mbarrier.wait(full.index(next_stage), ((copied + j) // STAGES) & 1)
                new_slopes = queries_of(ds.index(next_stage * 2 + W).reshape([64, 64]), OPERAND)
                acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
                mbarrier.arrive(free.index(stage), count=1)
                slopes = new_slopes
                stage = next_stage
            acc = warpgroup_mma(slopes, ks.index(stage).reshape([64, D]), acc, is_async=True)
            out = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(free.index(stage), count=1)
        for j in range(seen, n):
            stage = (copied + j) % STAGES
            mbarrier.wait(full.index(stage), ((copied + j) // STAGES) & 1)
            mbarrier.arrive(free.index(stage), count=1)
        copied += n
        tokens = mine + queries
        at = (start + tokens).to(gl.int64)[:, None] * dq_token + (head * D + columns)[None, :]
        gl.store(dq + at, out.to(ks.dtype), mask=(tokens < length)[:, None])


@gluon.jit(do_not_specialize=["heads", "longest", "squares"])
def query_product_kernel(
    slopes_desc, k_desc, dq, records, count, heads, k_head, dq_token, longest, squares, long,
    D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``dq`` ``[tokens, heads, D]``, heads side by side, of rows with ``long`` tokens or more, from the squares of all heads, as tokens
    ``[squares * 64, 1, 64]``."""
    ds = gl.allocate_shared_memory(slopes_desc.dtype, [2 * STAGES, 1, 1, 64, 64], slopes_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, 64, D], k_desc.layout)
    full, free = barriers(STAGES, 1), barriers(STAGES, 2)
    fence_async_shared()
    total = tiles_of_long_rows(records, gl.load(count), long) * heads
    gl.warp_specialize(
        [
            (_consume, (dq, records, total, heads, dq_token, ds, ks, full, free, 0, D, BLOCK_M, STAGES)),
            (_consume, (dq, records, total, heads, dq_token, ds, ks, full, free, 1, D, BLOCK_M, STAGES)),
            (_produce, (slopes_desc, k_desc, records, total, heads, k_head, longest, squares, ds, ks, full, free, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [160, 24],
    )  # fmt: skip
