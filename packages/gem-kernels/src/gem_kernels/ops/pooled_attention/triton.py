"""Seeds attend to each row's keys, in portable Triton. Few queries and long rows: keys and values are read once a pass, so bandwidth is the limit.

Rows may be split along their keys, so that a small batch of long rows fills the device: each split gives its own softmax and the logarithm of its
sum, and the caller joins them. Backward, with p the weights and d = rowsum(do * out): dv = pᵀ do, ds = p * (do vᵀ - d), dk = scale dsᵀ q,
dq = scale ds k; the gradient of shared seeds is added over runs of rows in row order, and the caller adds the runs. One kernel makes all gradients
where a tile holds all seeds; more seeds, or heads that share keys, take one for the keys and one for the seeds.

Arguments shared by the kernels: seed ``s`` of row ``r`` lies at ``r * q_row + s * q_seed``, with ``q_row`` 0 for shared seeds. Logarithms are base 2.
``lse`` and ``delta`` are float32 ``[rows, seeds, heads]``; outputs and ``dout`` are contiguous,
but that a token of the memory of dk and dv holds ``D*_PARTS`` like them.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, load_tile, row_span, store_rows, store_tile, zero_rows

_VARYING = ["rows", "seeds", "total", "max_k", "tiles", "splits", "rows_per_run"]
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _share(used, split, splits, STEP: tl.constexpr):
    """Keys ``[low, high)`` of one split: equal shares of whole steps."""
    size = tl.cdiv(tl.cdiv(used, splits), STEP) * STEP
    low = tl.minimum(split * size, used)
    return low, tl.minimum(low + size, used)


@triton.jit
def _numbers(base, first, seeds, stride, fallback, ROWS: tl.constexpr):
    """``[ROWS]`` float32, one a seed; ``fallback`` past the last."""
    s = first + tl.arange(0, ROWS)
    return tl.load(base + s * stride, mask=s < seeds, other=fallback)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, out, lse, offsets, rows, seeds, heads, total, max_k, tiles, splits, scale, q_row, q_seed, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` seeds of one (row, split, head); ``out [rows, splits, seeds, heads, V_DIM]`` and ``lse`` likewise."""
    seed_tiles = tl.cdiv(seeds, BLOCK_M)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % seed_tiles * BLOCK_M
        head = tile // seed_tiles % heads
        split = tile // seed_tiles // heads % splits
        row = tile // seed_tiles // heads // splits
        start, length = row_span(offsets, row, total)
        low, high = _share(tl.minimum(length, max_k), split, splits, BLOCK_N)
        q_tile = load_rows(q + row * q_row + head * q_head, first, seeds, q_seed, BLOCK_M, DIM, BLOCK_D)
        k_base = k + head // GROUP * k_head + start * k_token
        v_base = v + head // GROUP * v_head + start * v_token
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        z = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for n in range(low, high, BLOCK_N):
            k_tile = load_rows(k_base, n, high, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v_base, n, high, v_token, BLOCK_N, V_DIM, BLOCK_V)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2E)
            s = tl.where((tl.arange(0, BLOCK_N) < high - n)[None, :], s, float("-inf"))
            new = tl.maximum(m, tl.max(s, 1))
            p = tl.exp2(s - new[:, None])
            fade = tl.exp2(m - new)
            z = z * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision=PRECISION)
            m = new
        place = (row * splits + split) * seeds * heads + head
        some = z > 0.0
        acc = acc / tl.where(some, z, 1.0)[:, None]
        store_rows(out + place * V_DIM, acc, first, seeds, heads * V_DIM, BLOCK_M, V_DIM, BLOCK_V)
        s_index = first + tl.arange(0, BLOCK_M)
        sums = tl.where(some, m + tl.log2(tl.where(some, z, 1.0)), float("-inf"))
        tl.store(lse + place + s_index * heads, sums, mask=s_index < seeds)


