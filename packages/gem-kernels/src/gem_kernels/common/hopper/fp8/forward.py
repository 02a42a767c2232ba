"""Forward attention on the FP8 tensor cores of Hopper: the plan of ``hopper.forward`` over operands that ``fp8.cast`` wrote.

One producer warp copies tiles of 128 keys, two warpgroups compute 64 queries each and take turns at the tensor cores. Weights go from the registers
of one product to those of the next without an exchange: a thread finds four neighbouring columns where the next product wants them once the columns
of the scores are renamed, which is what ``cast.place_of`` does to the keys.

Scores and weights stay within E4M3 because the casts bound them: ``cast`` says how.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and count in loops as the compiler can.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059, SIM113

from gem_kernels.common.hopper.fp8.weights import elements, weights_of, words_of
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.language import barriers, copies, read_tile, store

TILE = gl.constexpr(128)
HALF = gl.constexpr(64)
DIM = gl.constexpr(128)
HEADROOM = gl.constexpr(2.0**-7)
"""Brings twice a score, at most 2^15 (1 + 2^-4)^2, below 448."""
LIFT = gl.constexpr(2.0**8)
"""Scales the probabilities of softmax, which are at most 1."""


@gluon.constexpr_function
def accumulator(N):
    """Registers of a ``[64, N]`` result of one warpgroup, of operands of eight bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 32])


