"""GDPA in portable Triton: out = c f(s) v with s = q kᵀ, and its gradients in two passes without atomics.

Backward, with p = c f(s) and g = c f'(s): dv = pᵀ do, ds = g * (do vᵀ), dq = ds k, dk = dsᵀ q. Nothing is saved but the inputs.
Tiles of queries and keys are independent of each other, since there is no softmax. Rows past the end of a sequence are loaded as zeros, which every
activation maps to zero: no mask is needed on the scores but that of the window.

Grids are one-dimensional (other grid axes end at 65,535) and programs stride over the tiles, so the grid may be capped. Tiles are enumerated from
``max_q`` or ``max_k``, known on the host; a tile past the end of its row ends at once.

Arguments shared by the kernels: ``q_offsets`` is None for a query that all rows share, ``k_offsets`` is None for dense keys (one strided row each);
``*_row``, ``*_token``, ``*_head`` are strides in elements; outputs and ``dout`` are contiguous. Compile-time arguments are in capitals.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: SIM102, SIM108

from gem_kernels.common.activations import activate, slope_of
from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, row_span, store_rows, zero_rows

# These change from batch to batch: a kernel compiled once serves all their values.
_VARYING = ["rows", "q_total", "k_total", "max_q", "max_k", "tiles", "window", "rows_per_tile"]


@triton.jit
def _query_span(q_offsets, row, max_q, q_total):
    """Of one row: first query, queries used, end of the row, and the first token of its output."""
    if q_offsets is None:
        used = max_q.to(tl.int64)
        start = used * 0
        end = used
        out = row * used
    else:
        start, length = row_span(q_offsets, row, q_total)
        used = tl.minimum(length, max_q)
        end = start + length
        out = start
    return start, used, end, out


@triton.jit
def _key_span(k_offsets, row, max_k, k_total):
    """Of one row: first key, keys used, end of the row, and the first token of its gradients."""
    if k_offsets is None:
        used = max_k.to(tl.int64)
        start = used * 0
        end = used
        out = row * used
    else:
        start, length = row_span(k_offsets, row, k_total)
        used = tl.minimum(length, max_k)
        end = start + length
        out = start
    return start, used, end, out


@triton.jit
def _near(queries, keys, window):
    """Which positions lie within the window of each other."""
    distance = queries - keys
    return (distance <= window) & (distance >= -window)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, out, q_offsets, k_offsets, rows, heads, q_total, k_total, max_q, max_k, tiles, scale, window,
    q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` queries of one (row, head); the query tiles of a row and head follow each other, so that they share keys in L2."""
    q_tiles = tl.cdiv(max_q, BLOCK_M)
    out_token = heads * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % q_tiles * BLOCK_M
        head = tile // q_tiles % heads
        row = tile // q_tiles // heads
        q_start, q_used, q_end, out_start = _query_span(q_offsets, row, max_q, q_total)
        out_base = out + head * V_DIM
        if first < q_used:
            k_start, k_used, _, _ = _key_span(k_offsets, row, max_k, k_total)
            q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
            k_base = k + row * k_row + head // GROUP * k_head + k_start * k_token
            v_base = v + row * v_row + head // GROUP * v_head + k_start * v_token
            position = first + k_used - q_used
            k_first = k_used * 0
            if WINDOW:
                k_first = tl.maximum(position - window, 0)
                k_used = tl.minimum(position + BLOCK_M + window, k_used)
            acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
            for n in range(k_first, k_used, BLOCK_N):
                k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
                v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
                s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                if SCALE_AFTER:
                    p = activate(s, ACTIVATION) * scale
                else:
                    p = activate(s * scale, ACTIVATION)
                if WINDOW:
                    p = tl.where(_near((position + tl.arange(0, BLOCK_M))[:, None], (n + tl.arange(0, BLOCK_N))[None, :], window), p, 0.0)
                acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
            store_rows(out_base + out_start * out_token, acc, first, q_used, out_token, BLOCK_M, V_DIM, BLOCK_V)
        if q_offsets is not None:
            if first + BLOCK_M >= max_q:
                if row == rows - 1:
                    q_end = tl.maximum(q_end, q_total)
                zero_rows(out_base, q_start + q_used, q_end, out_token, BLOCK_M, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=_VARYING)
