"""Element-wise activations of the kernels, with derivatives. All arithmetic is float32.

Every one maps 0 to 0, so that zero-filled keys add nothing and the kernels need no mask at the end of a row. In products a tensor comes before a
named constant: the other order gives the interpreter a constant that wraps a tensor.
"""

# Kernels are compiled from their source and carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

from gem_core.ops.activations import GELU_FAST_COEFFICIENTS, GELU_FAST_RANGE
from gem_core.ops.activations import LEAKY_SLOPE as SLOPE
from gem_kernels.common.language import tl, triton

SQRT_HALF = tl.constexpr(math.sqrt(0.5))
TANH_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
INV_SQRT_2PI = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH_CUBIC = tl.constexpr(0.044715)  # of the usual tanh form of GELU
LEAKY_SLOPE = tl.constexpr(SLOPE)
FAST_RANGE = tl.constexpr(GELU_FAST_RANGE)
FAST_C2, FAST_C4, FAST_C6 = (tl.constexpr(c) for c in GELU_FAST_COEFFICIENTS)

# gelu of 16-bit inputs, whose own rounding is coarser: x/2 + x/2 e(x), with an odd polynomial e close to erf(x / sqrt(2)), fitted for the least
# largest error of gelu and clamped at R, where e(R) = 1. At most 7.5e-5 from gelu for every x, a third of float16's rounding of 1, in a third of the
# instructions.
GELU_RANGE = tl.constexpr(4.14)
G1, G3, G5, G7 = (tl.constexpr(c) for c in (0.796998178, -0.131167192, 0.0186576548, -0.00191708944))
G9, G11, G13, G15 = (tl.constexpr(c) for c in (0.000135929066, -6.23494006e-06, 1.6488234e-07, -1.89621495e-09))
# Its slope is 1/2 + d(x) with an odd polynomial of its own, d(R) = 1/2: at most 1.8e-4 from the slope of gelu.
SLOPE_RANGE = tl.constexpr(4.3)
D1, D3, D5, D7, D9 = (tl.constexpr(c) for c in (0.797169966, -0.263433853, 0.0571917425, -0.00820764561, 0.000799863882))
D11, D13, D15, D17 = (tl.constexpr(c) for c in (-5.21755029e-05, 2.16746494e-06, -5.15598498e-08, 5.32461721e-10))
# The forms for bfloat16 take tanh from the hardware, at most 2^-11 off; bfloat16 rounds weights four times as coarsely.
# gelu(x) = x (1 + tanh(x (U1 + U3 x^2))) / 2 with U1 and U3 fitted for the least largest error, 2.8e-4 before the hardware's (8.8e-4 in the slope).
U1, U3 = (tl.constexpr(c) for c in (0.80015257, 0.03470295))
TANH_U1 = tl.constexpr(math.sqrt(2 / math.pi))
TANH_U3 = tl.constexpr(math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def fast_tanh(x):
    """tanh by one instruction of CUDA hardware; not for the interpreter."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); ``tl.sigmoid`` does not run under the interpreter."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x)."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_16bit":
        c = tl.minimum(tl.maximum(x, -GELU_RANGE), GELU_RANGE)
        t = c * c
        e = c * (t * (t * (t * (t * (t * (t * (t * G15 + G13) + G11) + G9) + G7) + G5) + G3) + G1)
        y = 0.5 * x + 0.5 * x * e
    elif ACTIVATION == "gelu_bf16" or ACTIVATION == "gelu_tanh_bf16" or ACTIVATION == "silu_bf16":
        y = activate_scaled(x, 1.0, ACTIVATION)
    elif ACTIVATION == "gelu_tanh":
        # x * (1 + tanh(u)) / 2 = x * sigmoid(2 u)
        y = x * sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
    elif ACTIVATION == "gelu_fast":
        square = x * x
        y = 0.5 * x + square * (square * (square * FAST_C6 + FAST_C4) + FAST_C2)
        y = tl.where(tl.abs(x) < FAST_RANGE, y, tl.maximum(x, 0.0))
    elif ACTIVATION == "silu":
        y = x * sigmoid(x)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu2":
        r = tl.maximum(x, 0.0)
        y = r * r
    elif ACTIVATION == "leaky_relu":
        y = tl.where(x > 0.0, x, x * LEAKY_SLOPE)
    elif ACTIVATION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(ACTIVATION == "identity", "unknown activation")
        y = x
    return y


@triton.jit
def slope_of(x, ACTIVATION: tl.constexpr):
    """f'(x). What it shares with ``activate`` is computed once where both are called."""
    if ACTIVATION == "gelu":
        slope = 0.5 + 0.5 * tl.erf(x * SQRT_HALF) + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif ACTIVATION == "gelu_16bit":
        c = tl.minimum(tl.maximum(x, -SLOPE_RANGE), SLOPE_RANGE)
        t = c * c
        slope = 0.5 + c * (t * (t * (t * (t * (t * (t * (t * (t * D17 + D15) + D13) + D11) + D9) + D7) + D5) + D3) + D1)
    elif ACTIVATION == "gelu_bf16" or ACTIVATION == "gelu_tanh_bf16" or ACTIVATION == "silu_bf16":
        slope = slope_scaled(x, 1.0, ACTIVATION)
    elif ACTIVATION == "gelu_tanh":
        s = sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
        slope = s + x * s * (1.0 - s) * (x * x * (3.0 * TANH_CUBIC) + 1.0) * TANH_SCALE
    elif ACTIVATION == "gelu_fast":
        square = x * x
        slope = 0.5 + x * (square * (square * (6.0 * FAST_C6) + 4.0 * FAST_C4) + 2.0 * FAST_C2)
        slope = tl.where(tl.abs(x) < FAST_RANGE, slope, tl.where(x > 0.0, 1.0, 0.0))
    elif ACTIVATION == "silu":
        s = sigmoid(x)
        slope = s + x * s * (1.0 - s)
    elif ACTIVATION == "relu":
        slope = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu2":
        slope = 2.0 * tl.maximum(x, 0.0)
    elif ACTIVATION == "leaky_relu":
        slope = tl.where(x > 0.0, 1.0, LEAKY_SLOPE)
    elif ACTIVATION == "hardswish":
        slope = tl.where(x <= -3.0, 0.0, tl.where(x >= 3.0, 1.0, x * (1.0 / 3.0) + 0.5))
    else:
        slope = tl.where(x == x, 1.0, 1.0)
    return slope


# The forms for bfloat16 are gates: f(x) = x g, g = (1 + tanh u) / 2, u = x (U1 + U3 x^2), so f'(x) = g + 2 g (1 - g) x (U1 + 3 U3 x^2). The factor on
# the scores is merged into the constants: for kernels every instruction a score counts.


@triton.jit
def _tanh_and_rise(s, scale, ACTIVATION: tl.constexpr):
    """tanh u, and 2 (U1 + 3 U3 x^2), at x = scale s."""
    if ACTIVATION == "silu_bf16":
        e = fast_tanh(s * (scale * 0.5))
        rise = 1.0
    else:
        A: tl.constexpr = U1 if ACTIVATION == "gelu_bf16" else TANH_U1
        B: tl.constexpr = U3 if ACTIVATION == "gelu_bf16" else TANH_U3
        t = s * s
        e = fast_tanh(s * (t * (scale * scale * scale * B) + scale * A))
        rise = t * (scale * scale * (6.0 * B)) + 2.0 * A
    return e, rise


@triton.jit
def activate_scaled(s, scale, ACTIVATION: tl.constexpr):
    """f(scale s)."""
    if ACTIVATION == "gelu_bf16" or ACTIVATION == "gelu_tanh_bf16" or ACTIVATION == "silu_bf16":
        e, _ = _tanh_and_rise(s, scale * 1.0, ACTIVATION)
        half = s * (scale * 0.5)
        y = half + half * e
    else:
        y = activate(s * scale, ACTIVATION)
    return y


@triton.jit
def slope_scaled(s, scale, ACTIVATION: tl.constexpr):
    """f'(scale s)."""
    if ACTIVATION == "gelu_bf16" or ACTIVATION == "gelu_tanh_bf16" or ACTIVATION == "silu_bf16":
        e, rise = _tanh_and_rise(s, scale * 1.0, ACTIVATION)
        g = 0.5 + 0.5 * e
        slope = g + (g - g * g) * (s * scale * rise)
    else:
        slope = slope_of(s * scale, ACTIVATION)
    return slope


@triton.jit
def both_scaled(s, scale, ACTIVATION: tl.constexpr):
    """f(scale s) and f'(scale s)."""
    if ACTIVATION == "gelu_bf16" or ACTIVATION == "gelu_tanh_bf16" or ACTIVATION == "silu_bf16":
        e, rise = _tanh_and_rise(s, scale * 1.0, ACTIVATION)
        g = 0.5 + 0.5 * e
        y = s * scale * g
        slope = g + (y - y * g) * rise
    else:
        y = activate_scaled(s, scale, ACTIVATION)
        slope = slope_scaled(s, scale, ACTIVATION)
    return y, slope
