"""Softmax attention inside diagonal blocks, forward and backward, with norms of queries and keys and rotary embedding in the same pass.

A tile is ``ROWS`` consecutive tokens of one row: one block, or several small ones. All keys that its queries see lie in it, so the softmax needs no
second look and nothing is saved for the backward pass, which recomputes it: forward reads q, k, v and writes out, backward reads q, k, v, dout and
writes dq, dk, dv, each once. The heads of a tile are neighbours in the grid, so that the angles they share come from L2.

Gradients, with p the weights: dv = pᵀ do, ds = p * (do vᵀ - rowsum(p * do vᵀ)), dq = ds k, dk = dsᵀ q. Rotations are orthogonal: the gradient of an
input is the gradient of its rotated form, turned back. With norms, dq and dk are the gradients of the normed tiles: taking them through the norm here
costs more registers than a pass over rows of their own costs time.

ENGINE: q, k, v, dout and the results are ragged descriptors of Hopper's copy engine (``common.hopper.language`` says how they end at a row). Tiles
then reach shared memory past the registers, of which the backward pass has too few: with loads through them it spills.
"""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import load_rows, load_tile, row_span, store_tile, zero_rows

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


@triton.jit
def _ready(x, gain, cos, sin, eps, NORM: tl.constexpr, TURN_IT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile as it enters the products: over its rows' root mean squares and times the gain, turned; rounded once."""
    y = x
    if NORM:
        y = x.to(tl.float32)
        y *= (1.0 / tl.sqrt(tl.sum(y * y, 1) * (1.0 / WIDTH) + eps))[:, None]
        y *= gain[None, :]
    if TURN_IT:
        y = _turn(y, cos, sin, ROWS, BLOCK // 2)
    return y.to(x.dtype)


@triton.jit
def _turned_back(dy, cos, sin, TURN_IT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Gradient of a tile by that of its turned form."""
    if TURN_IT:
        dy = _turn(dy, cos, -sin, ROWS, BLOCK // 2)
    return dy


@triton.jit
def _gains(q_gain, k_gain, NORM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Both gains in float32; zeros where there is no norm, and past the width."""
    c = tl.arange(0, BLOCK)
    a = tl.zeros([BLOCK], tl.float32)
    b = tl.zeros([BLOCK], tl.float32)
    if NORM:
        a = tl.load(q_gain + c, mask=c < WIDTH, other=0.0).to(tl.float32)
        b = tl.load(k_gain + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _angles(
    rope, start, first, until, rope_token, ROPE: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr
):
    """Cosines and sines of a tile's angles ``[ROWS, BLOCK]``; of zeros where nothing is turned."""
    angles = tl.zeros([ROWS, BLOCK], tl.float32)
    if ROPE:
        angles = load_rows(rope + start * rope_token, first, until, rope_token, ROWS, HALF, BLOCK)
    return _cos_sin(angles, FAST)


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    q, k, v, rope, q_gain, k_gain, out, out_desc, offsets, rows, heads, total, max_length, tiles, scale, eps,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_token,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROPE: tl.constexpr, ROPE_V: tl.constexpr, NORM: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ENGINE: tl.constexpr,
):  # fmt: skip
    """A program takes one head of a chunk of ``CHUNK`` tokens, tile by tile: the next tile is on its way while one is computed. ``out`` is
    contiguous."""
    chunks = tl.cdiv(max_length, CHUNK)
    gain_q, gain_k = _gains(q_gain, k_gain, NORM, DIM, BLOCK_D)
    for work in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        head, low, high, start, used, end = _place(work, heads, offsets, chunks, rows, total, max_length, CHUNK)
        for first in tl.range(low, high, SPAN, num_stages=STAGES):
            until = tl.minimum(first + SPAN, high)
            q_tile = load_tile(q, head, start, first, until, q_token, q_head, ROWS, DIM, BLOCK_D, ENGINE)
            k_tile = load_tile(k, head, start, first, until, k_token, k_head, ROWS, DIM, BLOCK_D, ENGINE)
            v_tile = load_tile(v, head, start, first, until, v_token, v_head, ROWS, V_DIM, BLOCK_V, ENGINE)
            cos, sin = _angles(rope, start, first, until, rope_token, ROPE, ROWS, DIM // 2, BLOCK_D // 2, FAST)
            q_tile = _ready(q_tile, gain_q, cos, sin, eps, NORM, ROPE, DIM, ROWS, BLOCK_D)
            k_tile = _ready(k_tile, gain_k, cos, sin, eps, NORM, ROPE, DIM, ROWS, BLOCK_D)
            v_tile = _ready(v_tile, gain_q, cos, sin, eps, False, ROPE_V, V_DIM, ROWS, BLOCK_V)
            p = _weights(q_tile, k_tile, (until - first).to(tl.int32), scale, BLOCK, ROWS, PRECISION)
            o = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
            store_tile(out_desc if ENGINE else out, o, head, start, first, until, heads * V_DIM, ROWS, V_DIM, BLOCK_V, ENGINE)
        zero_rows(out + head * V_DIM, used, end, heads * V_DIM, ROWS, V_DIM, BLOCK_V)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(
    q, k, v, rope, q_gain, k_gain, dout, dq, dk, dv, dq_desc, dk_desc, dv_desc, offsets, rows, heads, total, max_length, tiles, scale, eps,
    q_token, q_head, k_token, k_head, v_token, v_head, rope_token,
    DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROPE: tl.constexpr, ROPE_V: tl.constexpr, NORM: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, ENGINE: tl.constexpr,
    DQ_PARTS: tl.constexpr, DK_PARTS: tl.constexpr, DV_PARTS: tl.constexpr,
):  # fmt: skip
    """As ``forward_kernel``; ``dout`` is contiguous; a token of the memory of a gradient holds ``D*_PARTS`` like it."""
    chunks = tl.cdiv(max_length, CHUNK)
    gain_q, gain_k = _gains(q_gain, k_gain, NORM, DIM, BLOCK_D)
    dq_token = heads * DIM * DQ_PARTS
    dk_token = heads * DIM * DK_PARTS
    dv_token = heads * V_DIM * DV_PARTS
    for work in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        head, low, high, start, used, end = _place(work, heads, offsets, chunks, rows, total, max_length, CHUNK)
        for first in tl.range(low, high, SPAN, num_stages=STAGES):
            until = tl.minimum(first + SPAN, high)
            q_tile = load_tile(q, head, start, first, until, q_token, q_head, ROWS, DIM, BLOCK_D, ENGINE)
            k_tile = load_tile(k, head, start, first, until, k_token, k_head, ROWS, DIM, BLOCK_D, ENGINE)
            v_tile = load_tile(v, head, start, first, until, v_token, v_head, ROWS, V_DIM, BLOCK_V, ENGINE)
            do_tile = load_tile(dout, head, start, first, until, heads * V_DIM, V_DIM, ROWS, V_DIM, BLOCK_V, ENGINE)
            cos, sin = _angles(rope, start, first, until, rope_token, ROPE, ROWS, DIM // 2, BLOCK_D // 2, FAST)
            q_tile = _ready(q_tile, gain_q, cos, sin, eps, NORM, ROPE, DIM, ROWS, BLOCK_D)
            k_tile = _ready(k_tile, gain_k, cos, sin, eps, NORM, ROPE, DIM, ROWS, BLOCK_D)
            v_tile = _ready(v_tile, gain_q, cos, sin, eps, False, ROPE_V, V_DIM, ROWS, BLOCK_V)
            p = _weights(q_tile, k_tile, (until - first).to(tl.int32), scale, BLOCK, ROWS, PRECISION)
            dp = tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION)
            ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q_tile.dtype)
            dv_tile = tl.dot(tl.trans(p.to(do_tile.dtype)), do_tile, input_precision=PRECISION)
            dv_tile = _turned_back(dv_tile, cos, sin, ROPE_V, ROWS, BLOCK_V)
            store_tile(dv_desc if ENGINE else dv, dv_tile, head, start, first, until, dv_token, ROWS, V_DIM, BLOCK_V, ENGINE)
            dq_tile = _turned_back(tl.dot(ds, k_tile, input_precision=PRECISION), cos, sin, ROPE, ROWS, BLOCK_D)
            store_tile(dq_desc if ENGINE else dq, dq_tile, head, start, first, until, dq_token, ROWS, DIM, BLOCK_D, ENGINE)
            dk_tile = _turned_back(tl.dot(tl.trans(ds), q_tile, input_precision=PRECISION), cos, sin, ROPE, ROWS, BLOCK_D)
            store_tile(dk_desc if ENGINE else dk, dk_tile, head, start, first, until, dk_token, ROWS, DIM, BLOCK_D, ENGINE)
        zero_rows(dq + head * DIM, used, end, dq_token, ROWS, DIM, BLOCK_D)
        zero_rows(dk + head * DIM, used, end, dk_token, ROWS, DIM, BLOCK_D)
        zero_rows(dv + head * V_DIM, used, end, dv_token, ROWS, V_DIM, BLOCK_V)
