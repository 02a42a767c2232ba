"""Forward attention on Hopper: one producer warp that copies tiles, two warpgroups that compute half a tile of queries each.

Each warpgroup keeps two products in flight: while the tensor cores add ``p v`` of one block of keys, it turns the scores of the next into weights.
The blocks of a row are visited from the last to the first, so that only the first visit meets the end of the row. The warpgroups take turns: one
starts its products while the other makes weights.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and count in loops as the compiler can.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059, SIM113

from gem_kernels.common.hopper.gates import finish, weights_of
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, keys_seen, load, read_tile, release, store


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, ks, vs, q_full, q_free, k_full, k_free, v_full, v_free,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
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
        for w in gl.static_range(2):
            buffer = tiles % 2 * 2 + w
            mbarrier.wait(q_free.index(buffer), ((tiles // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
            load(q_desc, q_start, q_used, first + w * (BLOCK_M // 2), head * q_head, q_full.index(buffer), qs.index(buffer))
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
def _weights(s, queries, keys, k_used, window, scale, top, ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, SIGN: gl.constexpr,
             CAUSAL: gl.constexpr, WINDOW: gl.constexpr, TAIL: gl.constexpr):  # fmt: skip
    """Weights of a block of scores, the new maximum, and what earlier sums shrink by.

    Softmax scores are ordered before they are scaled, which takes ``scale > 0``: its sign goes into the scores.
    """
    if ACTIVATION == "softmax":
        if SIGN != 1:
            s = s * SIGN
        if CAUSAL or WINDOW or TAIL:
            s = hide(s, queries[:, None], keys[None, :], k_used, window, CAUSAL, WINDOW, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, 1))
        reference = new_top * scale
        if CAUSAL or WINDOW:
            reference = gl.where(new_top == float("-inf"), 0.0, reference)
        p = gl.exp2(s * scale - reference[:, None])
        shrink = gl.exp2(top * scale - reference)
    else:
        p = weights_of(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
        if CAUSAL or WINDOW:
            p = hide(p, queries[:, None], keys[None, :], k_used, window, CAUSAL, WINDOW, 0.0)
        new_top = top
        shrink = top
    return p, new_top, shrink


@gluon.jit
def _consume(
    o_desc, lse, records, total, heads, out_tokens, scale, window, qs, ks, vs, os,
    q_full, q_free, k_full, k_free, v_full, v_free, turn,
    W: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = accumulator(BLOCK_N)
    OUT: gl.constexpr = accumulator(V)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    kind: gl.constexpr = qs.dtype
    lanes = gl.arange(0, M, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([M, BLOCK_N], gl.float32, SCORES)
    copied = 0
    turns = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        begin, end = keys_seen(first, q_used, k_used, window, BLOCK_M, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_N)
        mine = first + W * M
        queries = lanes + (mine + k_used - q_used)
        top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        summed = gl.zeros([M], gl.float32, gl.SliceLayout(1, SCORES))
        out = gl.zeros([M, V], gl.float32, OUT)
        buffer = tiles % 2 * 2 + W
        q_tile = qs.index(buffer).reshape([M, D])
        mbarrier.wait(q_full.index(buffer), (tiles // 2) & 1)
        if (mine < q_used) & (n > 0):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q_tile, ks.index(stage).reshape([BLOCK_N, D]).permute([1, 0]), nothing, use_acc=False, is_async=True)
            release(q_free, 2 - tiles % 2 * 2 + W, tiles > 0)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            keys = columns + (begin + (n - 1) * BLOCK_N)
            p, top, shrink = _weights(s, queries, keys, k_used, window, scale, top, ACTIVATION, SCALE_AFTER, SIGN, CAUSAL, WINDOW, True)
            if SOFTMAX:
                summed = gl.sum(p, 1)
            weights = gl.convert_layout(p.to(kind), WEIGHTS)
            acc = warpgroup_mma_init(out)
            for j in range(1, n):
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
                keys = columns + (begin + (n - 1 - j) * BLOCK_N)
                p, top, shrink = _weights(s, queries, keys, k_used, window, scale, top, ACTIVATION, SCALE_AFTER, SIGN, CAUSAL, WINDOW, False)
                if SOFTMAX:
                    summed = summed * shrink + gl.sum(p, 1)
                new_weights = gl.convert_layout(p.to(kind), WEIGHTS)
                partial = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_free.index(stage), count=1)
                if SOFTMAX:
                    partial = partial * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
                acc = warpgroup_mma_init(partial)
                weights = new_weights
                stage = next_stage
                phase = ((copied + j) // STAGES) & 1
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(weights, vs.index(stage).reshape([BLOCK_N, V]), acc, is_async=True)
            out = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(stage), count=1)
        else:
            # The other warpgroup needs the blocks: let each go as it comes.
            release(q_free, 2 - tiles % 2 * 2 + W, tiles > 0)
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
        tiles += 1
        out_start = row * q_used if SHARED else q_start
        if SOFTMAX:
            some = (summed > 0.0) & (lanes + mine < q_used)
            inverse = gl.where(some, 1.0 / gl.where(some, summed, 1.0), 0.0)
            out = out * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
            sums = gl.where(some, top * scale + gl.log2(gl.where(some, summed, 1.0)), float("inf"))
            gl.store(lse + head.to(gl.int64) * out_tokens + (out_start + mine) + lanes, sums, mask=lanes + mine < q_length)
        else:
            out = finish(out, scale, ACTIVATION, SCALE_AFTER)
        # The output leaves through the memory of its queries, which is released during the next tile.
        os.index(buffer).reshape([M, V]).store(out.to(kind))
        fence_async_shared()
        store(o_desc, out_start, q_length, mine, head * V, os.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "out_tokens", "window"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, records, count, heads, out_tokens, scale, window, q_head, k_head, v_head,
    GROUP: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALE_AFTER: gl.constexpr, SIGN: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """``ACTIVATION`` ``softmax`` or one of ``common.activations``. Softmax takes ``scale`` as ``|scale| log2 e`` with its sign in ``SIGN``."""
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
            (_consume, (o_desc, lse, records, total, heads, out_tokens, scale, window, qs, ks, vs, os,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        0, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, SIGN, CAUSAL, WINDOW, SHARED)),
            (_consume, (o_desc, lse, records, total, heads, out_tokens, scale, window, qs, ks, vs, os,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn,
                        1, GROUP, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, SCALE_AFTER, SIGN, CAUSAL, WINDOW, SHARED)),
            (_produce, (q_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, ks, vs,
                        q_full, q_free, k_full, k_free, v_full, v_free, GROUP, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
