"""GDPA in portable Triton: out = c f(s) v with s = q kᵀ, and its gradients in two passes without atomics.

Backward, with p = c f(s) and g = c f'(s): dv = pᵀ do, ds = g * (do vᵀ), dq = ds k, dk = dsᵀ q. Nothing is saved but the inputs.
Tiles of queries and keys are independent of each other, since there is no softmax. Rows past the end of a sequence are loaded as zeros, which every
activation maps to zero: no mask is needed on the scores but that of the window.

Programs stride over the tiles of a list of ``gem_kernels.common.schedule`` times the heads; ``*_token``, ``*_head`` are strides in elements;
outputs and ``dout`` are contiguous. Compile-time arguments are in capitals. ``SHARED``: one query for all rows, whose outputs and gradients lie row
after row.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.activations import activate_scaled, both_scaled, slope_scaled
from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, store_rows
from gem_kernels.common.tiles import keys_seen, queries_seeing, read_tile, sees


@triton.jit(do_not_specialize=["window"])
def forward_kernel(
    q, k, v, out, records, count, heads, scale, window, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_M`` queries of one row; its heads follow each other."""
    out_token = heads * V_DIM
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * heads, tl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, _ = read_tile(records, item // heads)
        k_first, k_end = keys_seen(first, q_used, k_used, window, BLOCK_M, False, WINDOW)
        q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
        k_base = k + head // GROUP * k_head + k_start * k_token
        v_base = v + head // GROUP * v_head + k_start * v_token
        position = first + k_used - q_used
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        for n in range(k_first, k_end, BLOCK_N):
            k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            p = activate_scaled(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
            if WINDOW:
                distance = ((position - n).to(tl.int32) + tl.arange(0, BLOCK_M))[:, None] - tl.arange(0, BLOCK_N)[None, :]
                p = tl.where(sees(distance, window, False, True), p, 0.0)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        if SCALE_AFTER:
            acc *= scale
        out_start = row * q_used if SHARED else q_start
        store_rows(out + head * V_DIM + out_start * out_token, acc, first, q_length, out_token, BLOCK_M, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=["window"])
def query_grad_kernel(
    q, k, v, dout, dq, records, count, heads, scale, window, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As the forward kernel."""
    dq_token = heads * DIM
    do_token = heads * V_DIM
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * heads, tl.num_programs(0)):
        head = item % heads
        row, first, q_start, q_used, q_length, k_start, k_used, _ = read_tile(records, item // heads)
        k_first, k_end = keys_seen(first, q_used, k_used, window, BLOCK_M, False, WINDOW)
        out_start = row * q_used if SHARED else q_start
        q_tile = load_rows(q + head * q_head + q_start * q_token, first, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
        do_tile = load_rows(dout + head * V_DIM + out_start * do_token, first, q_used, do_token, BLOCK_M, V_DIM, BLOCK_V)
        k_base = k + head // GROUP * k_head + k_start * k_token
        v_base = v + head // GROUP * v_head + k_start * v_token
        position = first + k_used - q_used
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for n in range(k_first, k_end, BLOCK_N):
            k_tile = load_rows(k_base, n, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
            v_tile = load_rows(v_base, n, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
            s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            ds = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds *= slope_scaled(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
            if WINDOW:
                distance = ((position - n).to(tl.int32) + tl.arange(0, BLOCK_M))[:, None] - tl.arange(0, BLOCK_N)[None, :]
                ds = tl.where(sees(distance, window, False, True), ds, 0.0)
            acc = tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
        store_rows(dq + head * DIM + out_start * dq_token, acc * scale, first, q_length, dq_token, BLOCK_M, DIM, BLOCK_D)


@triton.jit(do_not_specialize=["window"])
def key_grad_kernel(
    q, k, v, dout, dk, dv, records, count, heads, scale, window, q_token, q_head, k_token, k_head, v_token, v_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, ACTIVATION: tl.constexpr, SCALE_AFTER: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile is ``BLOCK_N`` keys of one row; the ``GROUP`` query heads of a key head are added in registers, in head order.

    Scores are kept transposed, ``[keys, queries]``: they enter the last two products as left operands, straight from registers.
    """
    kv_heads = heads // GROUP
    dk_token = kv_heads * DIM
    dv_token = kv_heads * V_DIM
    do_token = heads * V_DIM
    for item in range(tl.program_id(0).to(tl.int64), tl.load(count).to(tl.int64) * kv_heads, tl.num_programs(0)):
        kv_head = item % kv_heads
        row, first, q_start, q_used, _, k_start, k_used, k_length = read_tile(records, item // kv_heads)
        q_first, q_end = queries_seeing(first, q_used, k_used, window, BLOCK_N, False, WINDOW)
        out_start = row * q_used if SHARED else q_start
        k_tile = load_rows(k + kv_head * k_head + k_start * k_token, first, k_used, k_token, BLOCK_N, DIM, BLOCK_D)
        v_tile = load_rows(v + kv_head * v_head + k_start * v_token, first, k_used, v_token, BLOCK_N, V_DIM, BLOCK_V)
        shift = k_used - q_used - first
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            q_base = q + head * q_head + q_start * q_token
            do_base = dout + head * V_DIM + out_start * do_token
            for m in range(q_first, q_end, BLOCK_M):
                q_tile = load_rows(q_base, m, q_used, q_token, BLOCK_M, DIM, BLOCK_D)
                do_tile = load_rows(do_base, m, q_used, do_token, BLOCK_M, V_DIM, BLOCK_V)
                s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
                ds = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
                p, slope = both_scaled(s, 1.0 if SCALE_AFTER else scale, ACTIVATION)
                ds *= slope
                if WINDOW:
                    distance = ((m + shift).to(tl.int32) + tl.arange(0, BLOCK_M))[None, :] - tl.arange(0, BLOCK_N)[:, None]
                    near = sees(distance, window, False, True)
                    p = tl.where(near, p, 0.0)
                    ds = tl.where(near, ds, 0.0)
                dv_acc = tl.dot(p.to(do_tile.dtype), do_tile, dv_acc, input_precision=PRECISION)
                dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
        if SCALE_AFTER:
            dv_acc *= scale
        store_rows(dk + kv_head * DIM + k_start * dk_token, dk_acc * scale, first, k_length, dk_token, BLOCK_N, DIM, BLOCK_D)
        store_rows(dv + kv_head * V_DIM + k_start * dv_token, dv_acc, first, k_length, dv_token, BLOCK_N, V_DIM, BLOCK_V)
