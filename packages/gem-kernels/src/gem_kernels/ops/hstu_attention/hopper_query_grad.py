"""Gradient of the queries of HSTU rows on Hopper: the plan of ``hopper_forward``, rows of ``dout`` beside those of q, three products a block.

Blocks hold as many keys as a warpgroup holds queries: under a causal mask the first warpgroup leaves the last block to the second, and each needs a
mask, the same one, in the first block that it visits only.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.activations import slope_scaled
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.items import item_of, items_here, read_row
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, keys_seen, load, store
from gem_kernels.ops.hstu_attention.hopper_slopes import tiles_of_long_rows


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, ks, vs,
    q_full, q_free, k_full, k_free, v_full, v_free, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    copied = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        first, start, used, _ = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = keys_seen(first, used, used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        for w in gl.static_range(2):
            i = first + w * (BLOCK_M // 2)
            mbarrier.wait(q_free.index(w), (tile & 1) ^ 1)
            mbarrier.expect(q_full.index(w), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            load(q_desc, start, used, i, head * q_head, q_full.index(w), qs.index(w))
            load(do_desc, start, used, i, head * V, q_full.index(w), dos.index(w))
        for j in range(n):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            i = begin + (n - 1 - j) * BLOCK_N
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            load(k_desc, start, used, i, head * k_head, k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            load(v_desc, start, used, i, head * v_head, v_full.index(stage), vs.index(stage))
            copied += 1


@gluon.jit
def _consume(
    dq_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, dqs, q_full, q_free, k_full, k_free, v_full, v_free, turn,
    W: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = accumulator(BLOCK_N)
    OUT: gl.constexpr = accumulator(D)
    SLOPES: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ALIGNED: gl.constexpr = CAUSAL and not WINDOW
    kind: gl.constexpr = qs.dtype
    lanes = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
    q_tile = qs.index(W).reshape([M, D])
    do_tile = dos.index(W).reshape([M, V])
    copied = 0
    turns = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        first, start, used, length = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = keys_seen(first, used, used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        mine = first + W * M
        queries = lanes + mine
        out = gl.zeros([M, D], gl.float32, OUT)
        mbarrier.wait(q_full.index(W), tile & 1)
        # Blocks that this warpgroup sees nothing of: it lets each go as it comes, in its turn.
        skipped = gl.where(mine < used, 0, n)
        if ALIGNED and W == 0:
            skipped = gl.where(first + M < used, 1, skipped)
        for j in range(skipped):
            stage = (copied + j) % STAGES
            phase = ((copied + j) // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(v_free.index(stage), count=1)
            mbarrier.wait(turn.index(W), turns & 1)
            mbarrier.arrive(turn.index(1 - W), count=1)
            turns += 1
        if skipped < n:
            # From registers they leave the bandwidth of shared memory to the keys and values.
            q_operand = q_tile.load(gl.DotOperandLayout(0, SCORES, 2))
            do_operand = do_tile.load(gl.DotOperandLayout(0, SCORES, 2))
            stage = (copied + skipped) % STAGES
            phase = ((copied + skipped) // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            mbarrier.wait(v_full.index(stage), phase)
            mbarrier.wait(turn.index(W), turns & 1)
            s = warpgroup_mma(q_operand, ks.index(stage).reshape([BLOCK_N, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
            v_tile = vs.index(stage).reshape([BLOCK_N, V])
            dp = warpgroup_mma(do_operand, v_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - W), count=1)
            turns += 1
            s = warpgroup_mma_wait(1, deps=[s])
            g = slope_scaled(s, scale, ACTIVATION)
            if WINDOW:
                keys = columns + (begin + (n - 1 - skipped) * BLOCK_N)
                g = hide(g, queries[:, None], keys[None, :], used, window, CAUSAL, WINDOW, 0.0)
            elif CAUSAL:
                g = gl.where(columns[None, :] <= lanes[:, None], g, 0.0)
            dp = warpgroup_mma_wait(0, deps=[dp])
            mbarrier.arrive(q_free.index(W), count=1)  # not before: see ``common.hopper.query_grad``
            mbarrier.arrive(v_free.index(stage), count=1)
            slopes = gl.convert_layout((g * dp).to(kind), SLOPES)
            acc = warpgroup_mma_init(out)
            for j in range(skipped + 1, n):
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
                g = slope_scaled(s, scale, ACTIVATION)
                if WINDOW:
                    keys = columns + (begin + (n - 1 - j) * BLOCK_N)
                    g = hide(g, queries[:, None], keys[None, :], used, window, CAUSAL, WINDOW, 0.0)
                dp = warpgroup_mma_wait(1, deps=[dp])
                mbarrier.arrive(v_free.index(next_stage), count=1)
                new_slopes = gl.convert_layout((g * dp).to(kind), SLOPES)
                acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
                mbarrier.arrive(k_free.index(stage), count=1)
                slopes = new_slopes
                stage = next_stage
            acc = warpgroup_mma(slopes, ks.index(stage).reshape([BLOCK_N, D]), acc, is_async=True)
            out = warpgroup_mma_wait(0, deps=[acc]) * factor
            mbarrier.arrive(k_free.index(stage), count=1)
        else:
            mbarrier.arrive(q_free.index(W), count=1)
        copied += n
        tma.store_wait(0)
        dqs.index(W).reshape([M, D]).store(out.to(kind))
        fence_async_shared()
        store(dq_desc, start, length, mine, head * D, dqs.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "window"])
def query_grad_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, records, count, heads, scale, factor, window, long, q_head, k_head, v_head,
    D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """``factor`` is what the sums are multiplied by at the end; ``BLOCK_N`` is half of ``BLOCK_M``. Unless ``long`` is None, rows with as many
    tokens are left to ``hopper_slopes``."""
    qs = gl.allocate_shared_memory(q_desc.dtype, [2, 1, 1, BLOCK_M // 2, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [2, 1, 1, BLOCK_M // 2, V], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, V], v_desc.layout)
    dqs = gl.allocate_shared_memory(dq_desc.dtype, [2, 1, 1, BLOCK_M // 2, D], dq_desc.layout)
    q_full, q_free = barriers(2, 1), barriers(2, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    turn = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    tiles = gl.load(count)
    if long is not None:
        others = tiles_of_long_rows(records, tiles, long)
        records += others * 8
        tiles -= others
    total = tiles * heads
    gl.warp_specialize(
        [
            (_consume, (dq_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, dqs,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        0, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_consume, (dq_desc, records, total, heads, scale, factor, window, qs, dos, ks, vs, dqs,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        1, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, ks, vs,
                        q_full, q_free, k_full, k_free, v_full, v_free, V, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
