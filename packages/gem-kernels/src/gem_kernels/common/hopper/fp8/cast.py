"""Casts of q, k and v to E4M3 for the kernels of this package, in tiles of 128 tokens of one row and one head, zeros where a row ends.

Scales are powers of two, one a tile. A query or key is scaled so that the norm of each of its tokens is at most 128, and values so that each element
is at most 128. Twice a score of two such tiles is then at most 2^15, whatever the data (rounding may lengthen a token by 2^-4): the scale of a weight
is known before the weight. A row's *bound* brings all its weights to one scale: it is the largest scale of the row's values or, where weights
grow with scores, the largest product of it with that of the keys.

A tile with a NaN, an infinity or a size beyond 2^60 becomes NaN, which shows in every output of its row and head; a size below 2^-60 may become 0.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import os

from gem_kernels.common.language import tl, triton

TILE = tl.constexpr(128)
DIM = tl.constexpr(128)
QUARTER = tl.constexpr(32)
LARGEST = tl.constexpr(7)
"""Elements and norms are at most two to this power."""
LIMIT = tl.constexpr(56)
"""Scales are 2^-56 to 2^56, so that products of two and their inverses are float32."""
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Triton's interpreter knows no assembly."""


@triton.jit
def place_of(token):
    """The place in its tile of a key: where the columns of the scores are renamed so that no weight has to change its thread."""
    return token // 16 * 16 + token // 2 % 2 * 8 + token // 4 % 4 * 2 + token % 2


@triton.jit
def _exponent(bits):
    """The least e with ``size <= 2^e``, for the bits of a normal size; -127 for those of 0, 128 for those of infinities and NaN."""
    return ((tl.minimum(bits, 0x7F800000) + 0x7FFFFF) >> 23) - 127


@triton.jit
def _power(exponent):
    """2^exponent, float32, for -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sizes(x):
    """The bits of |x|: their order as integers is that of sizes, and infinities and NaN stand above every number."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(exponent):
    """The scale of a tile whose sizes are at most ``2^exponent``, and its inverse."""
    power = tl.maximum(exponent - LARGEST, -LIMIT)
    fits = power <= LIMIT
    power = tl.minimum(power, LIMIT)
    return tl.where(fits, _power(power), float("nan")), tl.where(fits, _power(-power), float("nan"))


@triton.jit
def _scale_by_norm(x):
    """The scale of a tile of tokens ``[128, 128]`` by the largest norm of one, and its inverse."""
    norm = tl.sqrt(tl.sum(x * x, 1))
    return _scale(_exponent(tl.max(_sizes(norm), 0)))


@triton.jit
def _span(records, tile, KEYS: tl.constexpr):
    """The first token of a tile, and how many from there on are used: see ``schedule.RECORD``."""
    first = tl.load(records + tile * 8 + 1)
    column = 5 if KEYS else 2
    return tl.load(records + tile * 8 + column) + first, tl.load(records + tile * 8 + column + 1) - first


@triton.jit
def _load(x, start, count, token_stride, head_stride, head, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Tokens ``start + FIRST + STEP i`` of a head, float32, zeros from the tile's ``count`` on."""
    r = FIRST + STEP * tl.arange(0, COUNT)
    places = x + (start + r).to(tl.int64)[:, None] * token_stride + (head.to(tl.int64) * head_stride + tl.arange(0, DIM))[None, :]
    return tl.load(places, mask=(r < count)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _byte(x, SHIFT: tl.constexpr):
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << SHIFT


@triton.jit
def _word(x0, x1, x2, x3):
    """Four float32 in E4M3 as one word, ``x0`` lowest."""
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
def cast_tokens_kernel(x, token_stride, head_stride, records, count, heads, low, scales, KEYS: tl.constexpr):
    """One tile and head of queries or keys: ``low`` E4M3 ``[tiles, heads, token or place, dim]``, ``scales`` float32 ``[tiles, heads]``."""
    item = tl.program_id(0)
    tile, head = item // heads, item % heads
    if tile >= tl.load(count):
        return
    start, used = _span(records, tile, KEYS)
    if used <= 0 and KEYS:
        return
    tokens = _load(x, start, used, token_stride, head_stride, head, 0, 1, TILE)
    scale, inverse = _scale_by_norm(tokens)
    r = tl.arange(0, TILE)
    places = low + item.to(tl.int64) * (TILE * DIM) + (place_of(r) if KEYS else r)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(places, (tokens * inverse).to(tl.float8e4nv))
    tl.store(scales + item, scale)


@triton.jit
def cast_values_kernel(x, token_stride, head_stride, records, count, heads, low, scales, k_scales, bounds, bases, BY_KEY: tl.constexpr):
    """One tile and head of values, after the keys.

    Args:
        low: E4M3 ``[tiles, heads, dim, token]``, as words of four tokens.
        scales: float32 ``[tiles, heads]``, as are ``k_scales``.
        bounds: the bits of float32 ``[rows + 1, heads]``, zeros before: the largest scale of a row's values or, ``BY_KEY``, the largest product of
            one with that of its keys.
        bases: int32 ``[rows + 1]``: the number of the first tile of a row; its others have the numbers below.
    """
    item = tl.program_id(0)
    tile, head = item // heads, item % heads
    if tile >= tl.load(count):
        return
    row = tl.load(records + tile * 8)
    start, used = _span(records, tile, True)
    if tl.load(records + tile * 8 + 1) == 0:
        tl.store(bases + row, tile)
    if used <= 0:
        return
    # Four tokens that follow each other make a word in one thread: the exchange that turns a tile moves words, not bytes.
    v0 = _load(x, start, used, token_stride, head_stride, head, 0, 4, QUARTER)
    v1 = _load(x, start, used, token_stride, head_stride, head, 1, 4, QUARTER)
    v2 = _load(x, start, used, token_stride, head_stride, head, 2, 4, QUARTER)
    v3 = _load(x, start, used, token_stride, head_stride, head, 3, 4, QUARTER)
    largest = tl.maximum(tl.maximum(_sizes(v0), _sizes(v1)), tl.maximum(_sizes(v2), _sizes(v3)))
    scale, inverse = _scale(_exponent(tl.max(tl.max(largest, 1), 0)))
    words = tl.trans(_word(v0 * inverse, v1 * inverse, v2 * inverse, v3 * inverse))
    places = item.to(tl.int64) * (TILE * DIM // 4) + tl.arange(0, DIM)[:, None] * QUARTER + tl.arange(0, QUARTER)[None, :]
    tl.store(low + places, words)
    tl.store(scales + item, scale)
    size = scale * tl.load(k_scales + item) if BY_KEY else scale
    tl.atomic_max(bounds + row * heads + head, size.to(tl.int32, bitcast=True), sem="relaxed")
