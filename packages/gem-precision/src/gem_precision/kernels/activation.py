"""Activations that write ``fp8_block``, forward and backward: the cast of what the next product reads costs no pass of its own."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Literal, get_args

import triton
import triton.language as tl
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.kernels.cast import MAXNREG, SIDE, Both, load_quarter, require_matrix
from gem_precision.kernels.language import BLOCK, store_both

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
"""As ``gem_core.ops.activations`` names them; each maps 0 to 0, so that rows which pad a matrix stay zeros."""
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
INV_SQRT_2PI = tl.constexpr(1 / math.sqrt(2 * math.pi))
TANH_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
TANH_CUBIC = tl.constexpr(0.044715)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, NAME: tl.constexpr):
    """f(x), float32."""
    if NAME == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif NAME == "gelu_tanh":
        y = x * _sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)  # (1 + tanh u) / 2 is sigmoid(2 u)
    elif NAME == "silu":
        y = x * _sigmoid(x)
    else:
        y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return y


@triton.jit
def slope(x, NAME: tl.constexpr):
    """f'(x), float32."""
    if NAME == "gelu":
        y = 0.5 + 0.5 * tl.erf(x * SQRT_HALF) + x * tl.exp(-0.5 * x * x) * INV_SQRT_2PI
    elif NAME == "gelu_tanh":
        s = _sigmoid((x + x * x * x * TANH_CUBIC) * TANH_SCALE)
        y = s + x * s * (1.0 - s) * (1.0 + x * x * 3.0 * TANH_CUBIC) * TANH_SCALE
    elif NAME == "silu":
        s = _sigmoid(x)
        y = s + x * s * (1.0 - s)
    else:
        y = tl.where(x > 0.0, 1.0, 0.0)
    return y


@triton.jit
def _quarter(x, dy, row, column, x_stride, dy_stride, rows, GRAD: tl.constexpr, NAME: tl.constexpr):
    here = load_quarter(x, row, column, x_stride, rows)
    return load_quarter(dy, row, column, dy_stride, rows) * slope(here, NAME) if GRAD else activate(here, NAME)


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


def activation_both(x: Tensor, name: Activation, dy: Tensor | None = None) -> Both:
    """``f(x)``, or with ``dy`` the gradient ``dy f'(x)``, in 1 x 128 blocks along either axis.

    Args:
        x: ``[rows, columns]`` before the activation, columns a multiple of 128 and next to each other; any floating dtype.
        name: the activation.
        dy: the gradient of ``f(x)``, shaped as ``x``.

    Raises:
        RequestError: an unknown activation, or shapes or layouts that do not fit.
    """
    if name not in get_args(Activation):
        raise RequestError(f"activation {name!r}", "it has no native kernel", f"Choose one of {', '.join(get_args(Activation))}.")
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
            x, grad, x.stride(0), grad.stride(0), rows, columns, padded, *both.words(), GRAD=dy is not None, NAME=name, num_warps=8, maxnreg=MAXNREG
        )
    return both
