"""What every kernel that writes ``fp8_block`` shares: tiles, scales, elements.

A tile is 128 x 128 and comes as four *quarters* ``[32, 128]``: quarter ``j`` holds the rows ``4 g + j``. A thread then owns the same element of four
rows that follow each other, packs them into a 32-bit word, and the transposed copy goes through shared memory word by word. Elements of eight bits
one by one would make that exchange slower than the memory.

Scales are powers of two, the smallest with ``amax / scale <= 448``, and 2^-127 for a block of zeros; a NaN or an infinity makes its block NaN. That
is ``gem_precision.formats`` to the bit.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

from gem_core.spec import MachineError

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise MachineError(
        "a native kernel of gem-precision", "triton is not installed", "Install it: python3 -m pip install 'gem-precision[native]'."
    ) from error

__all__ = ["TensorDescriptor", "tl", "triton"]

MULTIPROCESSORS = 132
"""Of an H100 or H200. Fewer programs than this leave some idle."""
BLOCK = tl.constexpr(128)
QUARTER = tl.constexpr(32)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter knows no assembly."""


@triton.jit
def magnitude(x):
    """The bits of ``|x|``, float32: their order as integers is that of the values, and infinities and NaN stand above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponent(bits):
    """127 + the exponent of the scale of a block whose largest magnitude has these bits: 0 to 248."""
    # 448 is 1.75 * 2^8: a significand above 1.75 carries into the exponent
    return tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 0)


@triton.jit
def scale(bits):
    """The scale of a block, float32; NaN where the block holds a NaN or an infinity."""
    power = tl.maximum(_exponent(bits) << 23, 0x400000)  # 2^-127 is subnormal
    return tl.where(bits >= 0x7F800000, 0x7FC00000, power).to(tl.float32, bitcast=True)


@triton.jit
def inverse_scale(bits):
    """1 / scale, exact."""
    return tl.where(bits >= 0x7F800000, 0x7FC00000, (254 - _exponent(bits)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(bits):
    """The scale of a block in E8M0, eight bits: its exponent and 127, or 255 where the block holds a NaN or an infinity."""
    return tl.where(bits >= 0x7F800000, 255, _exponent(bits)).to(tl.uint8)


@triton.jit
def _byte(x, SHIFT: tl.constexpr):
    """``x`` in E4M3, its bits at their place in a word."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << SHIFT


@triton.jit
def word(x0, x1, x2, x3):
    """Four float32 in E4M3 as one 32-bit word, ``x0`` lowest."""
    if INTERPRETED:
        return _byte(x0, 0) | _byte(x1, 8) | _byte(x2, 16) | _byte(x3, 24)
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f",
        [x0, x1, x2, x3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_turned(q0, q1, q2, q3, factor, base, row, column, stride):
    """A tile in E4M3, transposed: ``base[column + c, row + r]``.

    Args:
        q0, q1, q2, q3: its quarters.
        factor: what to multiply each of them with, ``[32 or 1, 128]`` or a number.
        base: a matrix of 32-bit words, four elements each, whose rows are ``stride`` words apart.
        row: the tile's first row, a multiple of 128.
        column: its first column, int64.
    """
    words = word(q0 * factor, q1 * factor, q2 * factor, q3 * factor)
    columns = column + tl.arange(0, BLOCK)
    places = row // 4 + tl.arange(0, QUARTER)
    tl.store(base + columns[:, None] * stride + places[None, :], tl.trans(words))


@triton.jit
def store_elements(quarter, out, row, column, columns):
    """Rows ``row + 4 g`` of a tile, scaled already, into ``out [rows, columns]`` E4M3."""
    rows = row + 4 * tl.arange(0, QUARTER)
    tl.store(out + rows[:, None] * columns + (column + tl.arange(0, BLOCK))[None, :], quarter.to(tl.float8e4nv))


@triton.jit
def largest(q0, q1, q2, q3):
    """Magnitudes of four quarters, the largest of each place: ``[32, 128]``."""
    return tl.maximum(tl.maximum(magnitude(q0), magnitude(q1)), tl.maximum(magnitude(q2), magnitude(q3)))


@triton.jit
def interleaved(x0, x1, x2, x3):
    """A number for each row of four quarters, ``[32]`` each, in the order of rows: ``[32, 4]``."""
    return tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [QUARTER, 4])


@triton.jit
def store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale):
    """A tile in 1 x 128 blocks along either axis.

    Args:
        q0, q1, q2, q3: its quarters, float32.
        row_tile, column_tile: its place.
        columns, padded: columns and rows of the matrix, multiples of 128.
        out, out_scale: ``[padded, columns]`` E4M3 and ``[columns / 128, padded]`` float32.
        turned, turned_scale: ``[columns, padded]`` E4M3 as ``[columns, padded / 4]`` words, and ``[padded / 128, columns]`` float32.
    """
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    b0, b1, b2, b3 = tl.max(magnitude(q0), 1), tl.max(magnitude(q1), 1), tl.max(magnitude(q2), 1), tl.max(magnitude(q3), 1)
    store_elements(q0 * inverse_scale(b0)[:, None], out, row, column, columns)
    store_elements(q1 * inverse_scale(b1)[:, None], out, row + 1, column, columns)
    store_elements(q2 * inverse_scale(b2)[:, None], out, row + 2, column, columns)
    store_elements(q3 * inverse_scale(b3)[:, None], out, row + 3, column, columns)
    rows = row + 4 * tl.arange(0, QUARTER)[:, None] + tl.arange(0, 4)[None, :]
    # one store of all 128 scales: each exchange between threads costs two barriers
    tl.store(out_scale + tl.cast(column_tile, tl.int64) * padded + rows, scale(interleaved(b0, b1, b2, b3)))
    bits = tl.max(largest(q0, q1, q2, q3), 0)
    store_turned(q0, q1, q2, q3, inverse_scale(bits)[None, :], turned, row, column.to(tl.int64), padded // 4)
    tl.store(turned_scale + row_tile.to(tl.int64) * columns + column + tl.arange(0, BLOCK), scale(bits))


@triton.jit
def store_square(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale, EACH: tl.constexpr):
    """A tile in one block; its transpose crosses shared memory in words, as in ``store_turned``.

    Elements that crossed it one by one (``tl.trans`` of E4M3) came out as other bits on an H200, with Triton 3.6.

    Args:
        q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, turned: as ``store_both`` has them.
        out_scale: ``[padded / 128, columns / 128]``; or with ``EACH``, which repeats a scale for each row, ``[columns / 128, padded]``.
        turned_scale: ``[columns / 128, padded / 128]``.
    """
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    bits = tl.max(tl.max(largest(q0, q1, q2, q3), 1), 0)
    factor, power = inverse_scale(bits), scale(bits)
    store_elements(q0 * factor, out, row, column, columns)
    store_elements(q1 * factor, out, row + 1, column, columns)
    store_elements(q2 * factor, out, row + 2, column, columns)
    store_elements(q3 * factor, out, row + 3, column, columns)
    store_turned(q0, q1, q2, q3, factor, turned, row, column.to(tl.int64), padded // 4)
    if EACH:
        tl.store(out_scale + column_tile.to(tl.int64) * padded + row + tl.arange(0, BLOCK), tl.zeros([BLOCK], tl.float32) + power)
    else:
        tl.store(out_scale + row_tile * (columns // BLOCK) + column_tile, power)
    tl.store(turned_scale + column_tile * (padded // BLOCK) + row_tile, power)
