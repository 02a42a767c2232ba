"""Gradients of keys and values of HSTU rows on Hopper: two warpgroups keep half a tile of keys each, and one producer warp copies blocks of queries
past them.

Scores are kept transposed, ``[keys, queries]``: weights and their gradients enter the last two products straight from registers. Blocks hold as many
queries as a warpgroup holds keys: under a causal mask the second warpgroup leaves the first block to the first, and each needs a mask, the same one,
in the first block that it visits only.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.activations import both_scaled
from gem_kernels.common.hopper.gluon import fence_async_shared, gl, gluon, mbarrier, tma, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from gem_kernels.common.hopper.items import item_of, items_here, read_row
from gem_kernels.common.hopper.language import accumulator, barriers, copies, hide, load, queries_seeing, release, store
from gem_kernels.ops.hstu_attention.hopper_slopes import first_square, keep


@gluon.jit
def _produce(
    q_desc, do_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, ks, vs, q_full, do_full, q_free, k_full, k_free,
    V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    copied = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        head = item_of(tile, total) % heads
        first, start, used, _ = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = queries_seeing(first, used, used, window, BLOCK_N, CAUSAL, WINDOW)
        for w in gl.static_range(2):
            i = first + w * (BLOCK_N // 2)
            buffer = tile % 2 * 2 + w
            mbarrier.wait(k_free.index(buffer), ((tile // 2) & 1) ^ 1)
            mbarrier.expect(k_full.index(buffer), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load(k_desc, start, used, i, head * k_head, k_full.index(buffer), ks.index(buffer))
            load(v_desc, start, used, i, head * v_head, k_full.index(buffer), vs.index(buffer))
        for j in range(copies(begin, end, BLOCK_M)):
            stage = copied % STAGES
            i = begin + j * BLOCK_M
            mbarrier.wait(q_free.index(stage), ((copied // STAGES) & 1) ^ 1)
            mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
            load(q_desc, start, used, i, head * q_head, q_full.index(stage), qs.index(stage))
            mbarrier.expect(do_full.index(stage), do_desc.block_type.nbytes)
            load(do_desc, start, used, i, head * V, do_full.index(stage), dos.index(stage))
            copied += 1


@gluon.jit
def _seen(s):
    """Which keys of a block ``[keys, queries]`` on the diagonal are seen."""
    keys = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    queries = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return keys[:, None] <= queries[None, :]


@gluon.jit
def _add(
    s, v_tile, q_tile, do_tile, dv_acc, dk_acc, nothing, keys, queries, used, window, scale, factor,
    D: gl.constexpr, V: gl.constexpr, ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Start adding what one block of queries gives: the weights are made while the tensor cores multiply ``v doᵀ``, its slopes while they add dv.

    Gives the sums, and the slopes times ``factor``: other registers than those of a product's operand, which must not leave while it is in flight.
    """
    kind: gl.constexpr = q_tile.dtype
    TRIANGLE: gl.constexpr = FIRST and CAUSAL and not WINDOW
    dp = warpgroup_mma(v_tile, do_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    # A score of 0 has the weight 0. To hide weights instead would put a selection among the products, which then wait for each other.
    if WINDOW:
        s = hide(s, queries[None, :], keys[:, None], used, window, CAUSAL, WINDOW, 0.0)
    elif TRIANGLE:
        s = gl.where(_seen(s), s, 0.0)
    p, g = both_scaled(s, scale, ACTIVATION)
    if WINDOW:
        g = hide(g, queries[None, :], keys[:, None], used, window, CAUSAL, WINDOW, 0.0)
    elif TRIANGLE:
        g = gl.where(_seen(g), g, 0.0)
    weights = gl.convert_layout(p.to(kind), gl.DotOperandLayout(0, accumulator(V), 2))
    dv_acc = warpgroup_mma(weights, do_tile, dv_acc, use_acc=not FIRST, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp])
    ds = (g * dp).to(kind)
    dk_acc = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator(D), 2)), q_tile, dk_acc, use_acc=not FIRST, is_async=True)
    return dv_acc, dk_acc, (g * dp * factor).to(kind)


