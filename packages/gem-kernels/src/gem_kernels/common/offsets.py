"""Rows of jagged tensors inside kernels. All token arithmetic is 64-bit."""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton

END = tl.constexpr(2**30)


@triton.jit
def row_span(offsets, row, total):
    """First token and length of a row (int64); a row never reaches outside ``[0, total)``, whatever the offsets say."""
    start = tl.minimum(tl.maximum(tl.load(offsets + row).to(tl.int64), 0), total)
    end = tl.minimum(tl.load(offsets + row + 1).to(tl.int64), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def load_rows(base, first, count, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[ROWS, BLOCK]`` from row ``first`` on; zeros from row ``count`` and column ``WIDTH`` on.

    Offsets inside a tile are 32-bit, which halves their registers: ``launch`` sees to it that ``ROWS * stride`` fits.
    """
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < (count - first).to(tl.int32))[:, None]
    if WIDTH != BLOCK:
        mask = mask & (c < WIDTH)[None, :]
    return tl.load(base + first * stride + (r[:, None] * stride + c[None, :]), mask=mask, other=0.0)


@triton.jit
def store_rows(base, tile, first, count, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store ``[ROWS, BLOCK]`` from row ``first`` on, up to row ``count`` and column ``WIDTH``."""
    r = tl.arange(0, ROWS)
    c = tl.arange(0, BLOCK)
    mask = (r < (count - first).to(tl.int32))[:, None] & (c < WIDTH)[None, :]
    tl.store(base + first * stride + (r[:, None] * stride + c[None, :]), tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def zero_rows(base, first, count, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store zeros in rows ``[first, count)``: what no tile covers must not stay uninitialised."""
    zeros = tl.zeros([ROWS, BLOCK], tl.float32)
    for r in range(first, count, ROWS):
        store_rows(base, zeros, r, count, stride, ROWS, WIDTH, BLOCK)


@triton.jit
def load_tile(x, head, start, first, until, x_token, x_head, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENGINE: tl.constexpr):
    """``[ROWS, BLOCK]`` of one head from token ``first`` of the row at ``start``; zeros from token ``until`` on.

    ENGINE: ``x`` is a ragged descriptor of Hopper's copy engine (``common.hopper.language`` says how it ends at a row), else a pointer.
    """
    if ENGINE:
        at = [END, (start + until).to(tl.int32), (END - until + first).to(tl.int32), (head * x_head).to(tl.int32)]
        tile = tl.reshape(x.load(at), [ROWS, BLOCK])
    else:
        tile = load_rows(x + head * x_head + start * x_token, first, until, x_token, ROWS, WIDTH, BLOCK)
    return tile


@triton.jit
def store_tile(x, tile, head, start, first, until, x_token, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENGINE: tl.constexpr):
    """Store what ``load_tile`` would load, to heads that lie side by side."""
    if ENGINE:
        at = [END, (start + until).to(tl.int32), (END - until + first).to(tl.int32), (head * WIDTH).to(tl.int32)]
        x.store(at, tl.reshape(tile.to(x.dtype), [1, 1, ROWS, BLOCK]))
    else:
        store_rows(x + head * WIDTH + start * x_token, tile, first, until, x_token, ROWS, WIDTH, BLOCK)
