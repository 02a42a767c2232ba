"""The end of the personalised feed-forward block: y = RMSNorm(o + LayerNorm(q0)) + q0, and its gradient, a pass over memory each.

The norms are over whole tokens, ``WIDTH`` values of all heads, without scale and shift. LayerNorm is taken again from q0, which is read anyway.
Tokens past the given maximum of their row give zeros and get zero gradients.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import row_span, zero_rows
from gem_kernels.ops.norm_linear.rows import load_tile, norm_grad, normalise, store_tile

_VARYING = ["rows", "total", "max_q", "tiles"]


@triton.jit
def _tile(tile, offsets, rows, total, max_q, ROWS: tl.constexpr):
    """Of one tile: its first token, the end of the used tokens of its row, the end of what is to be zeroed behind them, and whether it does that."""
    row_tiles = tl.cdiv(max_q, ROWS)
    row = tile // row_tiles
    start, length = row_span(offsets, row, total)
    end = start + length
    if row == rows - 1:
        end = tl.maximum(end, total)
    return start + tile % row_tiles * ROWS, start + tl.minimum(length, max_q), end, tile % row_tiles == row_tiles - 1


@triton.jit(do_not_specialize=_VARYING)
def forward_kernel(
    o, q0, out, offsets, rows, total, max_q, tiles, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A tile is ``ROWS`` tokens of one row; all tensors are contiguous ``[total, WIDTH]``."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first, until, end, is_last = _tile(tile, offsets, rows, total, max_q, ROWS)
        if first < until:
            q = load_tile(q0, first, until, WIDTH, WIDTH, ROWS, BLOCK)
            ln, _ = normalise(q, eps, True, WIDTH, BLOCK)
            n, _ = normalise(load_tile(o, first, until, WIDTH, WIDTH, ROWS, BLOCK) + ln, eps, False, WIDTH, BLOCK)
            store_tile(out, n + q, first, until, WIDTH, WIDTH, ROWS, BLOCK)
        if is_last:
            zero_rows(out, until, end, WIDTH, ROWS, WIDTH, BLOCK)


@triton.jit(do_not_specialize=_VARYING)
def backward_kernel(
    o, q0, dy, do, dq0, offsets, rows, total, max_q, tiles, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """As ``forward_kernel``; ``dq0`` is what q0 gets here, past what reaches it through o."""
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        first, until, end, is_last = _tile(tile, offsets, rows, total, max_q, ROWS)
        if first < until:
            ln, ln_factor = normalise(load_tile(q0, first, until, WIDTH, WIDTH, ROWS, BLOCK), eps, True, WIDTH, BLOCK)
            n, factor = normalise(load_tile(o, first, until, WIDTH, WIDTH, ROWS, BLOCK) + ln, eps, False, WIDTH, BLOCK)
            g = load_tile(dy, first, until, WIDTH, WIDTH, ROWS, BLOCK)
            dz = norm_grad(n, factor, g, False, WIDTH)
            store_tile(do, dz, first, until, WIDTH, WIDTH, ROWS, BLOCK)
            store_tile(dq0, norm_grad(ln, ln_factor, dz, True, WIDTH) + g, first, until, WIDTH, WIDTH, ROWS, BLOCK)
        if is_last:
            zero_rows(do, until, end, WIDTH, ROWS, WIDTH, BLOCK)
            zero_rows(dq0, until, end, WIDTH, ROWS, WIDTH, BLOCK)