@gluon.jit
def _produce(
    q_desc, k_desc, v_desc, records, bases, total, heads, qs, ks, vs, q_full, q_free, k_full, k_free, v_full, v_free,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    copied = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        base = gl.load(bases + row)
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        n = copies(0, gl.where(first < q_used, k_used, 0), TILE)
        for w in gl.static_range(2):
            buffer = tiles % 2 * 2 + w
            mbarrier.wait(q_free.index(buffer), ((tiles // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(buffer), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [item * TILE + w * HALF, 0], q_full.index(buffer), qs.index(buffer))
        tiles += 1
        for j in range(n):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            place = ((base - (n - 1 - j)) * (heads // GROUP) + head // GROUP) * TILE
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(k_desc, [place, 0], k_full.index(stage), ks.index(stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_desc, [place, 0], v_full.index(stage), vs.index(stage))
            copied += 1


@gluon.jit
def _renamed(s, WEIGHTS: gl.constexpr):
    """Scores as the left operand of the next product: column 16 a + 8 b + 2 c + d becomes 16 a + 4 c + 2 b + d, and nothing moves."""
    return gl.convert_layout(s.reshape([HALF, TILE // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([HALF, TILE]), WEIGHTS, assert_trivial=True)


@gluon.jit
def token_of(column):
    """The inverse of ``cast.place_of``."""
    return column // 16 * 16 + column // 2 % 4 * 4 + column // 8 % 2 * 2 + column % 2


@gluon.jit
def _share(by_value, bound):
    """What the probabilities of a tile are multiplied by, so that one scale suits the values of all tiles."""
    return gl.maximum(by_value / bound, 2.0**-60) * LIFT


@gluon.jit
def _probabilities(s, keys, k_used, sharpness, lift, top, SIGN: gl.constexpr, TAIL: gl.constexpr):
    """2^(sharpness s - m + lift) with the new maximum m of ``sharpness s``, m, and what earlier sums shrink by; ``sharpness > 0``."""
    if SIGN != 1:
        s = s * SIGN
    if TAIL:
        s = gl.where((keys < k_used)[None, :], s, float("-inf"))
    new_top = gl.maximum(top, gl.max(s, 1) * sharpness)
    return gl.exp2(s * sharpness + (lift - new_top)[:, None]), new_top, gl.exp2(top - new_top)


@gluon.jit
def _scales(k_scales, v_scales, place):
    return gl.load(k_scales + place), gl.load(v_scales + place)


@gluon.jit
def _consume(
    o_desc, lse, q_scales, k_scales, v_scales, bounds, records, bases, total, heads, out_tokens, scale, after, qs, ks, vs, os,
    q_full, q_free, k_full, k_free, v_full, v_free, turn,
    W: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = accumulator(TILE)
    OUT: gl.constexpr = accumulator(DIM)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    SOFTMAX: gl.constexpr = ACTIVATION == "softmax"
    nothing = gl.zeros([HALF, TILE], gl.float32, SCORES)
    lanes = gl.arange(0, HALF, gl.SliceLayout(1, SCORES))
    columns = token_of(gl.arange(0, TILE, gl.SliceLayout(0, SCORES)))
    kv_heads = heads // GROUP
    copied = 0
    turns = 0
    tiles = 0
    upcoming = read_tile(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, k_length = upcoming
        base = gl.load(bases + row)
        bound = gl.load(bounds + row * kv_heads + head // GROUP)
        by_query = gl.load(q_scales + item) * scale
        upcoming = read_tile(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        n = copies(0, gl.where(first < q_used, k_used, 0), TILE)
        mine = first + W * HALF
        top = gl.full([HALF], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        summed = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, SCORES))
        out = gl.zeros([HALF, DIM], gl.float32, OUT)
        buffer = tiles % 2 * 2 + W
        mbarrier.wait(q_full.index(buffer), (tiles // 2) & 1)
        if (mine < q_used) & (n > 0):
            place = (base - (n - 1)) * kv_heads + head // GROUP
            by_key, by_value = _scales(k_scales, v_scales, place)
            next_key, next_value = _scales(k_scales, v_scales, place + gl.minimum(n - 1, 1) * kv_heads)
            inverse = HEADROOM / bound
            q_tile = qs.index(buffer)
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q_tile, ks.index(stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_free.index(stage), count=1)
            if SOFTMAX:
                share = _share(by_value, bound)
                p, top, shrink = _probabilities(s, columns + (n - 1) * TILE, k_used, by_query * by_key, gl.log2(share), top, SIGN, True)
                summed = gl.sum(p, 1) / share
                weights = words_of(_renamed(p, WEIGHTS))
            else:
                weights = weights_of(_renamed(s, WEIGHTS), by_query * by_key, by_key * by_value * inverse, ACTIVATION)
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma_init(out)
            for j in range(1, n):
                by_key, by_value = next_key, next_value
                next_key, next_value = _scales(k_scales, v_scales, place + gl.minimum(n - 1, j + 1) * kv_heads)
                operand = elements(weights)
                next_stage = (copied + j) % STAGES
                mbarrier.wait(k_full.index(next_stage), ((copied + j) // STAGES) & 1)
                mbarrier.wait(turn.index(W), turns & 1)
                s = warpgroup_mma(q_tile, ks.index(next_stage).permute([1, 0]), nothing, use_acc=False, is_async=True)
                acc = warpgroup_mma(operand, vs.index(stage).permute([1, 0]), acc, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(turn.index(1 - W), count=1)
                turns += 1
                mbarrier.arrive(k_free.index(next_stage), count=1)
                if SOFTMAX:
                    share = _share(by_value, bound)
                    p, top, shrink = _probabilities(s, columns, k_used, by_query * by_key, gl.log2(share), top, SIGN, False)
                    summed = summed * shrink + gl.sum(p, 1) / share
                    new_weights = words_of(_renamed(p, WEIGHTS))
                else:
                    new_weights = weights_of(_renamed(s, WEIGHTS), by_query * by_key, by_key * by_value * inverse, ACTIVATION)
                mbarrier.wait(v_full.index(next_stage), ((copied + j) // STAGES) & 1)
                partial = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_free.index(stage), count=1)
                if SOFTMAX:
                    partial = partial * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
                acc = warpgroup_mma_init(partial)
                weights = new_weights
                stage = next_stage
                phase = ((copied + j) // STAGES) & 1
            mbarrier.arrive(q_free.index(buffer), count=1)
            acc = warpgroup_mma(elements(weights), vs.index(stage).permute([1, 0]), acc, is_async=True)
            out = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_free.index(stage), count=1)
            if SOFTMAX:
                out = out * gl.convert_layout(bound * (1.0 / LIFT) / summed, gl.SliceLayout(1, OUT))[:, None]
            else:
                out = out * (by_query * bound * (after * (0.5 / HEADROOM)))
        else:
            # The other warpgroup needs the blocks: let each go as it comes.
            mbarrier.arrive(q_free.index(buffer), count=1)
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
        if SOFTMAX:
            some = (summed > 0.0) & (lanes + mine < q_used)
            sums = gl.where(some, top + gl.log2(gl.where(some, summed, 1.0)), float("inf"))
            gl.store(lse + head.to(gl.int64) * out_tokens + (q_start + mine) + lanes, sums, mask=lanes + mine < q_length)
            out = gl.where(gl.convert_layout(lanes + mine < q_used, gl.SliceLayout(1, OUT))[:, None], out, 0.0)
        tma.store_wait(0)
        os.index(W).reshape([HALF, DIM]).store(out.to(os.dtype))
        fence_async_shared()
        store(o_desc, q_start, q_length, mine, head * DIM, os.index(W))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "out_tokens"])
def fp8_forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, q_scales, k_scales, v_scales, bounds, records, bases, count, heads, out_tokens, scale, after,
    GROUP: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    """Operands and scales as ``fp8.cast`` writes them.

    ``scale`` multiplies scores before the activation, ``after`` weights after it. Softmax takes ``scale`` as ``|scale| log2 e`` with its sign in
    ``SIGN``, and writes the base-2 logarithms of its sums to ``lse`` ``[heads, out_tokens]``.
    """
    qs = gl.allocate_shared_memory(q_desc.dtype, [4, HALF, DIM], q_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES, TILE, DIM], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES, DIM, TILE], v_desc.layout)
    os = gl.allocate_shared_memory(o_desc.dtype, [2, 1, 1, HALF, DIM], o_desc.layout)
    q_full, q_free = barriers(4, 1), barriers(4, 1)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, 2)
    turn = barriers(2, 1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0), count=1)
    total = gl.load(count) * heads
    gl.warp_specialize(
        [
            (_consume, (o_desc, lse, q_scales, k_scales, v_scales, bounds, records, bases, total, heads, out_tokens, scale, after, qs, ks, vs, os,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn, 0, GROUP, STAGES, ACTIVATION, SIGN)),
            (_consume, (o_desc, lse, q_scales, k_scales, v_scales, bounds, records, bases, total, heads, out_tokens, scale, after, qs, ks, vs, os,
                        q_full, q_free, k_full, k_free, v_full, v_free, turn, 1, GROUP, STAGES, ACTIVATION, SIGN)),
            (_produce, (q_desc, k_desc, v_desc, records, bases, total, heads, qs, ks, vs, q_full, q_free, k_full, k_free, v_full, v_free,
                        GROUP, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
