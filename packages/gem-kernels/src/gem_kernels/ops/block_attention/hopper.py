"""Block attention on Hopper where queries and keys are turned or normed: what ``triton.py`` computes, in Gluon, which says where elements lie.

A product of the tensor cores leaves both elements of a pair in one thread. Tiles are read, changed and written in that layout, so that every thread
changes its own elements of shared memory and none are exchanged. Cosines and sines are made once for a tile of tokens; they lie in shared memory in
the same layout, and serve ``GROUP`` heads, forth and back. All operands of a head are copied at once, and gradients leave through the memory of
operands that are used up. Two programs share an SM: one computes while the other copies.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059, SIM102, SIM108

from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from gem_kernels.common.hopper.language import END, accumulator, barriers, read_tile, store
from gem_kernels.common.language import tl

ROWS = gl.constexpr(64)
"""Tokens of a tile: one block, or several small ones."""
LOG2E = gl.constexpr(1.4426950408889634)
# 2 pi in two parts: whole turns times the first are exact up to 100,000 radians, the second is the rest.
TURN, TURN_REST, TURNS = gl.constexpr(6.28125), gl.constexpr(0.0019353071795864769), gl.constexpr(0.15915494309189535)


@gluon.constexpr_function
def halves(WIDTH):
    """Layout ``[64, WIDTH / 2]`` of the even, or odd, columns of ``accumulator(WIDTH)``."""
    columns = [[0, 4 << i] for i in range((WIDTH // 8).bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *columns], lanes, [[16, 0], [32, 0]], [], [64, WIDTH // 2])


@gluon.constexpr_function
def table(WIDTH):
    """Shared memory in which eight rows of a pair of columns lie in banks of their own."""
    return gl.SwizzledSharedLayout(8, 1, min(8, WIDTH // 8), [1, 0])


@gluon.jit
def _factors(rope, rope_token, start, first, until, WIDTH: gl.constexpr):
    """Cosine and sine of each angle side by side, float32 ``[64, WIDTH]``, by the special function unit after reduction to [-pi, pi]: 2e-6 off."""
    HALVES: gl.constexpr = halves(WIDTH)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, HALVES)) + first
    c = gl.arange(0, WIDTH // 2, gl.SliceLayout(0, HALVES))
    places = (r.to(gl.int64) + start) * rope_token
    angles = gl.load(rope + places[:, None] + c[None, :], mask=(r < until)[:, None], other=0.0)
    turns = gl.floor(angles * TURNS + 0.5)
    reduced = (angles - turns * TURN) - turns * TURN_REST
    cos = gl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [reduced], dtype=gl.float32, is_pure=True, pack=1)
    sin = gl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [reduced], dtype=gl.float32, is_pure=True, pack=1)
    return gl.convert_layout(gl.join(cos, sin).reshape([ROWS, WIDTH]), accumulator(WIDTH), assert_trivial=True)


@gluon.jit
def _turn(x, factors, SIGN: gl.constexpr, WIDTH: gl.constexpr):
    """Turn interleaved pairs of ``x``, float32 ``[64, WIDTH]``, forth (``SIGN`` 1) or back (-1)."""
    even, odd = gl.split(x.reshape([ROWS, WIDTH // 2, 2]))
    cos, sin = gl.split(factors.reshape([ROWS, WIDTH // 2, 2]))
    if SIGN < 0:
        turned = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    else:
        turned = gl.join(even * cos - odd * sin, odd * cos + even * sin)
    return gl.convert_layout(turned.reshape([ROWS, WIDTH]), accumulator(WIDTH), assert_trivial=True)


@gluon.jit
def _turns(factors, ROPE: gl.constexpr, WIDTH: gl.constexpr):
    """What ``_factors`` made, back from shared memory; zeros, which nobody reads, where nothing is turned."""
    turns = gl.zeros([ROWS, WIDTH], gl.float32, accumulator(WIDTH))
    if ROPE:
        turns = factors.load(accumulator(WIDTH))
    return turns


@gluon.jit
def _ready(tile, gain, turns, eps, NORM: gl.constexpr, ROPE: gl.constexpr, WIDTH: gl.constexpr):
    """Change a tile in shared memory to what enters the products: over its rows' root mean squares and times the gain, turned; rounded once."""
    LAYOUT: gl.constexpr = accumulator(WIDTH)
    x = tile.load(LAYOUT).to(gl.float32)
    if NORM:
        x *= (1.0 / gl.sqrt(gl.sum(x * x, 1) * (1.0 / WIDTH) + eps))[:, None]
        x *= gl.load(gain + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))).to(gl.float32)[None, :]
    if ROPE:
        x = _turn(x, turns, 1, WIDTH)
    tile.store(x.to(tile.dtype))


