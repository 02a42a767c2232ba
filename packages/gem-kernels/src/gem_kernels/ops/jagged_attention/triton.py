"""Softmax attention over jagged rows in portable Triton, and its gradients in separate passes without atomics.

With s = scale q kᵀ + bias over the keys that a query sees, lse = log Σ exp(s), p = exp(s - lse): out = p v. Backward, with delta = Σ do · out:
dv = pᵀ do, ds = p (do vᵀ - delta), dq = scale ds k, dk = scale dsᵀ q, dbias = ds. Scores are kept in powers of two: exp2 is what the hardware has.

Programs stride over the tiles of a list of ``gem_kernels.common.schedule`` times the heads; ``*_token``, ``*_head`` are strides in elements;
outputs and ``dout`` are contiguous, but that a token of the memory of a gradient holds ``D*_PARTS`` like it. ``lse`` and ``delta`` are
``[heads, out_tokens]`` float32; ``lse`` is an exponent of two, and infinity for a query without key: its weights are 0. Compile-time arguments are in
capitals. ``SHARED``: one query for all rows, whose outputs and gradients lie row by row.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, row_span, store_rows
from gem_kernels.common.tiles import keys_seen, queries_seeing, read_tile, sees

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(-8.5e37)
"""A quarter of the lowest float32: a finite bias never becomes infinite, whatever is added."""
_VARYING = ["rows", "out_tokens", "q_tokens", "k_tokens", "window", "max_q", "max_k", "tiles"]


@triton.jit
def _scores(dots, distance, keys, k_used, scale, window, bias_tile, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr):
    """Scores as exponents of two, minus infinity where hidden."""
    s = dots * (scale * LOG2_E)
    if BIAS:
        # tl.where would let NaN through the comparison with minus infinity; maximum alone would make a removed key visible.
        s += tl.where(bias_tile == float("-inf"), float("-inf"), tl.maximum(bias_tile, LOWEST) * LOG2_E)
    visible = keys < k_used
    if CAUSAL or WINDOW:
        visible = visible & sees(distance, window, CAUSAL, WINDOW)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _load_bias(bias, queries, keys, q_used, k_used, stride_q, stride_k):
    inside = (queries < q_used) & (keys < k_used)
    return tl.load(bias + queries.to(tl.int64) * stride_q + keys.to(tl.int64) * stride_k, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_column(base, first, count, other, ROWS: tl.constexpr):
    r = tl.arange(0, ROWS)
    return tl.load(base + first + r, mask=r < (count - first).to(tl.int32), other=other)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, bias, out, lse, records, count, rows, heads, out_tokens, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, bias_q, bias_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` queries of one row; its heads follow each other."""
    out_token = heads * V_DIM
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * heads, tl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, _ = read_tile(records, item // heads)
        k_first, k_end = keys_seen(first, q_used, k_used, window, BLOCK_M, CAUSAL, WINDOW)
        q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
        k_base = k + head // GROUP * k_head + k_start * k_token
        v_base = v + head // GROUP * v_head + k_start * v_token
        queries = (first + tl.arange(0, BLOCK_M)).to(tl.int32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for n in range(k_first, k_end, BLOCK_N):
            k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            keys = (n + tl.arange(0, BLOCK_N)).to(tl.int32)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            bias_tile = s
            if BIAS:
                bias_tile = _load_bias(bias + row * bias_row + head * bias_head, queries[:, None], keys[None, :], q_used, k_used, bias_q, bias_k)
            distance = (queries + (k_used - q_used).to(tl.int32))[:, None] - keys[None, :]
            s = _scores(s, distance, keys[None, :], k_used.to(tl.int32), scale, window, bias_tile, CAUSAL, WINDOW, BIAS)
            new_top = tl.maximum(top, tl.max(s, 1))
            # A query that has seen no key yet keeps a finite reference: infinity less infinity is no number.
            reference = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.exp2(s - reference[:, None])
            shrink = tl.exp2(top - reference)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
            top = new_top
        some = (total > 0.0) & (queries < q_used)
        acc = tl.where(some[:, None], acc / tl.where(total > 0.0, total, 1.0)[:, None], 0.0)
        sums = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("inf"))
        out_start = row * q_used if SHARED else q_start
        store_rows(out + head * V_DIM + out_start * out_token, acc, first, q_length, out_token, BLOCK_M, V_DIM, BLOCK_V)
        tl.store(lse + head * out_tokens + out_start + queries, sums, mask=queries < q_length)


@triton.jit(do_not_specialize=_VARYING)
def query_grad_kernel(
    q, k, v, bias, out, lse, dout, dq, delta, records, count, rows, heads, out_tokens, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, bias_q, bias_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    DQ_PARTS: tl.constexpr,
):  # fmt: skip
    """As the forward kernel; also writes ``delta``, which the other gradients need."""
    out_token = heads * V_DIM
    dq_token = heads * DIM * DQ_PARTS
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * heads, tl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, _ = read_tile(records, item // heads)
        k_first, k_end = keys_seen(first, q_used, k_used, window, BLOCK_M, CAUSAL, WINDOW)
        out_start = row * q_used if SHARED else q_start
        out_base = out_start * out_token + head * V_DIM
        q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
        do_tile = load_rows(dout + out_base, first, q_used, out_token, BLOCK_M, V_DIM, BLOCK_V)
        o_tile = load_rows(out + out_base, first, q_used, out_token, BLOCK_M, V_DIM, BLOCK_V)
        deltas = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
        sums = _load_column(lse + head * out_tokens + out_start, first, q_used, float("inf"), BLOCK_M)
        k_base = k + head // GROUP * k_head + k_start * k_token
        v_base = v + head // GROUP * v_head + k_start * v_token
        queries = (first + tl.arange(0, BLOCK_M)).to(tl.int32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(k_first, k_end, BLOCK_N):
            k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            keys = (n + tl.arange(0, BLOCK_N)).to(tl.int32)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            bias_tile = s
            if BIAS:
                bias_tile = _load_bias(bias + row * bias_row + head * bias_head, queries[:, None], keys[None, :], q_used, k_used, bias_q, bias_k)
            distance = (queries + (k_used - q_used).to(tl.int32))[:, None] - keys[None, :]
            s = _scores(s, distance, keys[None, :], k_used.to(tl.int32), scale, window, bias_tile, CAUSAL, WINDOW, BIAS)
            ds = tl.exp2(s - sums[:, None]) * (dp - deltas[:, None])
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        store_rows(dq + head * DIM + out_start * dq_token, acc * scale, first, q_length, dq_token, BLOCK_M, DIM, BLOCK_D)
        tl.store(delta + head * out_tokens + out_start + queries, deltas, mask=queries < q_length)


@triton.jit(do_not_specialize=_VARYING)
def key_grad_kernel(
    q, k, v, bias, lse, dout, delta, dk, dv, records, count, rows, heads, out_tokens, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, bias_q, bias_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BIAS: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_N`` keys of one row; the query heads of a key head are added in registers, in head order.

    Scores are kept transposed, ``[keys, queries]``: they enter the last two products as left operands, straight from registers.
    """
    kv_heads = heads // GROUP
    do_token = heads * V_DIM
    dk_token = kv_heads * DIM * DK_PARTS
    dv_token = kv_heads * V_DIM * DV_PARTS
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * kv_heads, tl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, _, k_start, k_used, k_length = read_tile(records, item // kv_heads)
        q_first, q_end = queries_seeing(first, q_used, k_used, window, BLOCK_N, CAUSAL, WINDOW)
        out_start = row * q_used if SHARED else q_start
        k_tile = load_rows(k + kv_head * k_head + k_start * k_token, first, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
        v_tile = load_rows(v + kv_head * v_head + k_start * v_token, first, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
        keys = (first + tl.arange(0, BLOCK_N)).to(tl.int32)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            q_base = q + head * q_head + q_start * q_token
            do_base = dout + head * V_DIM + out_start * do_token
            for m in range(q_first, q_end, BLOCK_M):
                q_tile = load_rows(q_base, m, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(do_base, m, q_used, do_token, BLOCK_M, V_DIM, BLOCK_V)
                sums = _load_column(lse + head * out_tokens + out_start, m, q_used, float("inf"), BLOCK_M)
                deltas = _load_column(delta + head * out_tokens + out_start, m, q_used, 0.0, BLOCK_M)
                queries = (m + tl.arange(0, BLOCK_M)).to(tl.int32)
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                dp = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                bias_tile = s
                if BIAS:
                    bias_tile = _load_bias(bias + row * bias_row + head * bias_head, queries[None, :], keys[:, None], q_used, k_used, bias_q, bias_k)
                distance = (queries + (k_used - q_used).to(tl.int32))[None, :] - keys[:, None]
                s = _scores(s, distance, keys[:, None], k_used.to(tl.int32), scale, window, bias_tile, CAUSAL, WINDOW, BIAS)
                p = tl.exp2(s - sums[None, :])
                ds = p * (dp - deltas[None, :])
                dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
        store_rows(dk + kv_head * DIM + k_start * dk_token, dk_acc * scale, first, k_length, dk_token, BLOCK_N, DIM, BLOCK_D)
        store_rows(dv + kv_head * V_DIM + k_start * dv_token, dv_acc, first, k_length, dv_token, BLOCK_N, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=_VARYING)
def bias_grad_kernel(
    q, k, v, bias, lse, dout, delta, dbias, q_offsets, k_offsets, rows, heads, out_tokens, q_tokens, k_tokens, max_q, max_k, tiles, scale, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, bias_q, bias_k,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PER_ROW: tl.constexpr, PER_HEAD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``[BLOCK_M, BLOCK_N]`` of one bias matrix; the rows and heads that share the matrix are added in registers, in order."""
    k_tiles = tl.cdiv(max_k, BLOCK_N)
    q_tiles = tl.cdiv(max_q, BLOCK_M)
    out_token = heads * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        n = tile % k_tiles * BLOCK_N
        m = tile // k_tiles % q_tiles * BLOCK_M
        matrix = tile // k_tiles // q_tiles
        queries = (m + tl.arange(0, BLOCK_M)).to(tl.int32)
        keys = (n + tl.arange(0, BLOCK_N)).to(tl.int32)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        bias_rows = rows if PER_ROW else 1
        first_row = matrix % bias_rows
        first_head = matrix // bias_rows
        for member in range((1 if PER_ROW else rows) * (1 if PER_HEAD else heads)):
            head = (matrix * 0) + (first_head if PER_HEAD else member % heads)
            row = (matrix * 0) + (first_row if PER_ROW else (member if PER_HEAD else member // heads))
            k_start, k_length = row_span(k_offsets, row, k_tokens)
            k_used = tl.minimum(k_length, max_k)
            if q_offsets is None:
                q_used = k_used * 0 + max_q
                q_start = k_used * 0
                out_start = row * max_q
            else:
                q_start, q_length = row_span(q_offsets, row, q_tokens)
                q_used = tl.minimum(q_length, max_q)
                out_start = q_start
            if (m < q_used) & (n < k_used):
                q_tile = load_rows(q + head * q_head + q_start * q_token, m, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(dout + head * V_DIM + out_start * out_token, m, q_used, out_token, BLOCK_M, V_DIM, BLOCK_V)
                k_tile = load_rows(k + head // GROUP * k_head + k_start * k_token, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v + head // GROUP * v_head + k_start * v_token, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
                sums = _load_column(lse + head * out_tokens + out_start, m, q_used, float("inf"), BLOCK_M)
                deltas = _load_column(delta + head * out_tokens + out_start, m, q_used, 0.0, BLOCK_M)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                bias_tile = _load_bias(bias + row * bias_row + head * bias_head, queries[:, None], keys[None, :], q_used, k_used, bias_q, bias_k)
                distance = (queries + (k_used - q_used).to(tl.int32))[:, None] - keys[None, :]
                s = _scores(s, distance, keys[None, :], k_used.to(tl.int32), scale, window, bias_tile, CAUSAL, WINDOW, True)
                acc += tl.exp2(s - sums[:, None]) * (dp - deltas[:, None])
        # dbias is contiguous, [bias rows, bias heads, max_q, max_k].
        base = dbias + (first_row * (heads if PER_HEAD else 1) + first_head) * max_q.to(tl.int64) * max_k
        inside = (queries < max_q)[:, None] & (keys < max_k)[None, :]
        tl.store(base + queries.to(tl.int64)[:, None] * max_k + keys[None, :], acc.to(dbias.dtype.element_ty), mask=inside)
