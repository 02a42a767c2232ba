"""Softmax attention inside diagonal blocks, forward and backward, with rotary embedding in the same pass.

A tile is ``ROWS`` consecutive tokens of one row: one block, or several small ones. All keys that its queries see lie in it, so the softmax needs no
second look and nothing is saved for the backward pass, which recomputes it: forward reads q, k, v and writes out, backward reads q, k, v, dout and
writes dq, dk, dv, each once. The heads of a tile are neighbours in the grid, so that the angles they share come from L2.

Gradients, with p the weights: dv = pᵀ do, ds = p * (do vᵀ - rowsum(p * do vᵀ)), dq = ds k, dk = dsᵀ q. Rotations are orthogonal: the gradient of an
input is the gradient of its rotated form, turned back.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, row_span, store_rows, zero_rows

_VARYING = ["rows", "total", "max_length", "tiles"]
LOG2E = tl.constexpr(1.4426950408889634)
# 2 pi in two parts: whole turns times the first are exact up to 100,000 radians, the second is the rest.
TURN, TURN_REST, TURNS = tl.constexpr(6.28125), tl.constexpr(0.0019353071795864769), tl.constexpr(0.15915494309189535)


@triton.jit
def _cos_sin(angles, FAST: tl.constexpr):
    """Cosines and sines. FAST takes the special function unit after reduction to [-pi, pi]: 2e-6 off, below any 16-bit rounding."""
    if FAST:
        turns = tl.floor(angles * TURNS + 0.5)
        reduced = (angles - turns * TURN) - turns * TURN_REST
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [reduced], dtype=tl.float32, is_pure=True, pack=1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [reduced], dtype=tl.float32, is_pure=True, pack=1)
    else:
        cos = tl.cos(angles)
        sin = tl.sin(angles)
    return cos, sin


@triton.jit
def _turn(x, cos, sin, ROWS: tl.constexpr, HALF: tl.constexpr):
    """Turn interleaved pairs of ``x [ROWS, 2 HALF]`` by the angles of ``cos`` and ``sin [ROWS, HALF]``, in float32."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [ROWS, HALF, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, 2 * HALF])


@triton.jit
def _place(work, heads, offsets, chunks, rows, total, max_length, CHUNK: tl.constexpr):
    """Of one piece of work: its head, its first token in the row, the end of its tokens there, the row's first token, and the span ``[used, end)``
    that it is to zero behind the row (empty but for the last chunk of a row)."""
    head = work % heads
    first = work // heads % chunks * CHUNK
    row = work // heads // chunks
    start, length = row_span(offsets, row, total)
    used = tl.minimum(length, max_length)
    end = start + length
    if row == rows - 1:
        end = tl.maximum(end, total)
    end = tl.where(first + CHUNK >= max_length, end, start + used)
    return head, first, tl.minimum(first + CHUNK, used), start, start + used, end


