"""All gradients of ``pooled_attention`` in one pass on Hopper, where every row has seeds of its own: keys and values are read once, and a block takes
five products.

A program takes a row of one head after the other, longest rows first. ``GROUPS`` warpgroups share the row's ``64 GROUPS`` seeds, which stay in shared
memory, while one warp copies blocks of as many keys past them. Each warpgroup makes the transposed scores of its 64 keys, whose gradients are whole
after one block and leave at once, both through the memory of the values; the slopes of the scores meet in shared memory, where each warpgroup takes
those of its 64 seeds and adds their gradient in registers. That is done with each block, so that the memory of its keys is free for those after the
next: two blocks are all that an SM holds beside 128 seeds.

The sums of output times upstream gradient are made first, of a block of each in the place of one of keys and values. The end of a row comes before
the rest of it, so that only the block before the loop hides what lies past it.
"""

# Kernels are compiled from their source: they carry no types, read records whole, and count in loops as the compiler can.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: RUF059

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
from gem_kernels.common.hopper.language import accumulator, barriers, copies, load, store

HALF = gl.constexpr(64)
"""Keys of a block, and seeds, of one warpgroup."""


@gluon.jit
def _read_row(records, item, heads):
    """Of an item's row: its number, its first key, keys used and keys."""
    base = records + item // heads * 8
    return gl.load(base), gl.load(base + 5), gl.load(base + 6), gl.load(base + 7)


@gluon.jit
def _produce(read, memory, points, records, total, heads, seeds, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    q_desc, do_desc, o_half, do_half, k_desc, v_desc, lse, q_head, k_head, v_head, lse_token, lse_head = read
    qs, dos, ks, vs, dss, sums, deltas = memory
    q_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, delta_full = points
    SIZE: gl.constexpr = HALF * GROUPS
    lanes = gl.arange(0, SIZE, gl.BlockedLayout([1], [32], [1], [0]))
    copied = 0
    rows = 0
    upcoming = _read_row(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, start, used, length = upcoming
        upcoming = _read_row(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        n = copies(0, used, SIZE)
        if n > 0:
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), GROUPS * o_half.block_type.nbytes)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), GROUPS * do_half.block_type.nbytes)
            for w in gl.static_range(GROUPS):
                load(o_half, row * seeds, seeds, w * HALF, head * D, k_full.index(stage), ks.index(stage * GROUPS + w))
                load(do_half, row * seeds, seeds, w * HALF, head * D, v_full.index(stage), vs.index(stage * GROUPS + w))
            copied += 1
            mbarrier.wait(q_free.index(0), (rows & 1) ^ 1)
            # Zeros past the last seed: with q and dout zero there, any finite statistic will do.
            statistic = row.to(gl.int64) * seeds * lse_token + head * lse_head
            async_copy.async_copy_global_to_shared(sums, lse + statistic + lanes * lse_token, mask=lanes < seeds)
            async_copy.mbarrier_arrive(q_full.index(0))
            mbarrier.expect(q_full.index(0), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            load(q_desc, row * seeds, seeds, 0, head * q_head, q_full.index(0), qs.index(0))
            load(do_desc, row * seeds, seeds, 0, head * D, q_full.index(0), dos.index(0))
            rows += 1
        for j in range(n):
            stage = copied % STAGES
            phase = (copied // STAGES) & 1
            first = (n - 1 - j) * SIZE
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), GROUPS * k_desc.block_type.nbytes)
            for w in gl.static_range(GROUPS):
                load(k_desc, start, used, first + w * HALF, head * k_head, k_full.index(stage), ks.index(stage * GROUPS + w))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), GROUPS * v_desc.block_type.nbytes)
            for w in gl.static_range(GROUPS):
                load(v_desc, start, used, first + w * HALF, head * v_head, v_full.index(stage), vs.index(stage * GROUPS + w))
            copied += 1