@triton.jit(do_not_specialize=["rows", "tiles"])
def delta_kernel(dout, out, delta, rows, tiles, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr):
    """``rowsum(dout * out)`` of contiguous rows of ``V_DIM`` numbers, in float32: both are read once, and nothing else is written."""
    column = tl.arange(0, BLOCK_V)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * V_DIM + column[None, :], (row < rows)[:, None] & (column < V_DIM)[None, :]
        a = tl.load(dout + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(delta + row, tl.sum(a * b, 1), mask=row < rows)


@triton.jit(do_not_specialize=_VARYING)
def grad_kernel(
    q, k, v, dout, lse, delta, dq, dk, dv, dk_desc, dv_desc, offsets, rows, seeds, heads, total, max_k, tiles, splits, rows_per_run, scale,
    q_row, q_seed, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, ENGINE: tl.constexpr,
    DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """All gradients, keys and values read once, where one tile holds all seeds and each head has its own keys (``GROUP`` is 1).

    A tile is one (run of rows, split, head); scores are kept transposed, ``[keys, seeds]``, and so is the sum for dq, ``[DIM, seeds]``: a product of
    64 rows and more is one of warpgroups. ``dq [runs, splits, seeds, heads, DIM]``. ENGINE: k, v, dk_desc and dv_desc are ragged descriptors.
    """
    dk_token = heads * DIM * DK_PARTS
    dv_token = heads * V_DIM * DV_PARTS
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        head = tile % heads
        split = tile // heads % splits
        run = tile // heads // splits
        dk_base = dk + head * DIM
        dv_base = dv + head * V_DIM
        acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
        for row in range(run * rows_per_run, tl.minimum((run + 1) * rows_per_run, rows)):
            start, length = row_span(offsets, row, total)
            used = tl.minimum(length, max_k)
            low, high = _share(used, split, splits, BLOCK_N)
            place = row * seeds * heads + head
            q_tile = load_rows(q + row * q_row + head * q_head, 0, seeds, q_seed, BLOCK_M, DIM, BLOCK_D)
            do_tile = load_rows(dout + place * V_DIM, 0, seeds, heads * V_DIM, BLOCK_M, V_DIM, BLOCK_V)
            sums = _numbers(lse + place, 0, seeds, heads, float("inf"), BLOCK_M)
            means = _numbers(delta + place, 0, seeds, heads, 0.0, BLOCK_M)
            for n in tl.range(low, high, BLOCK_N, num_stages=STAGES):
                k_tile = load_tile(k, head, start, n, high, k_token, k_head, BLOCK_N, DIM, BLOCK_D, ENGINE)
                v_tile = load_tile(v, head, start, n, high, v_token, v_head, BLOCK_N, V_DIM, BLOCK_V, ENGINE)
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2E)
                s = tl.where((tl.arange(0, BLOCK_N) < high - n)[:, None], s, float("-inf"))
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                p = tl.exp2(s - sums[None, :])
                ds = (p * (dp - means[None, :])).to(k_tile.dtype)
                dv_tile = tl.dot(p.to(do_tile.dtype), do_tile, input_precision=PRECISION)
                store_tile(dv_desc if ENGINE else dv, dv_tile, head, start, n, high, dv_token, BLOCK_N, V_DIM, BLOCK_V, ENGINE)
                dk_tile = tl.dot(ds, q_tile, input_precision=PRECISION) * scale
                store_tile(dk_desc if ENGINE else dk, dk_tile, head, start, n, high, dk_token, BLOCK_N, DIM, BLOCK_D, ENGINE)
                acc = tl.dot(tl.trans(k_tile), ds, acc, input_precision=PRECISION)
            if split == splits - 1:
                end = start + length
                if row == rows - 1:
                    end = tl.maximum(end, total)
                zero_rows(dk_base, start + used, end, dk_token, BLOCK_N, DIM, BLOCK_D)
                zero_rows(dv_base, start + used, end, dv_token, BLOCK_N, V_DIM, BLOCK_V)
        base = dq + ((run * splits + split) * seeds * heads + head) * DIM
        store_rows(base, tl.trans(acc) * scale, 0, seeds, heads * DIM, BLOCK_M, DIM, BLOCK_D)


@triton.jit(do_not_specialize=_VARYING)
def query_grad_kernel(
    q, k, v, dout, lse, delta, dq, offsets, rows, seeds, heads, total, max_k, tiles, splits, rows_per_run, scale,
    q_row, q_seed, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` seeds of one (run of rows, split, head); ``dq [runs, splits, seeds, heads, DIM]``."""
    seed_tiles = tl.cdiv(seeds, BLOCK_M)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % seed_tiles * BLOCK_M
        head = tile // seed_tiles % heads
        split = tile // seed_tiles // heads % splits
        run = tile // seed_tiles // heads // splits
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for row in range(run * rows_per_run, tl.minimum((run + 1) * rows_per_run, rows)):
            start, length = row_span(offsets, row, total)
            low, high = _share(tl.minimum(length, max_k), split, splits, BLOCK_N)
            place = row * seeds * heads + head
            q_tile = load_rows(q + row * q_row + head * q_head, first, seeds, q_seed, BLOCK_M, DIM, BLOCK_D)
            do_tile = load_rows(dout + place * V_DIM, first, seeds, heads * V_DIM, BLOCK_M, V_DIM, BLOCK_V)
            sums = _numbers(lse + place, first, seeds, heads, float("inf"), BLOCK_M)
            means = _numbers(delta + place, first, seeds, heads, 0.0, BLOCK_M)
            k_base = k + head // GROUP * k_head + start * k_token
            v_base = v + head // GROUP * v_head + start * v_token
            for n in range(low, high, BLOCK_N):
                k_tile = load_rows(k_base, n, high, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, n, high, v_token, BLOCK_N, V_DIM, BLOCK_V)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2E)
                s = tl.where((tl.arange(0, BLOCK_N) < high - n)[None, :], s, float("-inf"))
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                ds = tl.exp2(s - sums[:, None]) * (dp - means[:, None])
                acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        base = dq + ((run * splits + split) * seeds * heads + head) * DIM
        store_rows(base, acc * scale, first, seeds, heads * DIM, BLOCK_M, DIM, BLOCK_D)


@triton.jit(do_not_specialize=_VARYING)
def key_grad_kernel(
    q, k, v, dout, lse, delta, dk, dv, offsets, rows, seeds, kv_heads, total, max_k, tiles, scale,
    q_row, q_seed, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
    DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_N`` keys of one (row, key head); scores are kept transposed, ``[keys, seeds]``."""
    k_tiles = tl.cdiv(max_k, BLOCK_N)
    heads = kv_heads * GROUP
    dk_token = kv_heads * DIM * DK_PARTS
    dv_token = kv_heads * V_DIM * DV_PARTS
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % k_tiles * BLOCK_N
        kv_head = tile // k_tiles % kv_heads
        row = tile // k_tiles // kv_heads
        start, length = row_span(offsets, row, total)
        used = tl.minimum(length, max_k)
        dk_base = dk + kv_head * DIM
        dv_base = dv + kv_head * V_DIM
        if first < used:
            k_tile = load_rows(k + kv_head * k_head + start * k_token, first, used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v + kv_head * v_head + start * v_token, first, used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                place = row * seeds * heads + head
                for m in range(first * 0, seeds, BLOCK_M):
                    q_tile = load_rows(q + row * q_row + head * q_head, m, seeds, q_seed, BLOCK_M, DIM, BLOCK_D)
                    do_tile = load_rows(dout + place * V_DIM, m, seeds, heads * V_DIM, BLOCK_M, V_DIM, BLOCK_V)
                    sums = _numbers(lse + place, m, seeds, heads, float("inf"), BLOCK_M)
                    means = _numbers(delta + place, m, seeds, heads, 0.0, BLOCK_M)
                    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2E)
                    dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                    p = tl.exp2(s - sums[None, :])
                    ds = p * (dp - means[None, :])
                    dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
            store_rows(dk_base + start * dk_token, dk_acc * scale, first, used, dk_token, BLOCK_N, DIM, BLOCK_D)
            store_rows(dv_base + start * dv_token, dv_acc, first, used, dv_token, BLOCK_N, V_DIM, BLOCK_V)
        if first + BLOCK_N >= max_k:
            end = start + length
            if row == rows - 1:
                end = tl.maximum(end, total)
            zero_rows(dk_base, start + used, end, dk_token, BLOCK_N, DIM, BLOCK_D)
            zero_rows(dv_base, start + used, end, dv_token, BLOCK_N, V_DIM, BLOCK_V)