@triton.jit
def _weights(q, k, count, scale, BLOCK: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Softmax weights ``[ROWS, ROWS]``; zeros for a query whose block has no token."""
    i = tl.arange(0, ROWS)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    visible = (i < count)[None, :]
    if BLOCK < ROWS:
        visible = visible & ((i // BLOCK)[:, None] == (i // BLOCK)[None, :])
    s = tl.where(visible, s, float("-inf"))
    m = tl.max(s, 1)
    p = tl.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    z = tl.sum(p, 1)
    return p * (1.0 / tl.where(z == 0.0, 1.0, z))[:, None]


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, rope, out, offsets, rows, heads, total, max_length, tiles, scale, q_token, q_head, k_token, k_head, v_token, v_head, rope_token,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROPE: tl.constexpr, ROPE_V: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes one head of a chunk of ``CHUNK`` tokens, tile by tile: the next tile is on its way while one is computed. ``out`` is
    contiguous."""
    chunks = tl.cdiv(max_length, CHUNK)
    out_token = heads * V_DIM
    for work in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        head, low, high, start, used, end = _place(work, heads, offsets, chunks, rows, total, max_length, CHUNK)
        q_base = q + head * q_head + start * q_token
        k_base = k + head * k_head + start * k_token
        v_base = v + head * v_head + start * v_token
        for first in tl.range(low, high, SPAN, num_stages=STAGES):
            until = tl.minimum(first + SPAN, high)
            q_tile = load_rows(q_base, first, until, q_token, ROWS, DIM, BLOCK_D)
            k_tile = load_rows(k_base, first, until, k_token, ROWS, DIM, BLOCK_D)
            v_tile = load_rows(v_base, first, until, v_token, ROWS, V_DIM, BLOCK_V)
            if ROPE:
                angles = load_rows(rope + start * rope_token, first, until, rope_token, ROWS, DIM // 2, BLOCK_D // 2)
                cos, sin = _cos_sin(angles, FAST)
                q_tile = _turn(q_tile, cos, sin, ROWS, BLOCK_D // 2).to(q_tile.dtype)
                k_tile = _turn(k_tile, cos, sin, ROWS, BLOCK_D // 2).to(k_tile.dtype)
                if ROPE_V:
                    v_tile = _turn(v_tile, cos, sin, ROWS, BLOCK_D // 2).to(v_tile.dtype)
            p = _weights(q_tile, k_tile, (until - first).to(tl.int32), scale, BLOCK, ROWS, PRECISION)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
            store_rows(out + head * V_DIM + start * out_token, o, first, until, out_token, ROWS, V_DIM, BLOCK_V)
        zero_rows(out + head * V_DIM, used, end, out_token, ROWS, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(
    q, k, v, rope, dout, dq, dk, dv, offsets, rows, heads, total, max_length, tiles, scale,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_token,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROPE: tl.constexpr, ROPE_V: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``; gradients are contiguous."""
    chunks = tl.cdiv(max_length, CHUNK)
    d_token = heads * DIM
    v_out = heads * V_DIM
    for work in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        head, low, high, start, used, end = _place(work, heads, offsets, chunks, rows, total, max_length, CHUNK)
        q_base = q + head * q_head + start * q_token
        k_base = k + head * k_head + start * k_token
        v_base = v + head * v_head + start * v_token
        do_base = dout + head * V_DIM + start * v_out
        for first in tl.range(low, high, SPAN, num_stages=STAGES):
            until = tl.minimum(first + SPAN, high)
            q_tile = load_rows(q_base, first, until, q_token, ROWS, DIM, BLOCK_D)
            k_tile = load_rows(k_base, first, until, k_token, ROWS, DIM, BLOCK_D)
            v_tile = load_rows(v_base, first, until, v_token, ROWS, V_DIM, BLOCK_V)
            do_tile = load_rows(do_base, first, until, v_out, ROWS, V_DIM, BLOCK_V)
            if ROPE:
                angles = load_rows(rope + start * rope_token, first, until, rope_token, ROWS, DIM // 2, BLOCK_D // 2)
                cos, sin = _cos_sin(angles, FAST)
                q_tile = _turn(q_tile, cos, sin, ROWS, BLOCK_D // 2).to(q_tile.dtype)
                k_tile = _turn(k_tile, cos, sin, ROWS, BLOCK_D // 2).to(k_tile.dtype)
                if ROPE_V:
                    v_tile = _turn(v_tile, cos, sin, ROWS, BLOCK_D // 2).to(v_tile.dtype)
            p = _weights(q_tile, k_tile, (until - first).to(tl.int32), scale, BLOCK, ROWS, PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q_tile.dtype)
            dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision=PRECISION)
            if ROPE and ROPE_V:
                dv_tile = _turn(dv_tile, cos, -sin, ROWS, BLOCK_D // 2)
            store_rows(dv + head * V_DIM + start * v_out, dv_tile, first, until, v_out, ROWS, V_DIM, BLOCK_V)
            dq_tile = tl.dot(ds, k_tile, input_precision=PRECISION)
            if ROPE:
                dq_tile = _turn(dq_tile, cos, -sin, ROWS, BLOCK_D // 2)
            store_rows(dq + head * DIM + start * d_token, dq_tile, first, until, d_token, ROWS, DIM, BLOCK_D)
            dk_tile = tl.dot(tl.trans(ds), q_tile, input_precision=PRECISION)
            if ROPE:
                dk_tile = _turn(dk_tile, cos, -sin, ROWS, BLOCK_D // 2)
            store_rows(dk + head * DIM + start * d_token, dk_tile, first, until, d_token, ROWS, DIM, BLOCK_D)
        zero_rows(dq + head * DIM, used, end, d_token, ROWS, DIM, BLOCK_D)
        zero_rows(dk + head * DIM, used, end, d_token, ROWS, DIM, BLOCK_D)
        zero_rows(dv + head * V_DIM, used, end, v_out, ROWS, V_DIM, BLOCK_V)