@gluon.jit
def _delta(
    ks, vs, deltas, k_full, k_free, v_full, v_free, delta_full, block, W: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr
):
    """The sums of output times upstream gradient of a warpgroup's seeds; both lie in the place of a block of keys and values."""
    OUT: gl.constexpr = accumulator(D)
    stage = block % STAGES
    phase = (block // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    o = ks.index(stage * GROUPS + W).reshape([HALF, D]).load(OUT).to(gl.float32)
    mbarrier.wait(v_full.index(stage), phase)
    do = vs.index(stage * GROUPS + W).reshape([HALF, D]).load(OUT).to(gl.float32)
    deltas.slice(W * HALF, HALF, dim=0).store(gl.sum(o * do, 1))
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.arrive(v_free.index(stage), count=1)
    mbarrier.arrive(delta_full.index(0), count=1)


@gluon.jit
def _weights(s, sums, keys, used, scale, TAIL: gl.constexpr):
    s = s * scale
    if TAIL:
        s = gl.where((keys < used)[:, None], s, float("-inf"))
    return gl.exp2(s - sums[None, :])


@gluon.jit
def _block(
    acc, written, memory, points, delta, nothing, empty, start, used, first, column, block, step,
    W: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """The gradients of a block of a warpgroup's keys, which leave, and what the whole block gives to that of its seeds, added to ``acc``."""
    dq_desc, dk_desc, dv_desc, dq, dk, dv, dk_token, dv_token, rows, tokens, scale, factor = written
    qs, dos, ks, vs, dss, sums, deltas = memory
    q_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, delta_full = points
    SIZE: gl.constexpr = HALF * GROUPS
    COLUMNS: gl.constexpr = gl.SliceLayout(0, accumulator(SIZE))
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(D), 2)
    kind: gl.constexpr = qs.dtype
    keys = gl.arange(0, HALF, gl.SliceLayout(1, accumulator(SIZE))) + (first + W * HALF)
    q_tile = qs.index(0).reshape([SIZE, D])
    do_tile = dos.index(0).reshape([SIZE, D])
    stage = block % STAGES
    phase = (block // STAGES) & 1
    buffer = vs.index(stage * GROUPS + W)
    mbarrier.wait(k_full.index(stage), phase)
    s = warpgroup_mma(ks.index(stage * GROUPS + W).reshape([HALF, D]), q_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = warpgroup_mma(buffer.reshape([HALF, D]), do_tile.permute([1, 0]), nothing, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p = _weights(s, sums.load(COLUMNS), keys, used, scale, TAIL)
    if not TAIL:
        # The gradients of the block before have left by now.
        tma.store_wait(0)
        mbarrier.arrive(v_free.index((block - 1) % STAGES), count=1)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * (dp - delta.load(COLUMNS)[None, :])).to(kind)
    dv_acc = warpgroup_mma(gl.convert_layout(p.to(kind), OPERAND), do_tile, empty, use_acc=False, is_async=True)
    mbarrier.wait(ds_free.index(0), (step & 1) ^ 1)
    dss.index(W).store(ds)
    fence_async_shared()
    mbarrier.arrive(ds_full.index(0), count=1)
    mbarrier.wait(ds_full.index(0), step & 1)
    acc = warpgroup_mma_init(acc)
    for w in gl.static_range(GROUPS):
        seeds = dss.index(w).slice(W * HALF, HALF, dim=1).permute([1, 0])
        acc = warpgroup_mma(seeds, ks.index(stage * GROUPS + w).reshape([HALF, D]), acc, is_async=True)
    dv_acc = warpgroup_mma_wait(GROUPS, deps=[dv_acc])
    buffer.reshape([HALF, D]).store(dv_acc.to(kind))
    fence_async_shared()
    store(dv_desc, start, used, first + W * HALF, column, buffer)
    dk_acc = warpgroup_mma(gl.convert_layout(ds, OPERAND), q_tile, empty, use_acc=False, is_async=True)
    acc = warpgroup_mma_wait(1, deps=[acc])
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.arrive(ds_free.index(0), count=1)
    dk_acc = warpgroup_mma_wait(0, deps=[dk_acc]) * factor
    tma.store_wait(0)
    buffer.reshape([HALF, D]).store(dk_acc.to(kind))
    fence_async_shared()
    store(dk_desc, start, used, first + W * HALF, column, buffer)
    return acc


@gluon.jit
def _zero(base, first, until, step, D: gl.constexpr, kind: gl.constexpr):
    """Zeros in rows ``[first, until)`` of ``D`` numbers, ``step`` apart."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row = gl.arange(0, 16, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    for i in range(first, until, 16):
        at = (row + i).to(gl.int64) * step
        gl.store(base + (at[:, None] + column[None, :]), gl.zeros([16, D], kind, LAYOUT), mask=(row + i < until)[:, None])


@gluon.jit
def _consume(
    written, memory, points, records, total, heads, seeds, W: gl.constexpr, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    dq_desc, dk_desc, dv_desc, dq, dk, dv, dk_token, dv_token, rows, tokens, scale, factor = written
    qs, dos, ks, vs, dss, sums, deltas = memory
    q_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, delta_full = points
    SIZE: gl.constexpr = HALF * GROUPS
    kind: gl.constexpr = qs.dtype
    nothing = gl.zeros([HALF, SIZE], gl.float32, accumulator(SIZE))
    empty = gl.zeros([HALF, D], gl.float32, accumulator(D))
    block = 0
    step = 0
    found = 0
    upcoming = _read_row(records, gl.program_id(0), heads)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        head = item % heads
        row, start, used, length = upcoming
        upcoming = _read_row(records, gl.minimum(item + gl.num_programs(0), total - 1), heads)
        n = copies(0, used, SIZE)
        if n > 0:
            delta = deltas.index(found & 1)
            _delta(ks, vs, delta, k_full, k_free, v_full, v_free, delta_full, block, W, D, GROUPS, STAGES)
            mbarrier.wait(q_full.index(0), found & 1)
            mbarrier.wait(delta_full.index(0), found & 1)
            found += 1
            first = (n - 1) * SIZE
            acc = _block(empty, written, memory, points, delta, nothing, empty, start, used, first, head * D, block + 1, step,
                         W, D, GROUPS, STAGES, True)  # fmt: skip
            for j in range(1, n):
                acc = _block(acc, written, memory, points, delta, nothing, empty, start, used, first - j * SIZE, head * D, block + 1 + j, step + j,
                             W, D, GROUPS, STAGES, False)  # fmt: skip
            mbarrier.arrive(q_free.index(0), count=1)
            block += 1 + n
            step += n
            last = (block - 1) % STAGES
            buffer = vs.index(last * GROUPS + W)
            tma.store_wait(0)
            buffer.reshape([HALF, D]).store((acc * factor).to(kind))
            fence_async_shared()
            store(dq_desc, row * seeds, seeds, W * HALF, head * D, buffer)
            tma.store_wait(0)
            mbarrier.arrive(v_free.index(last), count=1)
        if W == 0:
            column = head * D
            if n == 0:
                _zero(dq + row.to(gl.int64) * seeds * heads * D + column, 0, seeds, heads * D, D, kind)
            # What lies after the last row belongs to it.
            end = gl.where(row == rows - 1, tokens - start, length)
            _zero(dk + start.to(gl.int64) * dk_token + column, used, end, dk_token, D, kind)
            _zero(dv + start.to(gl.int64) * dv_token + column, used, end, dv_token, D, kind)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["heads", "rows", "seeds", "tokens", "lse_token", "lse_head"])
def grad_kernel(
    q_desc, do_desc, o_half, do_half, k_desc, v_desc, dq_desc, dk_desc, dv_desc, dq, dk, dv, lse, records, count, heads, rows, seeds, tokens,
    lse_token, lse_head, q_head, k_head, v_head, dk_token, dv_token, scale, factor, D: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``lse``: of a seed ``lse_token`` apart, of a head ``lse_head``. ``o_half`` and ``do_half`` have blocks of a warpgroup's seeds.
    ``scale`` is that of scores times log2 e, ``factor`` that of sums."""
    SIZE: gl.constexpr = HALF * GROUPS
    statistics: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    meeting: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, SIZE], q_desc.dtype)
    qs = gl.allocate_shared_memory(q_desc.dtype, [1, 1, 1, SIZE, D], q_desc.layout)
    dos = gl.allocate_shared_memory(do_desc.dtype, [1, 1, 1, SIZE, D], do_desc.layout)
    ks = gl.allocate_shared_memory(k_desc.dtype, [STAGES * GROUPS, 1, 1, HALF, D], k_desc.layout)
    vs = gl.allocate_shared_memory(v_desc.dtype, [STAGES * GROUPS, 1, 1, HALF, D], v_desc.layout)
    dss = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, HALF, SIZE], meeting)
    sums = gl.allocate_shared_memory(gl.float32, [SIZE], statistics)
    deltas = gl.allocate_shared_memory(gl.float32, [2, SIZE], statistics)
    q_full, q_free = barriers(1, 1), barriers(1, GROUPS)
    k_full, k_free = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    v_full, v_free = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    ds_full, ds_free, delta_full = barriers(1, GROUPS), barriers(1, GROUPS), barriers(1, GROUPS)
    fence_async_shared()
    total = gl.load(count) * heads
    memory = (qs, dos, ks, vs, dss, sums, deltas)
    points = (q_full, q_free, k_full, k_free, v_full, v_free, ds_full, ds_free, delta_full)
    read = (q_desc, do_desc, o_half, do_half, k_desc, v_desc, lse, q_head, k_head, v_head, lse_token, lse_head)
    written = (dq_desc, dk_desc, dv_desc, dq, dk, dv, dk_token, dv_token, rows, tokens, scale, factor)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_consume, (written, memory, points, records, total, heads, seeds, 0, D, GROUPS, STAGES)),
                (_produce, (read, memory, points, records, total, heads, seeds, D, GROUPS, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (written, memory, points, records, total, heads, seeds, 0, D, GROUPS, STAGES)),
                (_consume, (written, memory, points, records, total, heads, seeds, 1, D, GROUPS, STAGES)),
                (_produce, (read, memory, points, records, total, heads, seeds, D, GROUPS, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
