"""Weights of scores as E4M3: four in a word, made in one piece of assembly, and handed to the product that reads them."""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import struct

from gem_kernels.common.activations import TANH_U1, TANH_U3, U1, U3
from gem_kernels.common.hopper.gluon import gl, gluon


@gluon.jit
def words_of(x):
    """Four neighbours in E4M3 as one word, its halves exchanged, in the first of their four places; the others hold nothing.

    Elements of eight bits that a loop carries are taken apart and put together one by one. And a word that was ready for the product would go to
    registers that the product before still reads, for which the assembler makes products wait: that its halves must be exchanged keeps it elsewhere.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $5, $4;
        cvt.rn.satfinite.e4m3x2.f32 high, $7, $6;
        mov.b32 $0, {high, low}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }""",
        "=r,=r,=r,=r,f,f,f,f",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def elements(words):
    """The elements of ``words_of``, for a product that starts afterwards."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, 0, 0x1032;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4)


PACK = """cvt.rn.satfinite.e4m3x2.f16x2 low, y; cvt.rn.satfinite.e4m3x2.f16x2 high, z;
        mov.b32 $0, {high, low}; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"""


def _constants(**values: float) -> str:
    """Assembly that declares and sets pairs of float16, by name."""
    bits = {name: int.from_bytes(struct.pack("<e", value), "little") for name, value in values.items()}
    return " ".join(f".reg .b32 {name}; mov.b32 {name}, 0x{value:04x}{value:04x};" for name, value in bits.items())


def _gelu_words(u1: float, u3: float) -> str:
    """Assembly: four scores, $4 to $7, and pairs of float16 with the sharpness $8, the factor $12 and twice the factor $16, to one of ``words_of``.

    Two scores get the gate (1 + tanh u) / 2 with u = x (u1 + u3 x^2) from the special function unit, which gives 16 results a cycle, as many as the
    tensor cores give scores. The other two get 1/2 + x P(x^2), cut to [0, 1], with a cubic P fitted to GELU for |x| <= 3: at most 4e-3 off in f, a
    third of the rounding of 1/2 to E4M3.
    """
    constants = _constants(U1=u1, U3=u3, HALF=0.5, END=9.0, P0=0.389956, P1=-0.0549871, P2=0.00504884, P3=-0.000189376)
    return f"""{{ .reg .b32 x, h, t, u, y, z; .reg .b16 low, high; {constants}
        cvt.rn.f16x2.f32 h, $5, $4; mul.rn.f16x2 x, h, $8; mul.rn.f16x2 h, h, $12; mul.rn.f16x2 t, x, x;
        fma.rn.f16x2 u, t, U3, U1; mul.rn.f16x2 u, u, x; tanh.approx.f16x2 u, u; fma.rn.f16x2 y, h, u, h;
        cvt.rn.f16x2.f32 h, $7, $6; mul.rn.f16x2 x, h, $8; mul.rn.f16x2 h, h, $16; mul.rn.f16x2 t, x, x; min.f16x2 t, t, END;
        fma.rn.f16x2 u, t, P3, P2; fma.rn.f16x2 u, u, t, P1; fma.rn.f16x2 u, u, t, P0; fma.rn.sat.f16x2 u, u, x, HALF; mul.rn.f16x2 z, h, u;
        {PACK} }}"""


GELU_WORDS = gl.constexpr(_gelu_words(U1.value, U3.value))
GELU_TANH_WORDS = gl.constexpr(_gelu_words(TANH_U1.value, TANH_U3.value))
SILU_WORDS = gl.constexpr(f"""{{ .reg .b32 h, u, y, z; .reg .b16 low, high;
        cvt.rn.f16x2.f32 h, $5, $4; mul.rn.f16x2 u, h, $8; mul.rn.f16x2 h, h, $12; tanh.approx.f16x2 u, u; fma.rn.f16x2 y, h, u, h;
        cvt.rn.f16x2.f32 h, $7, $6; mul.rn.f16x2 u, h, $8; mul.rn.f16x2 h, h, $12; tanh.approx.f16x2 u, u; fma.rn.f16x2 z, h, u, h;
        {PACK} }}""")
"""As ``_gelu_words``, with half the sharpness in its place: the gate is (1 + tanh (x / 2)) / 2."""


@gluon.jit
def _twice(x):
    """A scalar as a pair of float16, at most the largest of them: where that is too little, only scores that E4M3 makes 0 would need more."""
    x = gl.minimum(gl.maximum(x, -65504.0), 65504.0)
    return gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $1, $1;", "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def weights_of(s, sharpness, factor, ACTIVATION: gl.constexpr):
    """``factor`` 2 f(x) / sharpness at x = sharpness s, as ``words_of``, computed in pairs of float16."""
    WORDS: gl.constexpr = SILU_WORDS if ACTIVATION == "silu_bf16" else GELU_WORDS if ACTIVATION == "gelu_bf16" else GELU_TANH_WORDS
    if ACTIVATION == "silu_bf16":
        sharpness = sharpness * 0.5
    return gl.inline_asm_elementwise(
        WORDS,
        "=r,=r,=r,=r,f,f,f,f,r,r,r,r,r,r,r,r,r,r,r,r",
        [s, _twice(sharpness), _twice(factor), _twice(factor * 2.0)],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )
