"""All gradients on Hopper in one pass over the keys: five products a pair of blocks, where a pass over queries and one over keys take seven.

Two warpgroups keep half a tile of 128 keys each, and one producer warp copies blocks of 64 queries past them. Scores are kept transposed, ``[keys,
queries]``: weights and slopes enter the products for dv and dk straight from registers. The gradient of a block of queries needs the slopes of all
128 keys, which the warpgroups leave to each other in shared memory; each computes half of its columns, one block late, so that neither waits for the
other, and the copy engine adds it to float32 memory. There the sums of a block meet in any order: their last bits differ from run to run.

The sums are kept in the order of the registers that hold a product, ``[blocks of 64 queries, heads, 2 halves of the columns, 4096]``.
"""

# Kernels are compiled from their source: they carry no types and read records whole.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059

from gem_kernels.common.hopper.gates import slopes_of, weights_of
from gem_kernels.common.hopper.gluon import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    thread_barrier,
    tma,
    tma_add,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from gem_kernels.common.hopper.items import item_of, items_here
from gem_kernels.common.hopper.language import accumulator, barriers, copies, load, queries_seeing, read_tile, store

SLOPES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
REGISTERS = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
"""4,096 values as memory holds them: 16 bytes a thread, 512 a warp."""


SUMS = (128, 32)
"""Half of the columns of a block of 64 queries, as the copy engine adds it."""