@gluon.jit
def _leave(tile, grad, factors, ROPE: gl.constexpr, WIDTH: gl.constexpr):
    """Write a gradient, turned back, over the operand that is used up."""
    if ROPE:
        grad = _turn(grad, _turns(factors, ROPE, WIDTH), -1, WIDTH)
    tile.store(grad.to(tile.dtype))
    fence_async_shared()


@gluon.jit
def _weights(s, count, scale, BLOCK: gl.constexpr):
    """Softmax weights ``[64, 64]`` of the first ``count`` tokens; zeros elsewhere."""
    SCORES: gl.constexpr = accumulator(ROWS)
    i = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    j = gl.arange(0, ROWS, gl.SliceLayout(0, SCORES))
    visible = (j < count)[None, :]
    if BLOCK < ROWS:
        visible = visible & ((i // BLOCK)[:, None] == (j // BLOCK)[None, :])
    s = gl.where(visible, s * (scale * LOG2E), float("-inf"))
    m = gl.max(s, 1)
    p = gl.exp2(s - gl.where(m == float("-inf"), 0.0, m)[:, None])
    return p * gl.where(i < count, 1.0 / gl.sum(p, 1), 0.0)[:, None]


@gluon.jit
def _tile(records, total, heads, n, SPAN: gl.constexpr, GROUP: gl.constexpr):
    """This program's ``n``-th tile and head (the last one of the list past its end): the head, the row's first token, and of the tile the first token
    in the row, the end of those that are used and the end of all."""
    groups = heads // GROUP
    item = gl.minimum(gl.program_id(0) + n // GROUP * gl.num_programs(0), total - 1)
    row, first, start, used, length, k_start, k_used, k_length = read_tile(records, item, groups)
    return item % groups * GROUP + n % GROUP, start, first, gl.minimum(first + SPAN, used), gl.minimum(first + SPAN, length)


@gluon.jit
def _steps(total, GROUP: gl.constexpr):
    """How many heads of tiles this program computes."""
    return gl.maximum(total - gl.program_id(0) + gl.num_programs(0) - 1, 0) // gl.num_programs(0) * GROUP


@gluon.jit
def _copy(desc, start, first, until, column, full, tile, wanted):
    """Where it is wanted, the ragged copy of the tokens ``[first, until)`` of a row into shared memory."""
    tma.async_copy_global_to_shared(desc, [END, start + until, END - until + first, column], full, tile, pred=wanted)


@gluon.jit(do_not_specialize=["heads"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, rope, q_gain, k_gain, records, count, heads, scale, eps, q_head, k_head, v_head, rope_token,
    D: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, ROPE: gl.constexpr, ROPE_V: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """A program takes every ``num_programs``-th tile of the list, ``GROUP`` heads each. ``out`` is contiguous."""
    OUT: gl.constexpr = accumulator(V)
    q_tile = gl.allocate_shared_memory(q_desc.dtype, [1, 1, ROWS, D], q_desc.layout)
    k_tile = gl.allocate_shared_memory(k_desc.dtype, [1, 1, ROWS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [1, 1, ROWS, V], v_desc.layout)
    out_tile = gl.allocate_shared_memory(out_desc.dtype, [1, 1, ROWS, V], out_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS, D], table(D))
    full, v_full = barriers(1, 1).index(0), barriers(1, 1).index(0)
    fence_async_shared()
    q, k, v = q_tile.reshape([ROWS, D]), k_tile.reshape([ROWS, D]), v_tile.reshape([ROWS, V])
    no_scores = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    no_values = gl.zeros([ROWS, V], gl.float32, OUT)
    BYTES: gl.constexpr = q_desc.block_type.nbytes + k_desc.block_type.nbytes
    total = gl.load(count) * (heads // GROUP)
    steps = _steps(total, GROUP)
    head, start, first, until, end = _tile(records, total, heads, 0, SPAN, GROUP)
    mbarrier.expect(full, BYTES, pred=steps > 0)
    _copy(q_desc, start, first, until, head * q_head, full, q_tile, steps > 0)
    _copy(k_desc, start, first, until, head * k_head, full, k_tile, steps > 0)
    mbarrier.expect(v_full, v_desc.block_type.nbytes, pred=steps > 0)
    _copy(v_desc, start, first, until, head * v_head, v_full, v_tile, steps > 0)
    for n in range(steps):
        next_head, next_start, next_first, next_until, next_end = _tile(records, total, heads, n + 1, SPAN, GROUP)
        more = n + 1 < steps
        if ROPE:
            if n % GROUP == 0:
                factors.store(_factors(rope, rope_token, start, first, until, D))
        mbarrier.wait(full, n & 1)
        turns = _turns(factors, ROPE, D)
        _ready(q, q_gain, turns, eps, NORM, ROPE, D)
        _ready(k, k_gain, turns, eps, NORM, ROPE, D)
        if ROPE_V:
            mbarrier.wait(v_full, n & 1)
            _ready(v, q_gain, turns, eps, False, True, V)
        fence_async_shared()
        s = warpgroup_mma(q, k.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        tl.debug_barrier()  # all warps are through with the product before its operands go
        mbarrier.expect(full, BYTES, pred=more)
        _copy(q_desc, next_start, next_first, next_until, next_head * q_head, full, q_tile, more)
        _copy(k_desc, next_start, next_first, next_until, next_head * k_head, full, k_tile, more)
        p = gl.convert_layout(_weights(s, until - first, scale, BLOCK).to(v.dtype), gl.DotOperandLayout(0, OUT, 2))
        if not ROPE_V:
            mbarrier.wait(v_full, n & 1)
        o = warpgroup_mma(p, v, no_values, use_acc=False, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        tl.debug_barrier()
        mbarrier.expect(v_full, v_desc.block_type.nbytes, pred=more)
        _copy(v_desc, next_start, next_first, next_until, next_head * v_head, v_full, v_tile, more)
        tma.store_wait(0)
        tl.debug_barrier()
        out_tile.reshape([ROWS, V]).store(o.to(v.dtype))
        fence_async_shared()
        store(out_desc, start, end, first, head * V, out_tile)
        head, start, first, until, end = next_head, next_start, next_first, next_until, next_end
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, dk_desc, dv_desc, rope, q_gain, k_gain, records, count, heads, scale, eps, q_head, k_head, v_head,
    rope_token,
    D: gl.constexpr, V: gl.constexpr, BLOCK: gl.constexpr, SPAN: gl.constexpr, GROUP: gl.constexpr, ROPE: gl.constexpr, ROPE_V: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``; ``dout`` is contiguous, as are the heads of a token in gradients. With norms, dq and dk are of the normed heads."""
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], q_desc.dtype)
    q_tile = gl.allocate_shared_memory(q_desc.dtype, [1, 1, ROWS, D], q_desc.layout)
    k_tile = gl.allocate_shared_memory(k_desc.dtype, [1, 1, ROWS, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [1, 1, ROWS, V], v_desc.layout)
    do_tile = gl.allocate_shared_memory(dout_desc.dtype, [1, 1, ROWS, V], dout_desc.layout)
    weights = gl.allocate_shared_memory(q_desc.dtype, [ROWS, ROWS], WEIGHTS)
    slopes = gl.allocate_shared_memory(q_desc.dtype, [ROWS, ROWS], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [ROWS, D], table(D))
    full = barriers(1, 1).index(0)
    fence_async_shared()
    q, k, v, do = q_tile.reshape([ROWS, D]), k_tile.reshape([ROWS, D]), v_tile.reshape([ROWS, V]), do_tile.reshape([ROWS, V])
    no_scores = gl.zeros([ROWS, ROWS], gl.float32, accumulator(ROWS))
    no_heads = gl.zeros([ROWS, D], gl.float32, accumulator(D))
    no_values = gl.zeros([ROWS, V], gl.float32, accumulator(V))
    BYTES: gl.constexpr = q_desc.block_type.nbytes + k_desc.block_type.nbytes + v_desc.block_type.nbytes + dout_desc.block_type.nbytes
    total = gl.load(count) * (heads // GROUP)
    steps = _steps(total, GROUP)
    head, start, first, until, end = _tile(records, total, heads, 0, SPAN, GROUP)
    mbarrier.expect(full, BYTES, pred=steps > 0)
    _copy(q_desc, start, first, until, head * q_head, full, q_tile, steps > 0)
    _copy(k_desc, start, first, until, head * k_head, full, k_tile, steps > 0)
    _copy(v_desc, start, first, until, head * v_head, full, v_tile, steps > 0)
    _copy(dout_desc, start, first, until, head * V, full, do_tile, steps > 0)
    for n in range(steps):
        next_head, next_start, next_first, next_until, next_end = _tile(records, total, heads, n + 1, SPAN, GROUP)
        more = n + 1 < steps
        if ROPE:
            if n % GROUP == 0:
                factors.store(_factors(rope, rope_token, start, first, until, D))
        mbarrier.wait(full, n & 1)
        turns = _turns(factors, ROPE, D)
        _ready(q, q_gain, turns, eps, NORM, ROPE, D)
        _ready(k, k_gain, turns, eps, NORM, ROPE, D)
        if ROPE_V:
            _ready(v, q_gain, turns, eps, False, True, V)
        fence_async_shared()
        s = warpgroup_mma(q, k.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        dp = warpgroup_mma(do, v.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        p = _weights(s, until - first, scale, BLOCK)
        weights.store(p.to(q.dtype))
        dp = warpgroup_mma_wait(0, deps=[dp])
        slopes.store((p * (dp - gl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype))
        fence_async_shared()
        tl.debug_barrier()  # all warps are through with a product before its operands go, here and below
        mbarrier.expect(full, BYTES, pred=more)
        _copy(v_desc, next_start, next_first, next_until, next_head * v_head, full, v_tile, more)
        dv = warpgroup_mma(weights.permute([1, 0]), do, no_values, use_acc=False, is_async=True)
        dq = warpgroup_mma(slopes, k, no_heads, use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv])
        tl.debug_barrier()
        _leave(do, dv, factors, ROPE_V, V)
        store(dv_desc, start, end, first, head * V, do_tile)
        dq = warpgroup_mma_wait(0, deps=[dq])
        tl.debug_barrier()
        dk = warpgroup_mma(slopes.permute([1, 0]), q, no_heads, use_acc=False, is_async=True)
        _leave(k, dq, factors, ROPE, D)
        store(dq_desc, start, end, first, head * D, k_tile)
        dk = warpgroup_mma_wait(0, deps=[dk])
        tl.debug_barrier()
        _leave(q, dk, factors, ROPE, D)
        store(dk_desc, start, end, first, head * D, q_tile)
        tma.store_wait(0)
        tl.debug_barrier()
        _copy(q_desc, next_start, next_first, next_until, next_head * q_head, full, q_tile, more)
        _copy(k_desc, next_start, next_first, next_until, next_head * k_head, full, k_tile, more)
        _copy(dout_desc, next_start, next_first, next_until, next_head * V, full, do_tile, more)
        head, start, first, until, end = next_head, next_start, next_first, next_until, next_end
