"""Forward pass of HSTU rows on Hopper: one producer warp copies tiles, two warpgroups compute half a tile of queries each.

As ``gem_kernels.common.hopper.forward``, for rows that attend to themselves: blocks of keys line up with tiles of queries. Under a causal mask only
the first block visited, the last of the row that is seen, needs a mask, always the same one; the first warpgroup needs but half of it.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.activations import activate_scaled
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.items import item_of, items_here, read_row
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, keys_seen, load, release, store


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, ks, vs, q_full, q_free, k_full, k_free, v_full, v_free,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    copied = 0
    count = items_here(total)
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(count):
        head = item_of(tile, total) % heads
        first, start, used, _ = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = keys_seen(first, used, used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        for w in gl.static_range(2):
            buffer = tile % 2 * 2 + w
            mbarrier.wait(q_free.index(buffer), ((tile // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
            load(q_desc, start, used, first + w * (BLOCK_M // 2), head * q_head, q_full.index(buffer), qs.index(buffer))
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
def _diagonal(
    q_tile, k_tile, v_tile, out, q_free, other, returned, k_free, v_full, v_free, phase, scale,
    M: gl.constexpr, V: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """The first warpgroup's share of the block on the diagonal: its ``M`` queries see no more than the block's first ``M`` keys."""
    SCORES: gl.constexpr = accumulator(M)
    OUT: gl.constexpr = accumulator(V)
    lanes = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, M, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([M, M], gl.float32, SCORES)
    s = warpgroup_mma(q_tile, k_tile.slice(0, M).permute([1, 0]), nothing, use_acc=False, is_async=True)
    release(q_free, other, returned)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free, count=1)
    # A score of 0 has the weight 0. To hide weights instead would put a selection among the products, which then wait for each other.
    p = activate_scaled(gl.where(columns[None, :] <= lanes[:, None], s, 0.0), scale, ACTIVATION)
    weights = gl.convert_layout(p.to(q_tile.dtype), gl.DotOperandLayout(0, OUT, 2))
    mbarrier.wait(v_full, phase)
    acc = warpgroup_mma(weights, v_tile.slice(0, M), warpgroup_mma_init(out), is_async=True)
    out = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_free, count=1)
    return out


@gluon.jit
def _consume(
    o_desc, records, total, heads, scale, norm, window, qs, ks, vs, os, q_full, q_free, k_full, k_free, v_full, v_free, turn,
    W: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = accumulator(BLOCK_N)
    OUT: gl.constexpr = accumulator(V)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ALIGNED: gl.constexpr = CAUSAL and not WINDOW
    DONE: gl.constexpr = 1 if ALIGNED and W == 0 else 0
    kind: gl.constexpr = qs.dtype
    lanes = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
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
        out = gl.zeros([M, V], gl.float32, OUT)
        buffer = tile % 2 * 2 + W
        q_tile = qs.index(buffer).reshape([M, D])
        mbarrier.wait(q_full.index(buffer), (tile // 2) & 1)
        other = 2 - tile % 2 * 2 + W
        if (mine < used) & (n > 0):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            if DONE == 1:
                mbarrier.wait(k_full.index(stage), phase)
                out = _diagonal(
                    q_tile, ks.index(stage).reshape([BLOCK_N, D]), vs.index(stage).reshape([BLOCK_N, V]), out, q_free, other, tile > 0,
                    k_free.index(stage), v_full.index(stage), v_free.index(stage), phase, scale, M, V, ACTIVATION,
                )  # fmt: skip
                stage = (copied + 1) % STAGES
                phase = ((copied + 1) // STAGES) & 1
            if n > DONE:
                mbarrier.wait(k_full.index(stage), phase)
                if DONE == 1:
                    mbarrier.wait(turn.index(W), turns & 1)
                s = warpgroup_mma(q_tile, ks.index(stage).reshape([BLOCK_N, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
                if DONE == 1:
                    mbarrier.arrive(turn.index(1 - W), count=1)
                    turns += 1
                else:
                    release(q_free, other, tile > 0)
                s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_free.index(stage), count=1)
                if WINDOW:
                    keys = columns + (begin + (n - 1) * BLOCK_N)
                    s = hide(s, queries[:, None], keys[None, :], used, window, CAUSAL, WINDOW, 0.0)
                elif CAUSAL and DONE == 0:
                    s = gl.where(columns[None, :] <= (lanes + M)[:, None], s, 0.0)
                p = activate_scaled(s, scale, ACTIVATION)
                weights = gl.convert_layout(p.to(kind), WEIGHTS)
                acc = warpgroup_mma_init(out)
                for j in range(1 + DONE, n):
                    next_stage = (copied + j) % STAGES
                    mbarrier.wait(k_full.index(next_stage), ((copied + j) // STAGES) & 1)
                    mbarrier.wait(v_full.index(stage), phase)
                    mbarrier.wait(turn.index(W), turns & 1)
                    s = warpgroup_mma(q_tile, ks.index(next_stage).reshape([BLOCK_N, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
                    acc = warpgroup_mma(weights, vs.index(stage).reshape([BLOCK_N, V]), acc, is_async=True)
                    mbarrier.arrive(turn.index(1 - W), count=1)
                    turns += 1
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(k_free.index(next_stage), count=1)
                    if WINDOW:
                        keys = columns + (begin + (n - 1 - j) * BLOCK_N)
                        s = hide(s, queries[:, None], keys[None, :], used, window, CAUSAL, WINDOW, 0.0)
                    p = activate_scaled(s, scale, ACTIVATION)
                    new_weights = gl.convert_layout(p.to(kind), WEIGHTS)
                    acc = warpgroup_mma_init(warpgroup_mma_wait(0, deps=[acc]))
                    mbarrier.arrive(v_free.index(stage), count=1)
                    weights = new_weights
                    stage = next_stage
                    phase = ((copied + j) // STAGES) & 1
                mbarrier.wait(v_full.index(stage), phase)
                acc = warpgroup_mma(weights, vs.index(stage).reshape([BLOCK_N, V]), acc, is_async=True)
                out = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_free.index(stage), count=1)
        else:
            release(q_free, other, tile > 0)
            # The other warpgroup needs the blocks: let each go as it comes.
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
        # The output leaves through the memory of its queries, which is released during the next tile.
        os.index(buffer).reshape([M, V]).store((out * norm).to(kind))
        fence_async_shared()
        store(o_desc, start, length, mine, head * V, os.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "window"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, records, count, heads, scale, norm, window, q_head, k_head, v_head,
    D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """``norm`` is what the sums are multiplied by at the end; ``BLOCK_M`` and ``BLOCK_N`` are equal."""
    qs = gl.allocate_shared_memory(q_desc.dtype, [4, 1, 1, BLOCK_M // 2, D], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, V], v_desc.layout)
    os = qs
    if V != D:
        os = gl.allocate_shared_memory(o_desc.dtype, [4, 1, 1, BLOCK_M // 2, V], o_desc.layout)
    q_full, q_free = barriers(4, 1), barriers(4, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    turn = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    total = gl.load(count) * heads
    gl.warp_specialize(
        [
            (_consume, (o_desc, records, total, heads, scale, norm, window, qs, ks, vs, os, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        0, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_consume, (o_desc, records, total, heads, scale, norm, window, qs, ks, vs, os, q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        1, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_produce, (q_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, ks, vs,
                        q_full, q_free, k_full, k_free, v_full, v_free, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
