"""HSTU's attention in portable Triton: out = silu(scale q kᵀ + bias) v / norm under the mask of ``gem_core.ops.hstu_attention``.

Backward, with x the scores, p = silu(x) and g = silu'(x): dv = pᵀ do, dx = g * (do vᵀ), dq = scale dx k, dk = scale dxᵀ q, dbias = dx, each over
norm. Two passes without atomics, and a third for the bias; nothing is saved but the inputs. Tokens past the end of a row are loaded as zeros: padded
values and upstream gradients are zero, so padding adds nothing even where a bias makes its scores non-zero.

Arguments shared by the kernels: ``*_token`` and ``*_head`` are strides in elements, ``bias_row`` and ``bias_head`` too (0 where the bias is shared);
outputs and ``dout`` are contiguous, but that a token of the memory of a gradient holds ``D*_PARTS`` like it. Compile-time arguments are in capitals.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, store_rows, zero_rows
from gem_kernels.ops.hstu_attention.spans import key_spans, masked_tile, masked_tiles, query_spans, row_parts, visible

_VARYING = ["rows", "total", "max_length", "tiles", "window"]


@triton.jit
def _gate(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)). FAST takes the tanh of the special function unit: 2^-11 off, below any 16-bit rounding."""
    if FAST:
        half = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x * 0.5], dtype=tl.float32, is_pure=True, pack=1)
        return half * 0.5 + 0.5
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _load_bias(bias, i, j, n, max_length):
    """``[len(i), len(j)]`` of one row's and head's bias, zeros past the end of the row; ``i`` and ``j`` broadcast against each other."""
    return tl.load(bias + i.to(tl.int64) * max_length + j, mask=(i < n) & (j < n), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, bias, out, offsets, contextual, targets, rows, heads, total, max_length, tiles, scale, norm, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` queries of one (row, head), the last ones of a row first: under a causal mask they take longest."""
    q_tiles = tl.cdiv(max_length, BLOCK_M)
    out_token = heads * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = ((q_tiles - 1 - tile % q_tiles) * BLOCK_M).to(tl.int32)
        head = tile // q_tiles % heads
        row = tile // q_tiles // heads
        start, behind, n, prefix, end = row_parts(offsets, contextual, targets, row, rows, total, max_length, CONTEXTUAL, TARGETS)
        out_base = out + head * V_DIM
        wide = start * 0  # makes positions 64-bit where they are multiplied by a stride
        if first < n:
            q_tile = load_rows(q + head * q_head + start * q_token, wide + first, n, q_token, BLOCK_M, DIM, BLOCK_D)
            k_base = k + head * k_head + start * k_token
            v_base = v + head * v_head + start * v_token
            bias_base = bias
            if BIAS:
                bias_base = bias + row * bias_row + head * bias_head
            i = (first + tl.arange(0, BLOCK_M))[:, None]
            low, high, whole, whole_end, before, own, own_end = key_spans(
                first, n, prefix, end, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, CONTEXTUAL, TARGETS
            )
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            for m in range(whole, whole_end, BLOCK_N):
                k_tile = load_rows(k_base, wide + m, n, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, wide + m, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
                x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                if BIAS:
                    x += _load_bias(bias_base, i, (m + tl.arange(0, BLOCK_N))[None, :], n, max_length)
                acc = tl.dot((x * _gate(x, FAST)).to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            for t in range(masked_tiles(low, high, whole, whole_end, before, own, own_end, BLOCK_N)):
                m, bound = masked_tile(t, low, high, whole, whole_end, before, own, own_end, BLOCK_N)
                j = (m + tl.arange(0, BLOCK_N))[None, :]
                k_tile = load_rows(k_base, wide + m, n, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, wide + m, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
                x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                if BIAS:
                    x += _load_bias(bias_base, i, j, n, max_length)
                seen = visible(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS) & (j < bound)
                p = tl.where(seen, x * _gate(x, FAST), 0.0)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            store_rows(out_base + start * out_token, acc * norm, wide + first, n, out_token, BLOCK_M, V_DIM, BLOCK_V)
        if first + BLOCK_M >= max_length:
            zero_rows(out_base, start + n, behind, out_token, BLOCK_M, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=_VARYING)
def query_grad_kernel(
    q, k, v, bias, dout, dq, offsets, contextual, targets, rows, heads, total, max_length, tiles, scale, norm, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DQ_PARTS: tl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``."""
    q_tiles = tl.cdiv(max_length, BLOCK_M)
    do_token = heads * V_DIM
    dq_token = heads * DIM * DQ_PARTS
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = ((q_tiles - 1 - tile % q_tiles) * BLOCK_M).to(tl.int32)
        head = tile // q_tiles % heads
        row = tile // q_tiles // heads
        start, behind, n, prefix, end = row_parts(offsets, contextual, targets, row, rows, total, max_length, CONTEXTUAL, TARGETS)
        dq_base = dq + head * DIM
        wide = start * 0  # makes positions 64-bit where they are multiplied by a stride
        if first < n:
            q_tile = load_rows(q + head * q_head + start * q_token, wide + first, n, q_token, BLOCK_M, DIM, BLOCK_D)
            do_tile = load_rows(dout + head * V_DIM + start * do_token, wide + first, n, do_token, BLOCK_M, V_DIM, BLOCK_V)
            k_base = k + head * k_head + start * k_token
            v_base = v + head * v_head + start * v_token
            bias_base = bias
            if BIAS:
                bias_base = bias + row * bias_row + head * bias_head
            i = (first + tl.arange(0, BLOCK_M))[:, None]
            low, high, whole, whole_end, before, own, own_end = key_spans(
                first, n, prefix, end, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, CONTEXTUAL, TARGETS
            )
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for m in range(whole, whole_end, BLOCK_N):
                k_tile = load_rows(k_base, wide + m, n, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, wide + m, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
                x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                dx = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if BIAS:
                    x += _load_bias(bias_base, i, (m + tl.arange(0, BLOCK_N))[None, :], n, max_length)
                gate = _gate(x, FAST)
                dx *= gate + x * gate * (1.0 - gate)
                acc = tl.dot(dx.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
            for t in range(masked_tiles(low, high, whole, whole_end, before, own, own_end, BLOCK_N)):
                m, bound = masked_tile(t, low, high, whole, whole_end, before, own, own_end, BLOCK_N)
                j = (m + tl.arange(0, BLOCK_N))[None, :]
                k_tile = load_rows(k_base, wide + m, n, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, wide + m, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
                x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                dx = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                if BIAS:
                    x += _load_bias(bias_base, i, j, n, max_length)
                gate = _gate(x, FAST)
                dx *= gate + x * gate * (1.0 - gate)
                dx = tl.where(visible(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS) & (j < bound), dx, 0.0)
                acc = tl.dot(dx.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
            store_rows(dq_base + start * dq_token, acc * (scale * norm), wide + first, n, dq_token, BLOCK_M, DIM, BLOCK_D)
        if first + BLOCK_M >= max_length:
            zero_rows(dq_base, start + n, behind, dq_token, BLOCK_M, DIM, BLOCK_D)


@triton.jit(do_not_specialize=_VARYING)
def key_grad_kernel(
    q, k, v, bias, dout, dk, dv, offsets, contextual, targets, rows, heads, total, max_length, tiles, scale, norm, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
    DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_N`` keys of one (row, head). Scores are kept transposed, ``[keys, queries]``: they enter the last two products as left
    operands, straight from registers."""
    k_tiles = tl.cdiv(max_length, BLOCK_N)
    do_token = heads * V_DIM
    dk_token = heads * DIM * DK_PARTS
    dv_token = heads * V_DIM * DV_PARTS
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = (tile % k_tiles * BLOCK_N).to(tl.int32)
        head = tile // k_tiles % heads
        row = tile // k_tiles // heads
        start, behind, n, prefix, end = row_parts(offsets, contextual, targets, row, rows, total, max_length, CONTEXTUAL, TARGETS)
        dk_base = dk + head * DIM
        dv_base = dv + head * V_DIM
        wide = start * 0  # makes positions 64-bit where they are multiplied by a stride
        if first < n:
            k_tile = load_rows(k + head * k_head + start * k_token, wide + first, n, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v + head * v_head + start * v_token, wide + first, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
            q_base = q + head * q_head + start * q_token
            do_base = dout + head * V_DIM + start * do_token
            bias_base = bias
            if BIAS:
                bias_base = bias + row * bias_row + head * bias_head
            j = (first + tl.arange(0, BLOCK_N))[:, None]
            low, high, whole, whole_end, before, own, own_end = query_spans(
                first, n, prefix, end, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, CONTEXTUAL, TARGETS
            )
            dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            for m in range(whole, whole_end, BLOCK_M):
                q_tile = load_rows(q_base, wide + m, n, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(do_base, wide + m, n, do_token, BLOCK_M, V_DIM, BLOCK_V)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
                dx = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                if BIAS:
                    x += _load_bias(bias_base, (m + tl.arange(0, BLOCK_M))[None, :], j, n, max_length)
                gate = _gate(x, FAST)
                p = x * gate
                dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                dx *= gate + p * (1.0 - gate)
                dk_acc = tl.dot(dx.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
            for t in range(masked_tiles(low, high, whole, whole_end, before, own, own_end, BLOCK_M)):
                m, bound = masked_tile(t, low, high, whole, whole_end, before, own, own_end, BLOCK_M)
                i = (m + tl.arange(0, BLOCK_M))[None, :]
                q_tile = load_rows(q_base, wide + m, n, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(do_base, wide + m, n, do_token, BLOCK_M, V_DIM, BLOCK_V)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
                dx = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                if BIAS:
                    x += _load_bias(bias_base, i, j, n, max_length)
                gate = _gate(x, FAST)
                p = x * gate
                dx *= gate + p * (1.0 - gate)
                seen = visible(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS) & (i < bound)
                dv_acc = tl.dot(tl.where(seen, p, 0.0).to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                dk_acc = tl.dot(tl.where(seen, dx, 0.0).to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
            store_rows(dk_base + start * dk_token, dk_acc * (scale * norm), wide + first, n, dk_token, BLOCK_N, DIM, BLOCK_D)
            store_rows(dv_base + start * dv_token, dv_acc * norm, wide + first, n, dv_token, BLOCK_N, V_DIM, BLOCK_V)
        if first + BLOCK_N >= max_length:
            zero_rows(dk_base, start + n, behind, dk_token, BLOCK_N, DIM, BLOCK_D)
            zero_rows(dv_base, start + n, behind, dv_token, BLOCK_N, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=[*_VARYING, "row_group"])
def bias_grad_kernel(
    q, k, v, bias, dout, dbias, offsets, contextual, targets, rows, heads, total, max_length, tiles, scale, norm, window,
    q_token, q_head, k_token, k_head, v_token, v_head, bias_row, bias_head, row_group, head_group,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr, BIAS: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``[BLOCK_M, BLOCK_N]`` of one bias; the ``row_group`` rows and ``head_group`` heads that share it are added in order."""
    side_m = tl.cdiv(max_length, BLOCK_M)
    side_n = tl.cdiv(max_length, BLOCK_N)
    head_groups = heads // head_group
    do_token = heads * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        key = (tile % side_n * BLOCK_N).to(tl.int32)
        query = (tile // side_n % side_m * BLOCK_M).to(tl.int32)
        plane = tile // side_n // side_m
        head_first = plane % head_groups * head_group
        row_first = plane // head_groups * row_group
        i = (query + tl.arange(0, BLOCK_M))[:, None]
        j = (key + tl.arange(0, BLOCK_N))[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for row in range(row_first, row_first + row_group):
            start, _, n, prefix, end = row_parts(offsets, contextual, targets, row, rows, total, max_length, CONTEXTUAL, TARGETS)
            wide = start * 0
            if (query < n) & (key < n):
                seen = visible(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS)
                for head in range(head_first, head_first + head_group):
                    q_tile = load_rows(q + head * q_head + start * q_token, wide + query, n, q_token, BLOCK_M, DIM, BLOCK_D)
                    do_tile = load_rows(dout + head * V_DIM + start * do_token, wide + query, n, do_token, BLOCK_M, V_DIM, BLOCK_V)
                    k_tile = load_rows(k + head * k_head + start * k_token, wide + key, n, k_token, BLOCK_N, DIM, BLOCK_D)
                    v_tile = load_rows(v + head * v_head + start * v_token, wide + key, n, v_token, BLOCK_N, V_DIM, BLOCK_V)
                    x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
                    x += _load_bias(bias + row * bias_row + head * bias_head, i, j, n, max_length)
                    dx = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                    gate = _gate(x, FAST)
                    acc += tl.where(seen, dx * (gate + x * gate * (1.0 - gate)), 0.0)
        target = dbias + plane * max_length * max_length + i.to(tl.int64) * max_length + j
        tl.store(target, (acc * norm).to(dbias.dtype.element_ty), mask=(i < max_length) & (j < max_length))
