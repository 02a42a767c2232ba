"""Gradient of the queries on Hopper: the plan of ``forward``, with the rows of ``dout`` beside those of q and three products a block.

For softmax ``delta``, the sum of ``dout * out`` over a head, is computed here and kept for the gradients of keys and values.
"""

# Kernels are compiled from their source: they carry no types and read records whole.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059

from gem_kernels.common.hopper.gates import finish_slopes, slopes_of
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, keys_seen, load, read_tile, store


@gluon.jit
def _produce(
    q_desc, do_desc, o_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, os, ks, vs,
    q_full, q_free, k_full, k_free, v_full, v_free, GROUP: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SOFTMAX: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    copied = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        begin, end = keys_seen(first, q_used, k_used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        if n > 0:
            for w in gl.static_range(2):
                i = first + w * (BLOCK_M // 2)
                mbarrier.wait(q_free.index(w), (tiles & 1) ^ 1)
                if SOFTMAX:
                    mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes + 2 * do_desc.block_type.nbytes)
                    load(o_desc, q_start, q_used, i, head * V, q_full.index(w), os.index(w))
                else:
                    mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
                load(q_desc, q_start, q_used, i, head * q_head, q_full.index(w), qs.index(w))
                load(do_desc, q_start, q_used, i, head * V, q_full.index(w), dos.index(w))
            tiles += 1
        for j in range(n):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            i = begin + (n - 1 - j) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            load(k_desc, k_start, k_used, i, head // GROUP * k_head, k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            load(v_desc, k_start, k_used, i, head // GROUP * v_head, v_full.index(stage), vs.index(stage))
            copied += 1


@gluon.jit
def _slopes(s, queries, keys, sums, k_used, window, scale, ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr,
            WINDOW: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """What the gradient of a weight is multiplied by: the weight for softmax, else the slope of the activation."""
    if ACTIVATION == "softmax":
        g = s * scale
        if CAUSAL or WINDOW or TAIL:
            g = hide(g, queries[:, None], keys[None, :], k_used, window, CAUSAL, WINDOW, float("-inf"))
        g = gl.exp2(g - sums[:, None])
    else:
        g = slopes_of(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
        if CAUSAL or WINDOW:
            g = hide(g, queries[:, None], keys[None, :], k_used, window, CAUSAL, WINDOW, 0.0)
    return g


@gluon.jit
def _consume(
    dq_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, os, ks, vs, dqs,
    q_full, q_free, k_full, k_free, v_full, v_free, turn,
    W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = accumulator(BLOCK_N)
    OUT: gl.constexpr = accumulator(D)
    SLOPES: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    VALUES: gl.constexpr = accumulator(V)
    kind: gl.constexpr = qs.dtype
    lanes = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
    q_tile = qs.index(W).reshape([M, D])
    do_tile = dos.index(W).reshape([M, V])
    copied = 0
    tiles = 0
    turns = 0
    upcoming = read_tile(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        begin, end = keys_seen(first, q_used, k_used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        mine = first + W * M
        queries = lanes + (mine + k_used - q_used)
        out = gl.zeros([M, D], gl.float32, OUT)
        deltas = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))
        statistic = head.to(gl.int64) * out_tokens + (q_start + mine)
        if n > 0:
            sums = deltas
            if SOFTMAX:
                sums = gl.load(lse + statistic + lanes, mask=lanes + mine < q_used, other=float("inf"))
            mbarrier.wait(q_full.index(W), tiles & 1)
            tiles += 1
            if mine < q_used:
                # From registers they leave the bandwidth of shared memory to the keys and values.
                q_operand = q_tile.load(gl.DotOperandLayout(0, SCORES, 2))
                do_operand = do_tile.load(gl.DotOperandLayout(0, SCORES, 2))
                if SOFTMAX:
                    product = os.index(W).reshape([M, V]).load(VALUES).to(gl.float32) * do_tile.load(VALUES).to(gl.float32)
                    deltas = gl.convert_layout(gl.sum(product, 1), gl.SliceLayout(1, SCORES))
                stage = copied % STAGES
                phase = (copied // STAGES) & 1
                k_tile = ks.index(stage).reshape([BLOCK_N, D])
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(q_operand, k_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                dp = warpgroup_mma(do_operand, vs.index(stage).reshape([BLOCK_N, V]).permute([1, 0]), nothing, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                keys = columns + (begin + (n - 1) * BLOCK_N)
                g = _slopes(s, queries, keys, sums, k_used, window, scale, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, True)
                dp = warpgroup_mma_wait(0, deps=[dp])
                # Not before: only products that have read the registers show that the loads into them are done. An arrival waits for none that is on
                # its way, and those of a warpgroup whose neighbour multiplies come so late that the rows of the next tile were there first.
                mbarrier.arrive(q_free.index(W), count=1)
                mbarrier.arrive(v_free.index(stage), count=1)
                ds = g * (dp - deltas[:, None]) if SOFTMAX else g * dp
                slopes = gl.convert_layout(ds.to(kind), SLOPES)
                acc = warpgroup_mma_init(out)
                for j in range(1, n):
                    next_stage = (copied + j) % STAGES
                    next_phase = ((copied + j) // STAGES) & 1
                    next_k = ks.index(next_stage).reshape([BLOCK_N, D])
                    mbarrier.wait(k_full.index(next_stage), next_phase)
                    mbarrier.wait(v_full.index(next_stage), next_phase)
                    mbarrier.wait(turn.index(W), turns & 1)
                    s = warpgroup_mma(q_operand, next_k.permute([1, 0]), nothing, use_acc=False, is_async=True)
                    next_v = vs.index(next_stage).reshape([BLOCK_N, V])
                    dp = warpgroup_mma(do_operand, next_v.permute([1, 0]), nothing, use_acc=False, is_async=True)
                    acc = warpgroup_mma(slopes, ks.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
                    mbarrier.arrive(turn.index(1 - W), count=1)
                    turns += 1
                    s = warpgroup_mma_wait(2, deps=[s])
                    keys = columns + (begin + (n - 1 - j) * BLOCK_N)
                    g = _slopes(s, queries, keys, sums, k_used, window, scale, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW, False)
                    dp = warpgroup_mma_wait(1, deps=[dp])
                    mbarrier.arrive(v_free.index(next_stage), count=1)
                    ds = g * (dp - deltas[:, None]) if SOFTMAX else g * dp
                    new_slopes = gl.convert_layout(ds.to(kind), SLOPES)
                    acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
                    mbarrier.arrive(k_free.index(stage), count=1)
                    slopes = new_slopes
                    stage = next_stage
                acc = warpgroup_mma(slopes, ks.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
                out = finish_slopes(warpgroup_mma_wait(0, deps=[acc]), factor, ACTIVATION)
                mbarrier.arrive(k_free.index(stage), count=1)
            else:
                mbarrier.arrive(q_free.index(W), count=1)
                for j in range(n):
                    stage = (copied + j) % STAGES
                    phase = ((copied + j) // STAGES) & 1
                    mbarrier.wait(k_full.index(stage), phase)
                    mbarrier.arrive(k_free.index(stage), count=1)
                    mbarrier.wait(v_full.index(stage), phase)
                    mbarrier.arrive(v_free.index(stage), count=1)
                    if j > 0:
                        mbarrier.wait(turn.index(W), turns & 1)
                        mbarrier.arrive(turn.index(1 - W), count=1)
                        turns += 1
            copied += n
        if SOFTMAX:
            gl.store(delta + statistic + lanes, deltas, mask=lanes + mine < q_length)
        tma.store_wait(0)
        dqs.index(W).reshape([M, D]).store(out.to(kind))
        fence_async_shared()
        store(dq_desc, q_start, q_length, mine, head * D, dqs.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "out_tokens", "window"])
def query_grad_kernel(
    q_desc, do_desc, o_desc, k_desc, v_desc, dq_desc, lse, delta, records, count, heads, out_tokens, scale, factor, window, q_head, k_head, v_head,
    GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Softmax takes ``scale`` times log2 e; ``factor`` is what the sum is multiplied by at the end."""
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    qs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, BLOCK_M // 2, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [2, 1, 1, BLOCK_M // 2, V], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, V], v_desc.layout)
    dqs = gl.allocate_shared_memory(dq_desc.dtype, [2, 1, 1, BLOCK_M // 2, D], dq_desc.layout)
    os = dos
    if SOFTMAX:
        os = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 1, BLOCK_M // 2, V], o_desc.layout)
    q_full, q_free = barriers(2, 1), barriers(2, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    turn = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    total = gl.load(count) * heads
    gl.warp_specialize(
        [
            (_consume, (dq_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, os, ks, vs, dqs,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        0, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW)),
            (_consume, (dq_desc, lse, delta, records, total, heads, out_tokens, scale, factor, window, qs, dos, os, ks, vs, dqs,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        1, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, CAUSAL, WINDOW)),
            (_produce, (q_desc, do_desc, o_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, os, ks, vs,
                        q_full, q_free, k_full, k_free, v_full, v_free, GROUP, V, BLOCK_M, BLOCK_N, STAGES, SOFTMAX, CAUSAL, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