@gluon.jit
def _to_memory_order(x):
    """``[64, 64]`` as one warpgroup holds a product, as ``[4096]`` in ``REGISTERS``: nothing moves."""
    x = x.reshape([4, 2, 8, 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([4096])
    return gl.convert_layout(x, REGISTERS, assert_trivial=True)


@gluon.jit
def _from_memory_order(x, LAYOUT: gl.constexpr):
    """The other way."""
    x = x.reshape([8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 64])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, lse, delta, records, total, heads, tokens, q_head, k_head, v_head, qs, dos, ks, vs, lses, deltas,
    q_full, do_full, q_free, k_full, k_free, v_full, v_free, D: gl.constexpr, STAGES: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    lanes = gl.arange(0, 64, gl.BlockedLayout([1], [32], [1], [0]))
    copied = 0
    upcoming = read_tile(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, item_of(tile + 1, total), heads)
        begin, end = queries_seeing(first, q_used, k_used, 0, 128, CAUSAL, False)
        for w in gl.static_range(2):
            mbarrier.wait(v_free.index(w), (tile & 1) ^ 1)
            mbarrier.expect(v_full.index(w), v_desc.block_type.nbytes)
            load(v_desc, k_start, k_used, first + w * 64, head * v_head, v_full.index(w), vs.index(w))
        mbarrier.wait(k_free.index(0), (tile & 1) ^ 1)
        mbarrier.expect(k_full.index(0), 2 * k_desc.block_type.nbytes)
        for w in gl.static_range(2):
            load(k_desc, k_start, k_used, first + w * 64, head * k_head, k_full.index(0), ks.index(w))
        for j in range(copies(begin, end, 64)):
            stage = copied % STAGES
            i = begin + j * 64
            mbarrier.wait(q_free.index(stage), ((copied // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            load(q_desc, q_start, q_used, i, head * q_head, q_full.index(stage), qs.index(stage))
            if SOFTMAX:
                # Zeros past the end of the row: with q and dout zero there, any finite statistic will do.
                statistic = head.to(gl.int64) * tokens + (q_start + i)
                inside = lanes + i < q_used
                async_copy.async_copy_global_to_shared(lses.index(stage), lse + statistic + lanes, mask=inside)
                async_copy.async_copy_global_to_shared(deltas.index(stage), delta + statistic + lanes, mask=inside)
                async_copy.mbarrier_arrive(do_full.index(stage))
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            load(do_desc, q_start, q_used, i, head * D, do_full.index(stage), dos.index(stage))
            copied += 1


@gluon.jit
def _seen():
    """Which keys of a block ``[keys, queries]`` on the diagonal are seen."""
    keys = gl.arange(0, 64, gl.SliceLayout(1, accumulator(64)))
    queries = gl.arange(0, 64, gl.SliceLayout(0, accumulator(64)))
    return keys[:, None] <= queries[None, :]


@gluon.jit
def _slot(slopes, w, slot):
    """Slopes ``[64 keys, 64 queries]`` of a warpgroup; each has two."""
    return slopes.index(w)._reinterpret(slopes.dtype, [2, 64, 64], SLOPES).index(slot)


@gluon.jit
def _hand_over(slopes, ds, full, free, phase):
    """Leave slopes ``[keys, queries]`` to both warpgroups."""
    mbarrier.wait(free, phase ^ 1)
    slopes.store(ds)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _query_sums(slopes, ks, block, ds_full, W: gl.constexpr, D: gl.constexpr):
    """Start this warpgroup's half of the columns of the gradient of a block of queries."""
    HALF: gl.constexpr = D // 2
    slot = block & 1
    mbarrier.wait(ds_full.index(slot), (block // 2) & 1)
    nothing = gl.zeros([64, HALF], gl.float32, accumulator(HALF))
    left = ks.index(0).reshape([64, D]).slice(W * HALF, HALF, dim=1)
    right = ks.index(1).reshape([64, D]).slice(W * HALF, HALF, dim=1)
    dq = warpgroup_mma(_slot(slopes, 0, slot).permute([1, 0]), left, nothing, use_acc=False, is_async=True)
    return warpgroup_mma(_slot(slopes, 1, slot).permute([1, 0]), right, dq, is_async=True)


@gluon.jit
def _add_sums(sums_desc, staged, dq, place):
    """Have the copy engine add a gradient to memory."""
    tma.store_wait(0)
    staged.store(_to_memory_order(dq).reshape([128, 32]))
    fence_async_shared()
    tma_add(sums_desc, [place, 0, 0], staged.reshape([1, 128, 32]))


@gluon.jit
def _block(
    s, dk, dv, sums_desc, place, stride, scale, qs, dos, ks, vs, lses, deltas, slopes, staged,
    q_full, do_full, q_free, ds_full, ds_free, turn, turns, block, after,
    W: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, AFTER: gl.constexpr, FIRST: gl.constexpr,
    TRIANGLE: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    """Add what block number ``block`` of queries gives to dk and dv, and the gradient of the block before to memory."""
    kind: gl.constexpr = qs.dtype
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator(64))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    nothing = gl.zeros([64, 64], gl.float32, accumulator(64))
    stage = block % STAGES
    phase = (block // STAGES) & 1
    slot = block & 1
    q_tile = qs.index(stage).reshape([64, D])
    do_tile = dos.index(stage).reshape([64, D])
    k_tile = ks.index(W).reshape([64, D])
    if not AHEAD:
        mbarrier.wait(q_full.index(stage), phase)
        s = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    dp = warpgroup_mma(vs.index(W).reshape([64, D]), do_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=[s])
    if SOFTMAX:
        g = s * scale
        if TRIANGLE:
            g = gl.where(_seen(), g, float("-inf"))
        g = gl.exp2(g - lses.index(stage).load(COLUMNS)[None, :])
        p = g
    else:
        if TRIANGLE:
            s = gl.where(_seen(), s, 0.0)
        p = weights_of(s, 1.0 if AFTER else scale, ACTIVATION)
        g = slopes_of(s, 1.0 if AFTER else scale, ACTIVATION)
        if TRIANGLE:
            g = gl.where(_seen(), g, 0.0)
    weights = gl.convert_layout(p.to(kind), OPERAND)
    dv_acc = warpgroup_mma(weights, do_tile, warpgroup_mma_init(dv), use_acc=not FIRST, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if SOFTMAX:
        dp = dp - deltas.index(stage).load(COLUMNS)[None, :]
    ds = (g * dp).to(kind)
    _hand_over(_slot(slopes, W, slot), ds, ds_full.index(slot), ds_free.index(slot), (block // 2) & 1)
    if TURN:
        mbarrier.wait(turn.index(W), turns & 1)
    if LAG:
        dq = _query_sums(slopes, ks, block - 1, ds_full, W, D)
    dk_acc = warpgroup_mma(gl.convert_layout(ds, OPERAND), q_tile, warpgroup_mma_init(dk), use_acc=not FIRST, is_async=True)
    if TURN:
        mbarrier.arrive(turn.index(1 - W), count=1)
    if LAG:
        dv, dq = warpgroup_mma_wait(1, deps=[dv_acc, dq])
        mbarrier.arrive(ds_free.index(1 - slot), count=1)
        _add_sums(sums_desc, staged, dq, place - stride)
    else:
        dv = warpgroup_mma_wait(1, deps=[dv_acc])
    if AHEAD:
        mbarrier.wait(q_full.index(after % STAGES), (after // STAGES) & 1)
        next_q = qs.index(after % STAGES).reshape([64, D])
        s = warpgroup_mma(k_tile, next_q.permute([1, 0]), nothing, use_acc=False, is_async=True)
        s, dk = warpgroup_mma_wait(0, deps=[s, dk_acc])
    else:
        dk = warpgroup_mma_wait(0, deps=[dk_acc])
    mbarrier.arrive(q_free.index(stage), count=1)
    return s, dk, dv


@gluon.jit
def _consume(
    dk_desc, dv_desc, sums_desc, records, total, heads, scale, k_factor, v_factor, qs, dos, ks, vs, lses, deltas, slopes, staged,
    q_full, do_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, turn,
    W: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, AFTER: gl.constexpr, CAUSAL: gl.constexpr,
    AHEAD: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    kind: gl.constexpr = qs.dtype
    OUT: gl.constexpr = accumulator(D)
    SKIP: gl.constexpr = 1 if CAUSAL and W == 1 else 0
    copied = 0
    turns = 0
    stride = 2 * heads
    upcoming = read_tile(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, item_of(tile + 1, total), heads)
        begin, end = queries_seeing(first, q_used, k_used, 0, 128, CAUSAL, False)
        n = copies(begin, end, 64)
        # The sums of a row start at a block that no row before it reaches.
        place = ((q_start // 64 + row + begin // 64) * heads + head) * 2 + W
        mbarrier.wait(v_full.index(W), tile & 1)
        mbarrier.wait(k_full.index(0), tile & 1)
        dk = gl.zeros([64, D], gl.float32, OUT)
        dv = gl.zeros([64, D], gl.float32, OUT)
        # The results of the tile before leave through the memory of slopes.
        tma.store_wait(0)
        if n > 0:
            if SKIP == 1:
                # The second half of the keys sees nothing of the first block.
                stage = copied % STAGES
                slot = copied & 1
                none = gl.zeros([64, 64], kind, accumulator(64))
                _hand_over(_slot(slopes, W, slot), none, ds_full.index(slot), ds_free.index(slot), (copied // 2) & 1)
                mbarrier.wait(q_full.index(stage), (copied // STAGES) & 1)
                mbarrier.wait(do_full.index(stage), (copied // STAGES) & 1)
                mbarrier.arrive(q_free.index(stage), count=1)
                if TURN:
                    mbarrier.wait(turn.index(W), turns & 1)
                    mbarrier.arrive(turn.index(1 - W), count=1)
                    turns += 1
            if n > SKIP:
                last = copied + n - 1
                s = gl.zeros([64, 64], gl.float32, accumulator(64))
                if AHEAD:
                    stage = (copied + SKIP) % STAGES
                    mbarrier.wait(q_full.index(stage), ((copied + SKIP) // STAGES) & 1)
                    q_tile = qs.index(stage).reshape([64, D])
                    s = warpgroup_mma(ks.index(W).reshape([64, D]), q_tile.permute([1, 0]), s, use_acc=False, is_async=True)
                    s = warpgroup_mma_wait(0, deps=[s])
                s, dk, dv = _block(
                    s, dk, dv, sums_desc, place + stride * SKIP, stride, scale, qs, dos, ks, vs, lses, deltas, slopes, staged,
                    q_full, do_full, q_free, ds_full, ds_free, turn, turns, copied + SKIP, gl.minimum(copied + SKIP + 1, last),
                    W, D, STAGES, ACTIVATION, AFTER, True, CAUSAL, SKIP == 1, AHEAD, TURN,
                )  # fmt: skip
                turns += 1
                for j in range(SKIP + 1, n):
                    s, dk, dv = _block(
                        s, dk, dv, sums_desc, place + stride * j, stride, scale, qs, dos, ks, vs, lses, deltas, slopes, staged,
                        q_full, do_full, q_free, ds_full, ds_free, turn, turns, copied + j, gl.minimum(copied + j + 1, last),
                        W, D, STAGES, ACTIVATION, AFTER, False, False, True, AHEAD, TURN,
                    )  # fmt: skip
                    turns += 1
            last = copied + n - 1
            dq = warpgroup_mma_wait(0, deps=[_query_sums(slopes, ks, last, ds_full, W, D)])
            mbarrier.arrive(ds_free.index(last & 1), count=1)
            _add_sums(sums_desc, staged, dq, place + stride * (n - 1))
            mbarrier.wait(ds_free.index(last & 1), (last // 2) & 1)
        mbarrier.arrive(v_free.index(W), count=1)
        mbarrier.arrive(k_free.index(0), count=1)
        copied += n
        if ACTIVATION == "softmax":
            # Keys past the last one used have weights here, which nothing else cancels.
            used = gl.arange(0, 64, gl.SliceLayout(1, OUT)) + (first + W * 64) < k_used
            dk = gl.where(used[:, None], dk, 0.0)
            dv = gl.where(used[:, None], dv, 0.0)
        # The gradients leave through the memory of slopes, which both warpgroups have read, and of sums.
        dk_tile = slopes.index(W)._reinterpret(kind, [1, 1, 64, D], dk_desc.layout)
        dk_tile.reshape([64, D]).store((dk * k_factor).to(kind))
        tma.store_wait(0)
        dv_tile = staged._reinterpret(kind, [1, 1, 64, D], dv_desc.layout)
        dv_tile.reshape([64, D]).store((dv * v_factor).to(kind))
        fence_async_shared()
        store(dk_desc, k_start, k_length, first + W * 64, head * D, dk_tile)
        store(dv_desc, k_start, k_length, first + W * 64, head * D, dv_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "tokens"])
def all_grads_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, sums_desc, lse, delta, records, count, heads, tokens, scale, k_factor, v_factor,
    q_head, k_head, v_head,
    D: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, AFTER: gl.constexpr, CAUSAL: gl.constexpr,
    AHEAD: gl.constexpr, TURN: gl.constexpr,
):  # fmt: skip
    qs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, 64, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, 64, D], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [2, 1, 1, 64, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [2, 1, 1, 64, D], v_desc.layout)
    staged = gl.allocate_shared_memory(gl.float32, [2, 128, 32], gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
    slopes = gl.allocate_shared_memory(q_desc.dtype, [2, 128, 64], SLOPES)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    statistics: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, 64], statistics)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 64], statistics)
    q_full, do_full, q_free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    k_full, k_free = barriers(1, 1), barriers(1, 2)
    v_full, v_free = barriers(2, 1), barriers(2, 1)
    ds_full, ds_free = barriers(2, 2), barriers(2, 2)
    turn = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    total = gl.load(count) * heads
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, sums_desc, records, total, heads, scale, k_factor, v_factor, qs, dos, ks, vs, lses, deltas, slopes,
                        staged.index(0),
                        q_full, do_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, turn,
                        0, D, STAGES, ACTIVATION, AFTER, CAUSAL, AHEAD, TURN)),
            (_consume, (dk_desc, dv_desc, sums_desc, records, total, heads, scale, k_factor, v_factor, qs, dos, ks, vs, lses, deltas, slopes,
                        staged.index(1),
                        q_full, do_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, turn,
                        1, D, STAGES, ACTIVATION, AFTER, CAUSAL, AHEAD, TURN)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, lse, delta, records, total, heads, tokens, q_head, k_head, v_head, qs, dos, ks, vs,
                        lses, deltas, q_full, do_full, q_free, k_full, k_free, v_full, v_free, D, STAGES, SOFTMAX, CAUSAL)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["heads"])
def query_sums_kernel(dq_desc, sums, records, count, heads, factor, D: gl.constexpr):
    """Write ``dq`` from the sums of ``all_grads_kernel``: an item is a tile of 128 queries and a head."""
    HALF: gl.constexpr = D // 2
    QUERIES: gl.constexpr = accumulator(HALF)
    dqs = gl.allocate_shared_memory(dq_desc.dtype, [4, 1, 1, 64, HALF], dq_desc.layout)
    total = gl.load(count) * heads
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = read_tile(records, item, heads)
        tma.store_wait(0)
        for w in gl.static_range(4):
            i = first + w // 2 * 64
            place = (((q_start // 64 + row + i // 64).to(gl.int64) * heads + head) * 2 + w % 2) * 4096
            # Nothing was added for a block that is not used.
            some = (i < q_used) & (k_used > 0)
            x = gl.load(sums + gl.where(some, place, 0) + gl.arange(0, 4096, REGISTERS))
            x = x * gl.where(some, factor, 0.0)
            dqs.index(w).reshape([64, HALF]).store(_from_memory_order(x, QUERIES).to(dqs.dtype))
        fence_async_shared()
        for w in gl.static_range(4):
            store(dq_desc, q_start, q_length, first + w // 2 * 64, head * D + w % 2 * HALF, dqs.index(w))
    tma.store_wait(0)
