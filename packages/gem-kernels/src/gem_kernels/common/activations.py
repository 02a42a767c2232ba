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


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); ``tl.sigmoid`` does not run under the interpreter."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x)."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
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
        slope = tl.full(x.shape, 1.0, tl.float32)
    return slope
