"""Gradients of keys and values on Hopper: two warpgroups keep half a tile of keys each, and one producer warp copies blocks of queries past them.

Scores are kept transposed, ``[keys, queries]``: weights and their gradients enter the last two products straight from registers. The query heads of a
key head follow each other and are added in registers, in head order.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and count in loops as the compiler can.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059, SIM113

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gem_kernels.common.activations import activate, slope_of
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, load, queries_seeing, read_tile, store

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, records, total, kv_heads, q_head, k_head, v_head, window, qs, dos, ks, vs,
    q_full, do_full, q_free, k_full, k_free, GROUP: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    copied = 0
    tiles = 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = read_tile(records, item, kv_heads)
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
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            load(do_desc, do_start, q_used, i, head * V, do_full.index(stage), dos.index(stage))
            copied += 1


@gluon.jit
def _release(k_free, buffer, used):
    """Give back the memory through which the gradients of the tile before left."""
    tma.store_wait(0)
    mbarrier.arrive(k_free.index(buffer), count=1, pred=used)


@gluon.jit
def _add(
    s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, lse, delta, statistic, queries, keys, q_used, k_used, window, scale,
    D: gl.constexpr, V: gl.constexpr, ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Start adding what one block of queries gives: the weights are made while the tensor cores multiply ``v doᵀ``, its slopes while they add dv."""
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    kind: gl.constexpr = q_tile.dtype
    dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    positions = (queries + (k_used - q_used))[None, :]
    if SOFTMAX:
        sums = gl.load(lse + statistic + queries, mask=queries < q_used, other=float("-inf")) if TAIL else gl.load(lse + statistic + queries)
        sums = gl.where(sums == float("-inf"), float("inf"), sums * LOG2_E)
        g = s * scale
        if CAUSAL or WINDOW:
            g = hide(g, positions, keys[:, None], k_used, window, CAUSAL, WINDOW, float("-inf"))
        g = gl.exp2(g - sums[None, :])
        p = g
    else:
        x = s if SCALE_AFTER else s * scale
        p = activate(x, ACTIVATION)
        g = slope_of(x, ACTIVATION)
        if CAUSAL or WINDOW:
            p = hide(p, positions, keys[:, None], k_used, window, CAUSAL, WINDOW, 0.0)
            g = hide(g, positions, keys[:, None], k_used, window, CAUSAL, WINDOW, 0.0)
    weights = gl.convert_layout(p.to(kind), gl.DotOperandLayout(0, accumulator(V), 2))
    dv_acc = warpgroup_mma(weights, do_tile, dv_acc, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    if SOFTMAX:
        deltas = gl.load(delta + statistic + queries, mask=queries < q_used, other=0.0) if TAIL else gl.load(delta + statistic + queries)
        dp = dp - deltas[None, :]
    slopes = gl.convert_layout((g * dp).to(kind), gl.DotOperandLayout(0, accumulator(D), 2))
    dk_acc = warpgroup_mma(slopes, q_tile, dk_acc, is_async=True)
    return dv_acc, dk_acc


@gluon.jit
def _consume(
    dk_desc, dv_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, ks, vs, q_full, do_full, q_free, k_full, k_free,
    W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
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
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = read_tile(records, item, kv_heads)
        begin, end = queries_seeing(first, q_used, k_used, window, BLOCK_N, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_M)
        mine = first + W * N
        keys = lanes + mine
        out_start = row * q_used if SHARED else q_start
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
            _release(k_free, 2 - tiles % 2 * 2 + W, tiles > 0)
            last = n * GROUP - 1
            for j in range(last):
                queries = columns + (begin + j % n * BLOCK_M)
                statistic = (kv_head * GROUP + j // n).to(gl.int64) * out_tokens + out_start
                mbarrier.wait(do_full.index(stage), phase)
                do_tile = dos.index(stage).reshape([BLOCK_M, V])
                q_tile = qs.index(stage).reshape([BLOCK_M, D])
                dv_acc, dk_acc = _add(
                    s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, lse, delta, statistic, queries, keys, q_used, k_used, window, scale,
                    D, V, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, GROUP > 1,
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
            queries = columns + (begin + last % n * BLOCK_M)
            statistic = (kv_head * GROUP + last // n).to(gl.int64) * out_tokens + out_start
            mbarrier.wait(do_full.index(stage), phase)
            do_tile = dos.index(stage).reshape([BLOCK_M, V])
            q_tile = qs.index(stage).reshape([BLOCK_M, D])
            dv_acc, dk_acc = _add(
                s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, lse, delta, statistic, queries, keys, q_used, k_used, window, scale,
                D, V, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, True,
            )  # fmt: skip
            dk, dv = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
            mbarrier.arrive(q_free.index(stage), count=1)
            dk = dk * factor
            if SCALE_AFTER:
                dv = dv * factor
            if SOFTMAX:
                # Keys past the last one used have weights here, which nothing else cancels.
                dk = gl.where((gl.convert_layout(lanes, gl.SliceLayout(1, KEYS)) + mine < k_used)[:, None], dk, 0.0)
                dv = gl.where((gl.convert_layout(lanes, gl.SliceLayout(1, VALUES)) + mine < k_used)[:, None], dv, 0.0)
        else:
            _release(k_free, 2 - tiles % 2 * 2 + W, tiles > 0)
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
    q_full, do_full, q_free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    k_full, k_free = barriers(4, 1), barriers(4, 1)
    fence_async_shared()
    kv_heads = heads // GROUP
    total = gl.load(count) * kv_heads
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free,
                        0, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, SHARED)),
            (_consume, (dk_desc, dv_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free,
                        1, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, SHARED)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, records, total, kv_heads, q_head, k_head, v_head, window, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free, GROUP, V, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW, SHARED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