@gluon.jit
def _consume(
    dk_desc, dv_desc, slopes, records, total, heads, scale, factor, norm, window, longest, squares, long, qs, dos, ks, vs,
    q_full, do_full, q_free, k_full, k_free,
    W: gl.constexpr, D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    N: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = accumulator(BLOCK_M)
    ALIGNED: gl.constexpr = CAUSAL and not WINDOW
    kind: gl.constexpr = qs.dtype
    lanes = gl.arange(0, N, gl.SliceLayout(1, SCORES))
    columns = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([N, BLOCK_M], gl.float32, SCORES)
    copied = 0
    upcoming = read_row(records, item_of(0, total), heads)
    for tile in range(items_here(total)):
        item = item_of(tile, total)
        head = item % heads
        first, start, used, length = upcoming
        upcoming = read_row(records, item_of(tile + 1, total), heads)
        begin, end = queries_seeing(first, used, used, window, BLOCK_N, CAUSAL, WINDOW)
        n = copies(begin, end, BLOCK_M)
        mine = first + W * N
        keys = lanes + mine
        dk = gl.zeros([N, D], gl.float32, accumulator(D))
        dv = gl.zeros([N, V], gl.float32, accumulator(V))
        buffer = tile % 2 * 2 + W
        other = 2 - tile % 2 * 2 + W
        k_tile = ks.index(buffer).reshape([N, D])
        v_tile = vs.index(buffer).reshape([N, V])
        mbarrier.wait(k_full.index(buffer), (tile // 2) & 1)
        # Blocks that this warpgroup sees nothing of: it lets each go as it comes.
        skipped = gl.where(mine < used, 0, n)
        if ALIGNED and W == 1:
            skipped = gl.where(mine < used, 1, n)
        for j in range(skipped):
            stage = (copied + j) % STAGES
            phase = ((copied + j) // STAGES) & 1
            mbarrier.wait(q_full.index(stage), phase)
            mbarrier.wait(do_full.index(stage), phase)
            mbarrier.arrive(q_free.index(stage), count=1)
        if skipped < n:
            stage = (copied + skipped) % STAGES
            phase = ((copied + skipped) // STAGES) & 1
            q_tile = qs.index(stage).reshape([BLOCK_M, D])
            do_tile = dos.index(stage).reshape([BLOCK_M, V])
            mbarrier.wait(q_full.index(stage), phase)
            s = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            release(k_free, other, tile > 0)
            mbarrier.wait(do_full.index(stage), phase)
            queries = columns + (begin + skipped * BLOCK_M)
            block = first // BLOCK_M + skipped
            square = first // BLOCK_M + W
            if slopes is not None:
                square += first_square(records, item, heads, start, block, longest, squares)
            dv_acc, dk_acc, ds = _add(
                s, v_tile, q_tile, do_tile, warpgroup_mma_init(dv), warpgroup_mma_init(dk), nothing, keys, queries, used, window, scale, factor,
                D, V, ACTIVATION, CAUSAL, WINDOW, True,
            )  # fmt: skip
            if slopes is not None:
                keep(slopes, square, ds, used >= long)
            for j in range(skipped + 1, n):
                next_stage = (copied + j) % STAGES
                phase = ((copied + j) // STAGES) & 1
                q_tile = qs.index(next_stage).reshape([BLOCK_M, D])
                do_tile = dos.index(next_stage).reshape([BLOCK_M, V])
                mbarrier.wait(q_full.index(next_stage), phase)
                s = warpgroup_mma(k_tile, q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
                s, dk, dv = warpgroup_mma_wait(0, deps=[s, dk_acc, dv_acc])
                mbarrier.arrive(q_free.index(stage), count=1)
                mbarrier.wait(do_full.index(next_stage), phase)
                block += 1
                square += block
                queries = columns + (begin + j * BLOCK_M)
                dv_acc, dk_acc, ds = _add(
                    s, v_tile, q_tile, do_tile, warpgroup_mma_init(dv), warpgroup_mma_init(dk), nothing, keys, queries, used, window, scale, factor,
                    D, V, ACTIVATION, CAUSAL, WINDOW, False,
                )  # fmt: skip
                if slopes is not None:
                    keep(slopes, square, ds, used >= long)
                stage = next_stage
            dk, dv = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])
            mbarrier.arrive(q_free.index(stage), count=1)
        else:
            release(k_free, other, tile > 0)
        copied += n
        # The gradients leave through the memory of their keys and values, which is released during the next tile.
        k_tile.store((dk * factor).to(kind))
        v_tile.store((dv * norm).to(kind))
        fence_async_shared()
        store(dk_desc, start, length, mine, head * D, ks.index(buffer))
        store(dv_desc, start, length, mine, head * V, vs.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "window", "longest", "squares"])
def key_grad_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, slopes, records, count, heads, scale, factor, norm, window, longest, squares, long,
    q_head, k_head, v_head,
    D: gl.constexpr, V: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """``factor`` and ``norm`` are what the sums of dk and dv are multiplied by at the end; ``BLOCK_M`` is half of ``BLOCK_N``.

    Unless None, ``slopes`` gets those of the scores as ``hopper_slopes`` reads them, of causal rows of ``long`` tokens or more, without a window.
    """
    qs = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, BLOCK_M, V], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [4, 1, 1, BLOCK_N // 2, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [4, 1, 1, BLOCK_N // 2, V], v_desc.layout)
    q_full, do_full, q_free = barriers(STAGES, 1), barriers(STAGES, 1), barriers(STAGES, 2)
    k_full, k_free = barriers(4, 1), barriers(4, 1)
    fence_async_shared()
    total = gl.load(count) * heads
    gl.warp_specialize(
        [
            (_consume, (dk_desc, dv_desc, slopes, records, total, heads, scale, factor, norm, window, longest, squares, long, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free, 0, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_consume, (dk_desc, dv_desc, slopes, records, total, heads, scale, factor, norm, window, longest, squares, long, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free, 1, D, V, BLOCK_M, BLOCK_N, STAGES, ACTIVATION, CAUSAL, WINDOW)),
            (_produce, (q_desc, do_desc, k_desc, v_desc, records, total, heads, q_head, k_head, v_head, window, qs, dos, ks, vs,
                        q_full, do_full, q_free, k_full, k_free, V, BLOCK_M, BLOCK_N, STAGES, CAUSAL, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
