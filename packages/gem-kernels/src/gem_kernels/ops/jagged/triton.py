"""Moving packed tokens to and from another place, and a matmul with one matrix a row, in portable Triton."""

# Kernels are compiled from their source: they carry no types, and branches on compile-time values keep their form.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_kernels.common.language import tl, triton
from gem_kernels.common.offsets import row_span

_VARYING = ["rows", "tokens", "tiles", "steps", "limit", "total", "max_length"]


@triton.jit(do_not_specialize=_VARYING)
def move_kernel(
    packed, other, offsets, base, skip, rows, tokens, tiles, steps, limit, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    SCATTER: tl.constexpr,
):  # fmt: skip
    """Token ``t`` of row ``r`` of ``packed [tokens, WIDTH]`` and token ``base[r] + t - skip[r]`` of ``other`` are the same; ``SCATTER`` copies the
    first to the second, else the second to the first. Tokens outside ``[0, limit)`` have no such place and are left out, or filled with zeros.

    A tile is ``TOKENS`` packed tokens, whose rows are found by ``steps`` halvings: no list of rows and no longest row is needed.
    """
    c = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        t = tile * TOKENS + tl.arange(0, TOKENS)
        low = t * 0
        high = low + rows
        for _ in range(steps):  # the row whose end is the first one past the token
            middle = (low + high) // 2
            beyond = tl.load(offsets + 1 + middle, mask=middle < rows, other=2**62) > t
            high = tl.where(beyond, middle, high)
            low = tl.where(beyond, low, tl.minimum(middle + 1, rows))
        held = (t < tokens) & (low < rows)
        place = t - tl.load(offsets + low, mask=held, other=0)
        if skip is not None:
            place -= tl.load(skip + low, mask=held, other=0)
        held = held & (place >= 0) & (place < limit)
        there = tl.load(base + low, mask=held, other=0) + place
        for column in range(0, WIDTH, BLOCK):
            inside = (column + c < WIDTH)[None, :]
            here = packed + t[:, None] * WIDTH + column + c[None, :]
            away = other + there[:, None] * WIDTH + column + c[None, :]
            if SCATTER:
                tl.store(away, tl.load(here, mask=held[:, None] & inside), mask=held[:, None] & inside)
            else:
                tl.store(here, tl.load(away, mask=held[:, None] & inside, other=0), mask=(t < tokens)[:, None] & inside)


@triton.jit
def _load(base, first, count, stride, c, width, ROWS: tl.constexpr):
    """``[ROWS, len(c)]`` of the columns ``c`` from row ``first`` on; zeros from row ``count`` and column ``width`` on."""
    r = first + tl.arange(0, ROWS)
    return tl.load(base + r[:, None] * stride + c[None, :], mask=(r < count)[:, None] & (c < width)[None, :], other=0.0)


@triton.jit
def _store(base, tile, first, count, stride, c, width, ROWS: tl.constexpr):
    """As ``_load``."""
    r = first + tl.arange(0, ROWS)
    tl.store(base + r[:, None] * stride + c[None, :], tile.to(base.dtype.element_ty), mask=(r < count)[:, None] & (c < width)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def product_kernel(
    x, matrices, bias, out, offsets, rows, total, max_length, tiles, x_token, m_row, m_in, m_out, b_row,
    INNER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``out [total, WIDTH]``: x times the matrix ``[INNER, WIDTH]`` of its row, plus its row of ``bias`` unless None. A tile is ``ROWS`` tokens of a
    row by ``BLOCK`` columns."""
    row_tiles = tl.cdiv(max_length, ROWS)
    column_tiles = tl.cdiv(WIDTH, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        c = tile % column_tiles * BLOCK + tl.arange(0, BLOCK)
        first = tile // column_tiles % row_tiles * ROWS
        row = tile // column_tiles // row_tiles
        start, length = row_span(offsets, row, total)
        used = tl.minimum(length, max_length)
        if first < used:
            acc = tl.zeros([ROWS, BLOCK], tl.float32)
            for k in range(0, INNER, STEP):
                i = k + tl.arange(0, STEP)
                x_tile = _load(x + start * x_token, first, used, x_token, i, INNER, ROWS)
                at = matrices + row * m_row + i[:, None] * m_in + c[None, :] * m_out
                m_tile = tl.load(at, mask=(i < INNER)[:, None] & (c < WIDTH)[None, :], other=0.0)
                acc = tl.dot(x_tile, m_tile, acc, input_precision=PRECISION)
            if bias is not None:
                acc += tl.load(bias + row * b_row + c, mask=c < WIDTH, other=0.0).to(tl.float32)[None, :]
            _store(out + start * WIDTH, acc, first, used, WIDTH, c, WIDTH, ROWS)
        if first + ROWS >= max_length:
            end = start + length
            if row == rows - 1:
                end = tl.maximum(end, total)
            for r in range(start + used, end, ROWS):
                _store(out, tl.zeros([ROWS, BLOCK], tl.float32), r, end, WIDTH, c, WIDTH, ROWS)


@triton.jit(do_not_specialize=_VARYING)
def matrix_grad_kernel(
    x, dout, dmatrices, dbias, offsets, rows, total, max_length, tiles, x_token,
    INNER: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dmatrices [rows, INNER, WIDTH]`` = xᵀ dout over the tokens of each row, and ``dbias [rows, WIDTH]`` their sum. A tile is ``ROWS`` inputs by
    ``BLOCK`` columns of one matrix; ``STEP`` tokens at a time."""
    inner_tiles = tl.cdiv(INNER, ROWS)
    column_tiles = tl.cdiv(WIDTH, BLOCK)
    for tile in range(tl.program_id(0).to(tl.int64), tiles, tl.num_programs(0)):
        c = tile % column_tiles * BLOCK + tl.arange(0, BLOCK)
        inner = tile // column_tiles % inner_tiles * ROWS
        row = tile // column_tiles // inner_tiles
        i = inner + tl.arange(0, ROWS)
        start, length = row_span(offsets, row, total)
        used = tl.minimum(length, max_length)
        acc = tl.zeros([ROWS, BLOCK], tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for t in range(used * 0, used, STEP):
            x_tile = _load(x + start * x_token, t, used, x_token, i, INNER, STEP)
            d_tile = _load(dout + start * WIDTH, t, used, WIDTH, c, WIDTH, STEP)
            acc = tl.dot(tl.trans(x_tile), d_tile, acc, input_precision=PRECISION)
            sums += tl.sum(d_tile.to(tl.float32), 0)
        at = dmatrices + (row * INNER + i[:, None]) * WIDTH + c[None, :]
        tl.store(at, acc.to(dmatrices.dtype.element_ty), mask=(i < INNER)[:, None] & (c < WIDTH)[None, :])
        if inner == 0:
            tl.store(dbias + row * WIDTH + c, sums.to(dbias.dtype.element_ty), mask=c < WIDTH)
