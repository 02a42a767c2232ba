"""Activations that write ``fp8_block``, forward and backward: the cast of what the next product reads costs no pass of its own."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Literal, get_args

from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import LAUNCH, SIDE, Both, load_quarter, require_matrix
from gem_precision.kernels.language import BLOCK, INTERPRETED, store_both, tl, triton

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
"""As ``gem_core.ops.activations`` names them; each maps 0 to 0, so that rows which pad a matrix stay zeros."""
GELU_A, GELU_B = tl.constexpr(0.80015257), tl.constexpr(0.03470295)
"""Three of the activations are ``x s(x)`` with ``s(x) = (1 + tanh(x (A + B x^2))) / 2``. For GELU A and B are fitted: at most 2.8e-4 off for every x,
and 8.8e-4 in the slope, where an element of E4M3 has a precision of 2^-4."""
SILU_A, SILU_B = tl.constexpr(0.5), tl.constexpr(0.0)
GELU_TANH_A, GELU_TANH_B = tl.constexpr(math.sqrt(2 / math.pi)), tl.constexpr(math.sqrt(2 / math.pi) * 0.044715)


@triton.jit
def _tanh(x):
    """One instruction of the hardware, at most 2^-11 off."""
    if INTERPRETED:
        return 2.0 / (1.0 + tl.exp(x * -2.0)) - 1.0
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _apply(x, A: tl.constexpr, B: tl.constexpr, SLOPE: tl.constexpr):
    """x s(x), or with ``SLOPE`` its derivative."""
    if B == 0.0:
        inner, slope = A, 2.0 * A
    else:
        square = tl.minimum(x * x, 1e6)  # tanh is 1 long before, and infinity times 0 would be no number
        inner, slope = square * B + A, square * (6.0 * B) + 2.0 * A
    s = 0.5 + 0.5 * _tanh(x * inner)
    return s + x * s * (1.0 - s) * slope if SLOPE else x * s


@triton.jit
def activate(x, NAME: tl.constexpr, SLOPE: tl.constexpr):
    """f(x), or with ``SLOPE`` f'(x), float32."""
    if NAME == "gelu":
        y = _apply(x, GELU_A, GELU_B, SLOPE)
    elif NAME == "gelu_tanh":
        y = _apply(x, GELU_TANH_A, GELU_TANH_B, SLOPE)
    elif NAME == "silu":
        y = _apply(x, SILU_A, SILU_B, SLOPE)
    elif SLOPE:
        y = tl.where(x > 0.0, 1.0, 0.0)
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def _quarter(x, dy, row, column, x_stride, dy_stride, rows, GRAD: tl.constexpr, NAME: tl.constexpr):
    here = load_quarter(x, row, column, x_stride, rows)
    y = activate(here, NAME, SLOPE=GRAD)
    return load_quarter(dy, row, column, dy_stride, rows) * y if GRAD else y


@triton.jit
def activation_kernel(
    x, dy, x_stride, dy_stride, rows, columns, padded, out, out_scale, turned, turned_scale, GRAD: tl.constexpr, NAME: tl.constexpr
):
    """A tile of f(x), or with ``GRAD`` of dy f'(x)."""
    tiles = columns // BLOCK
    row_tile, column_tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    row = row_tile.to(tl.int64) * BLOCK
    column = column_tile * BLOCK
    q0 = _quarter(x, dy, row, column, x_stride, dy_stride, rows, GRAD, NAME)
    q1 = _quarter(x, dy, row + 1, column, x_stride, dy_stride, rows, GRAD, NAME)
    q2 = _quarter(x, dy, row + 2, column, x_stride, dy_stride, rows, GRAD, NAME)
    q3 = _quarter(x, dy, row + 3, column, x_stride, dy_stride, rows, GRAD, NAME)
    store_both(q0, q1, q2, q3, row_tile, column_tile, columns, padded, out, out_scale, turned, turned_scale)


def require_activation(name: str) -> None:
    """It has a kernel."""
    if name not in get_args(Activation):
        raise RequestError(f"activation {name!r}", "it has no native kernel", f"Choose one of {', '.join(get_args(Activation))}.")


def activation_both(x: Tensor, name: Activation, dy: Tensor | None = None) -> Both:
    """``f(x)``, or with ``dy`` the gradient ``dy f'(x)``, in 1 x 128 blocks along either axis.

    Args:
        x: ``[rows, columns]`` before the activation, columns a multiple of 128 and next to each other; any floating dtype.
        name: the activation.
        dy: the gradient of ``f(x)``, shaped as ``x``.

    Raises:
        RequestError: an unknown activation, or shapes or layouts that do not fit.
    """
    require_activation(name)
    require_matrix("activation_both", x)
    if dy is not None:
        require_matrix("activation_both", dy)
        if dy.shape != x.shape:
            raise RequestError("activation_both", f"x is {list(x.shape)} and dy {list(dy.shape)}", "Give matrices of one shape.")
    rows, columns = x.shape
    both = Both.empty(rows, columns, x.device)
    if x.numel():
        padded, grad = both.along.elements.shape[0], x if dy is None else dy
        activation_kernel[(padded // SIDE * (columns // SIDE),)](
            x, grad, x.stride(0), grad.stride(0), rows, columns, padded, *both.words(), GRAD=dy is not None, NAME=name, **LAUNCH
        )
    return both
