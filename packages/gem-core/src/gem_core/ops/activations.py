"""The pointwise activations of ``gdpa`` and ``pffn``. Each maps 0 to 0, so that a padded key (score 0) contributes nothing without a mask."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

GELU_FAST_RANGE = 2.775
GELU_FAST_COEFFICIENTS = (0.3747698, -0.04271125, 0.002265000812849393)
"""``c2, c4, c6`` of the least-maximum fit of gelu on ``[-R, R]`` with the value ``R`` at ``R`` and 0 at ``-R``; see ``gelu_fast``."""
GELU_FAST_MAX_ERROR = 7.7e-3
LEAKY_SLOPE = 0.01


def gelu_fast(x: Tensor) -> Tensor:
    """GELU without a transcendental function: ``x/2 + c2 x^2 + c4 x^4 + c6 x^6`` for ``|x| < R``, ``relu(x)`` outside, with ``R = 2.775``.

    Continuous, at most 7.7e-3 from gelu for every x. R is where the error of the fit inside and that of ``relu`` outside are equal. The derivative is
    that of the pieces.
    """
    c2, c4, c6 = GELU_FAST_COEFFICIENTS
    square = (x * x).clamp(max=GELU_FAST_RANGE**2)
    inside = 0.5 * x + square * (c2 + square * (c4 + square * c6))
    return torch.where(x.abs() < GELU_FAST_RANGE, inside, x.relu())


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return x.relu().square()


def _leaky_relu(x: Tensor) -> Tensor:
    return F.leaky_relu(x, LEAKY_SLOPE)


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_fast": gelu_fast,
    "silu": F.silu,
    "relu": F.relu,
    "relu2": _relu2,
    "leaky_relu": _leaky_relu,
    "hardswish": F.hardswish,
    "identity": _identity,
}
