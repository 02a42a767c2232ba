"""The cast of a bfloat16 matrix along both of its axes, on 32-bit words of two neighbours.

The number of its instructions bounds a cast. Here magnitudes are compared and scales computed two at a time. Where sums over rows are asked for, a
program casts one tile after the other of the same 128 columns: the next tile comes while it works, and sums stay in registers until its end.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from gem_precision.kernels.language import BLOCK, INTERPRETED, QUARTER, interleaved, inverse_scale, scale, tl, triton, word

PAIRS = tl.constexpr(64)


@triton.jit
def _first(w):
    """The lower of two bfloat16, float32."""
    return (w << 16).to(tl.float32, bitcast=True)


@triton.jit
def _second(w):
    return (w & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _both_again(w):
    """``_first`` and ``_second``, which the compiler does not know to be the same: it would keep 64 numbers in registers from one
    use to the next."""
    if INTERPRETED:
        return _first(w), _second(w)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;", "=&f,=f,r", [w], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def _larger(a, b):
    """The larger of each pair of 16 bits, without sign."""
    if INTERPRETED:
        return (tl.maximum((a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF) << 16) | tl.maximum(a & 0xFFFF, b & 0xFFFF)
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _largest(w, AXIS: tl.constexpr):
    if INTERPRETED:
        return (tl.max((w >> 16) & 0xFFFF, AXIS) << 16) | tl.max(w & 0xFFFF, AXIS)
    return tl.reduce(w, AXIS, _larger)


@triton.jit
def _largest_of_rows(w):
    """Of magnitudes, as bits of float32."""
    pair = _largest(w, 1)
    return tl.maximum(pair << 16, pair & -0x10000)


@triton.jit
def _two_numbers(w, bits):
    """Two bfloat16 as float32, NaN where ``bits`` has a NaN or an infinity: there, times 0 is none either."""
    return tl.fma(_first(bits), 0.0, _first(w)), tl.fma(_second(bits), 0.0, _second(w))


@triton.jit
def _scales(bits):
    """Of two blocks whose largest magnitudes are these: scales and their inverses, as ``language.scale`` has them."""
    eight = 0x04000400  # in exponents of bfloat16
    powers = _larger((bits + 0x001F001F) & -0x7F0080, eight) - eight
    first, second = _two_numbers(_larger(powers, 0x00400040), bits)
    by_first, by_second = _two_numbers(0x7F007F00 - powers, bits)
    return first, second, by_first, by_second


@triton.jit
def _store_elements(w, factor, out, places):
    """A quarter in E4M3, ``factor`` a number for each row."""
    first, second = _first(w) * factor[:, None], _second(w) * factor[:, None]
    if INTERPRETED:
        two = first.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int16) | (
            second.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int16) << 8
        )
    else:
        two = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $3, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $2;
            mov.b32 $0, {low, high}; }""",
            "=r,f,f,f,f",
            [first, second],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    tl.store(out + places, two)


@triton.jit
def cast_words_kernel(x, stride, rows, columns, padded, out, out_scale, turned, turned_scale, sums, SUM: tl.constexpr, STAGES: tl.constexpr):
    """Tiles of the same 128 columns, of every so many strips of 128 rows; with ``SUM`` also the sums of their columns, ``sums [groups, columns]``.

    Places inside a tile are 32-bit numbers behind one address.

    Args:
        x: ``[rows, columns / 2]`` words, rows ``stride`` words apart.
        out: ``[padded, columns]`` E4M3 as ``[padded, columns / 2]`` pairs.
        out_scale, turned, turned_scale: as in ``language.store_both``.
    """
    across = columns // BLOCK
    column_tile = tl.program_id(0) % across
    column = column_tile * BLOCK
    four, pair, c = 4 * tl.arange(0, QUARTER), tl.arange(0, PAIRS), tl.arange(0, BLOCK)
    from_, to = four[:, None] * stride + pair[None, :], four[:, None] * (columns // 2) + pair[None, :]
    to_scale, to_turned = four[:, None] + tl.arange(0, 4)[None, :], c[:, None] * (padded // 4) + tl.arange(0, QUARTER)[None, :]
    x, out, turned_scale = x + column // 2, out + column // 2, turned_scale + column
    out_scale, turned = out_scale + column_tile.to(tl.int64) * padded, turned + column.to(tl.int64) * (padded // 4)
    first_sum, second_sum = tl.zeros([QUARTER, PAIRS], tl.float32), tl.zeros([QUARTER, PAIRS], tl.float32)
    for strip in tl.range(tl.program_id(0) // across, padded // BLOCK, tl.num_programs(0) // across, num_stages=STAGES):
        row = tl.cast(strip, tl.int64) * BLOCK
        tile, target, left = x + row * stride, out + row * (columns // 2), rows - strip * BLOCK
        w0 = tl.load(tile + from_, mask=(four < left)[:, None], other=0)
        w1 = tl.load(tile + stride + from_, mask=(four + 1 < left)[:, None], other=0)
        w2 = tl.load(tile + 2 * stride + from_, mask=(four + 2 < left)[:, None], other=0)
        w3 = tl.load(tile + 3 * stride + from_, mask=(four + 3 < left)[:, None], other=0)
        m0, m1, m2, m3 = w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF, w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF
        b0, b1, b2, b3 = _largest_of_rows(m0), _largest_of_rows(m1), _largest_of_rows(m2), _largest_of_rows(m3)
        _store_elements(w0, inverse_scale(b0), target, to)
        _store_elements(w1, inverse_scale(b1), target + columns // 2, to)
        _store_elements(w2, inverse_scale(b2), target + columns, to)
        _store_elements(w3, inverse_scale(b3), target + columns // 2 * 3, to)
        tl.store(out_scale + row + to_scale, scale(interleaved(b0, b1, b2, b3)))
        first, second, f, g = _scales(_largest(_larger(_larger(m0, m1), _larger(m2, m3)), 0))
        if SUM:  # without sums, all fits in registers
            f0, s0 = _both_again(w0)
            f1, s1 = _both_again(w1)
            f2, s2 = _both_again(w2)
            f3, s3 = _both_again(w3)
        else:
            f0, f1, f2, f3 = _first(w0), _first(w1), _first(w2), _first(w3)
            s0, s1, s2, s3 = _second(w0), _second(w1), _second(w2), _second(w3)
        f, g = f[None, :], g[None, :]
        words = tl.interleave(word(f0 * f, f1 * f, f2 * f, f3 * f), word(s0 * g, s1 * g, s2 * g, s3 * g))
        tl.store(turned + row // 4 + to_turned, tl.trans(words))
        tl.store(turned_scale + tl.cast(strip, tl.int64) * columns + c, tl.interleave(first, second))
        if SUM:
            first_sum += (f0 + f1) + (f2 + f3)
            second_sum += (s0 + s1) + (s2 + s3)
    if SUM:
        tl.store(sums + tl.program_id(0) // across * columns + column + c, tl.sum(tl.interleave(first_sum, second_sum), 0))
