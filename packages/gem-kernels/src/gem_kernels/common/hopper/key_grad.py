"""Gradients of keys and values on Hopper: two warpgroups keep half a tile of keys each, and one producer warp copies blocks of queries past them.

Scores are kept transposed, ``[keys, queries]``: weights and their gradients enter the last two products straight from registers. The query heads of a
key head follow each other and are added in registers, in head order.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and count in loops as the compiler can.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059, SIM113

from gem_kernels.common.hopper.gates import finish, finish_slopes, slopes_of, weights_of
from gem_kernels.common.hopper.gluon import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, load, queries_seeing, read_tile, release, store


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, lse, delta, records, total, kv_heads, out_tokens, q_head, k_head, v_head, window, qs, dos, ks, vs, sums, deltas,
    q_full, do_full, q_free, k_full, k_free, GROUP: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    lanes = gl.arange(0, BLOCK_M, gl.BlockedLayout([1], [32], [1], [0]))
    copied = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), kv_heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), kv_heads)
        begin, end = queries_seeing(first, q_used, k_used, window, BLOCK_N, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_M)
        do_start = row * q_used if SHARED else q_start
        for w in gl.static_range(2):
            i = first + w * (BLOCK_N // 2)
            buffer = tiles % 2 * 2 + w
            mbarrier.wait(k_free.index(buffer), ((tiles // 2) & 1) ^ 1)
            mbarrier.expect(k_full.index(buffer), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load(k_desc, k_start, k_used, i, kv_head * k_head, k_full.index(buffer), ks.index(buffer))
            load(v_desc, k_start, k_used, i, kv_head * v_head, k_full.index(buffer), vs.index(buffer))
        tiles += 1
        for j in range(n * GROUP):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            head = kv_head * GROUP + j // n
            i = begin + j % n * BLOCK_M
            mbarrier.wait(q_free.index(stage), phase ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            load(q_desc, q_start, q_used, i, head * q_head, q_full.index(stage), qs.index(stage))
            if SOFTMAX:
                # Zeros past the end of the row: with q and dout zero there, any finite statistic will do.
                statistic = head.to(gl.int64) * out_tokens + (do_start + i)
                inside = lanes + i < q_used
                async_copy.async_copy_global_to_shared(sums.index(stage), lse + statistic + lanes, mask=inside)
                async_copy.async_copy_global_to_shared(deltas.index(stage), delta + statistic + lanes, mask=inside)
                async_copy.mbarrier_arrive(do_full.index(stage))
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            load(do_desc, do_start, q_used, i, head * V, do_full.index(stage), dos.index(stage))
            copied += 1


@gluon.jit
def _add(
    s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, sums, deltas, positions, keys, k_used, window, scale,
    D: gl.constexpr, V: gl.constexpr, ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Start adding what one block of queries gives: the weights are made while the tensor cores multiply ``v doᵀ``, its slopes while they add dv."""
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    kind: gl.constexpr = q_tile.dtype
    dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator(q_tile.shape[0]))
    if SOFTMAX:
        g = s * scale
        if CAUSAL or WINDOW:
            g = hide(g, positions[None, :], keys[:, None], k_used, window, CAUSAL, WINDOW, float("-inf"))
        g = gl.exp2(g - sums.load(COLUMNS)[None, :])
        p = g
    else:
        p = weights_of(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
        g = slopes_of(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
        if CAUSAL or WINDOW:
            p = hide(p, positions[None, :], keys[:, None], k_used, window, CAUSAL, WINDOW, 0.0)
            g = hide(g, positions[None, :], keys[:, None], k_used, window, CAUSAL, WINDOW, 0.0)
    weights = gl.convert_layout(p.to(kind), gl.DotOperandLayout(0, accumulator(V), 2))
    dv_acc = warpgroup_mma(weights, do_tile, dv_acc, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if SOFTMAX:
        dp = dp - deltas.load(COLUMNS)[None, :]
    slopes = gl.convert_layout((g * dp).to(kind), gl.DotOperandLayout(0, accumulator(D), 2))
    dk_acc = warpgroup_mma(slopes, q_tile, dk_acc, is_async=True)
    return dv_acc, dk_acc


@gluon.jit
def _consume(
    dk_desc, dv_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, sums, deltas, q_full, do_full, q_free, k_full, k_free,
    W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = accumulator(BLOCK_M)
    KEYS: gl.constexpr = accumulator(D)
    VALUES: gl.constexpr = accumulator(V)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    kind: gl.constexpr = qs.dtype
    kv_heads = heads // GROUP
    lanes = gl.arange(0, N, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([N, BLOCK_M], gl.float32, SCORES)
    copied = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), kv_heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), kv_heads)
        begin, end = queries_seeing(first, q_used, k_used, window, BLOCK_N, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_M)
        mine = first + W * N
        keys = lanes + mine
        dk = gl.zeros([N, D], gl.float32, KEYS)
        dv = gl.zeros([N, V], gl.float32, VALUES)
        buffer = tiles % 2 * 2 + W
        k_tile = ks.index(buffer).reshape([N, D])
        v_tile = vs.index(buffer).reshape([N, V])
        mbarrier.wait(k_full.index(buffer), (tiles // 2) & 1)
        if (mine < k_used) & (n > 0):
            dk_acc = warpgroup_mma_init(dk)
            dv_acc = warpgroup_mma_init(dv)
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k_tile, qs.index(stage).reshape([BLOCK_M, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            release(k_free, 2 - tiles % 2 * 2 + W, tiles > 0)
            last = n * GROUP - 1
            for j in range(last):
                positions = columns + (begin + j % n * BLOCK_M + k_used - q_used)
                mbarrier.wait(do_full.index(stage), phase)
                do_tile = dos.index(stage).reshape([BLOCK_M, V])
                q_tile = qs.index(stage).reshape([BLOCK_M, D])
                dv_acc, dk_acc = _add(
                    s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, sums.index(stage), deltas.index(stage), positions, keys,
                    k_used, window, scale, D, V, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW,
                )  # fmt: skip
                next_stage = (copied + j + 1) % STAGES
                phase = ((copied + j + 1) // STAGES) & 1
                mbarrier.wait(q_full.index(next_stage), phase)
                s = warpgroup_mma(k_tile, qs.index(next_stage).reshape([BLOCK_M, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
                s, dk, dv = warpgroup_mma_wait(0, deps=[s, dk_acc, dv_acc])
                mbarrier.arrive(q_free.index(stage), count=1)
                dk_acc = warpgroup_mma_init(dk)
                dv_acc = warpgroup_mma_init(dv)
                stage = next_stage
            positions = columns + (begin + last % n * BLOCK_M + k_used - q_used)
            mbarrier.wait(do_full.index(stage), phase)
            do_tile = dos.index(stage).reshape([BLOCK_M, V])
            q_tile = qs.index(stage).reshape([BLOCK_M, D])
            dv_acc, dk_acc = _add(
                s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, sums.index(stage), deltas.index(stage), positions, keys,
                k_used, window, scale, D, V, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW,
            )  # fmt: skip
            dk, dv = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
            mbarrier.arrive(q_free.index(stage), count=1)
            dk = finish_slopes(dk, factor, ACTIVATION)
            dv = finish(dv, factor, ACTIVATION, SCALE_AFTER)
            if SOFTMAX:
                # Keys past the last one used have weights here, which nothing else cancels.
                dk = gl.where((gl.convert_layout(lanes, gl.SliceLayout(1, KEYS)) + mine < k_used)[:, None], dk, 0.0)
                dv = gl.where((gl.convert_layout(lanes, gl.SliceLayout(1, VALUES)) + mine < k_used)[:, None], dv, 0.0)
        else:
            release(k_free, 2 - tiles % 2 * 2 + W, tiles > 0)
            for j in range(n * GROUP):
                stage = (copied + j) % STAGES
                phase = ((copied + j) // STAGES) & 1
                mbarrier.wait(q_full.index(stage), phase)
                mbarrier.wait(do_full.index(stage), phase)
                mbarrier.arrive(q_free.index(stage), count=1)
        copied += n * GROUP
        tiles += 1
        # The gradients leave through the memory of their keys and values, which is released during the next tile.
        k_tile.store(dk.to(kind))
        v_tile.store(dv.to(kind))
        fence_async_shared()
        store(dk_desc, k_start, k_length, mine, kv_head * D, ks.index(buffer))
        store(dv_desc, k_start, k_length, mine, kv_head * V, vs.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "out_tokens", "window"])
def key_grad_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse, delta, records, count, heads, out_tokens, scale, factor, window, q_head, k_head, v_head,
    GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Softmax takes ``scale`` times log2 e; ``factor`` is what the sums are multiplied by at the end."""
    qs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK_M, V], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [4, 1, 1, BLOCK_N // 2, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [4, 1, 1, BLOCK_N // 2, V], v_desc.layout)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    statistics: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics)
    q_full, do_full, q_free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    k_full, k_free = barriers(4, 1), barriers(4, 1)
    fence_async_shared()
    kv_heads = heads // GROUP
    total = gl.load(count) * kv_heads
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, sums, deltas,
                        q_full, do_full, q_free, k_full, k_free,
                        0, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW)),
            (_consume, (dk_desc, dv_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, sums, deltas,
                        q_full, do_full, q_free, k_full, k_free,
                        1, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, lse, delta, records, total, kv_heads, out_tokens, q_head, k_head, v_head, window,
                        qs, dos, ks, vs, sums, deltas, q_full, do_full, q_free, k_full, k_free,
                        GROUP, V, BLOCK_M, BLOCK_N, STAGES, SOFTMAX, CAUSAL, WINDOW, SHARED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