def query_grad_kernel(
    q, k, v, dout, dq, q_offsets, k_offsets, rows, heads, q_total, k_total, max_q, max_k, tiles, rows_per_tile, scale, window,
    q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` queries of one head and ``rows_per_tile`` rows: one row, or for a shared query a run of rows whose gradients are added
    in registers, in row order; ``dq`` then is ``[runs * queries, heads, dim]`` float32 and the caller adds the runs.
    """
    q_tiles = tl.cdiv(max_q, BLOCK_M)
    dq_token = heads * DIM
    do_token = heads * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % q_tiles * BLOCK_M
        head = tile // q_tiles % heads
        run = tile // q_tiles // heads
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for row in range(run * rows_per_tile, tl.minimum((run + 1) * rows_per_tile, rows)):
            q_start, q_used, _, out_start = _query_span(q_offsets, row, max_q, q_total)
            if first < q_used:
                k_start, k_used, _, _ = _key_span(k_offsets, row, max_k, k_total)
                q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(dout + head * V_DIM + out_start * do_token, first, q_used, do_token, BLOCK_M, V_DIM, BLOCK_V)
                k_base = k + row * k_row + head // GROUP * k_head + k_start * k_token
                v_base = v + row * v_row + head // GROUP * v_head + k_start * v_token
                position = first + k_used - q_used
                k_first = k_used * 0
                if WINDOW:
                    k_first = tl.maximum(position - window, 0)
                    k_used = tl.minimum(position + BLOCK_M + window, k_used)
                for n in range(k_first, k_used, BLOCK_N):
                    k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
                    v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
                    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    ds = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
                    if SCALE_AFTER:
                        ds *= slope_of(s, ACTIVATION) * scale
                    else:
                        ds *= slope_of(s * scale, ACTIVATION)
                    if WINDOW:
                        near = _near((position + tl.arange(0, BLOCK_M))[:, None], (n + tl.arange(0, BLOCK_N))[None, :], window)
                        ds = tl.where(near, ds, 0.0)
                    acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        if not SCALE_AFTER:
            acc *= scale
        dq_base = dq + head * DIM
        if q_offsets is None:
            store_rows(dq_base + run * max_q * dq_token, acc, first, max_q, dq_token, BLOCK_M, DIM, BLOCK_D)
        else:
            q_start, q_used, q_end, _ = _query_span(q_offsets, run, max_q, q_total)
            store_rows(dq_base + q_start * dq_token, acc, first, q_used, dq_token, BLOCK_M, DIM, BLOCK_D)
            if first + BLOCK_M >= max_q:
                if run == rows - 1:
                    q_end = tl.maximum(q_end, q_total)
                zero_rows(dq_base, q_start + q_used, q_end, dq_token, BLOCK_M, DIM, BLOCK_D)


@triton.jit(do_not_specialize=_VARYING)
def key_grad_kernel(
    q, k, v, dout, dk, dv, q_offsets, k_offsets, rows, kv_heads, q_total, k_total, max_q, max_k, tiles, scale, window,
    q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_N`` keys of one (row, key head); the ``GROUP`` query heads of that key head are added in registers, in head order.

    Scores are kept transposed, ``[keys, queries]``: they enter the last two products as left operands, straight from registers.
    """
    k_tiles = tl.cdiv(max_k, BLOCK_N)
    dk_token = kv_heads * DIM
    dv_token = kv_heads * V_DIM
    do_token = kv_heads * GROUP * V_DIM
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first = tile % k_tiles * BLOCK_N
        kv_head = tile // k_tiles % kv_heads
        row = tile // k_tiles // kv_heads
        k_start, k_used, k_end, grad_start = _key_span(k_offsets, row, max_k, k_total)
        dk_base = dk + kv_head * DIM
        dv_base = dv + kv_head * V_DIM
        if first < k_used:
            q_start, q_used, _, out_start = _query_span(q_offsets, row, max_q, q_total)
            k_tile = load_rows(k + row * k_row + kv_head * k_head + k_start * k_token, first, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v + row * v_row + kv_head * v_head + k_start * v_token, first, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            shift = k_used - q_used
            q_first = q_used * 0
            if WINDOW:
                q_first = tl.maximum(first - shift - window, 0)
                q_used = tl.minimum(first + BLOCK_N - shift + window, q_used)
            dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
            for member in range(GROUP):
                head = kv_head * GROUP + member
                q_base = q + head * q_head + q_start * q_token
                do_base = dout + head * V_DIM + out_start * do_token
                for m in range(q_first, q_used, BLOCK_M):
                    q_tile = load_rows(q_base, m, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
                    do_tile = load_rows(do_base, m, q_used, do_token, BLOCK_M, V_DIM, BLOCK_V)
                    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                    ds = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                    if SCALE_AFTER:
                        p = activate(s, ACTIVATION) * scale
                        ds *= slope_of(s, ACTIVATION) * scale
                    else:
                        p = activate(s * scale, ACTIVATION)
                        ds *= slope_of(s * scale, ACTIVATION)
                    if WINDOW:
                        near = _near((m + shift + tl.arange(0, BLOCK_M))[None, :], (first + tl.arange(0, BLOCK_N))[:, None], window)
                        p = tl.where(near, p, 0.0)
                        ds = tl.where(near, ds, 0.0)
                    dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
            if not SCALE_AFTER:
                dk_acc *= scale
            store_rows(dk_base + grad_start * dk_token, dk_acc, first, k_used, dk_token, BLOCK_N, DIM, BLOCK_D)
            store_rows(dv_base + grad_start * dv_token, dv_acc, first, k_used, dv_token, BLOCK_N, V_DIM, BLOCK_V)
        if k_offsets is not None:
            if first + BLOCK_N >= max_k:
                if row == rows - 1:
                    k_end = tl.maximum(k_end, k_total)
                zero_rows(dk_base, k_start + k_used, k_end, dk_token, BLOCK_N, DIM, BLOCK_D)
                zero_rows(dv_base, k_start + k_used, k_end, dv_token, BLOCK_N, V_DIM, BLOCK_V)
