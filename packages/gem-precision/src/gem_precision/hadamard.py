"""The random Hadamard transform, which spreads outliers over a block before it is quantised.

With an orthonormal Hadamard matrix ``H`` and random signs ``D``, ``(x D H)(w D H)^T = x w^T``: both operands of a product are turned along their
contraction axis and the result is the same, up to rounding.
"""

from functools import cache

import torch
from torch import Tensor

from gem_core.spec import RequestError

WIDTH = 32
"""Turned at once: a block of the MX formats."""


def rotate(x: Tensor, seed: int) -> Tensor:
    """``x D H`` along the last axis, ``WIDTH`` at a time; orthonormal.

    Args:
        x: ``[..., n]`` with ``n`` a multiple of ``WIDTH``.
        seed: of the signs; the two operands of a product share it.

    Raises:
        RequestError: ``n`` is no multiple.
    """
    if x.shape[-1] % WIDTH:
        raise RequestError("Hadamard transform", f"the axis has {x.shape[-1]} elements", f"It works on multiples of {WIDTH}.")
    matrix = _matrix(seed).to(x.device, x.dtype)
    turned: Tensor = (x.reshape(*x.shape[:-1], x.shape[-1] // WIDTH, WIDTH) @ matrix).flatten(-2)
    return turned


def turned(x: Tensor, seed: int | None) -> Tensor:
    """``x`` in float32, turned where there is a seed and the axis is a multiple of ``WIDTH``: both operands of a product decide alike."""
    x = x.float()
    return x if seed is None or x.shape[-1] % WIDTH or not x.shape[-1] else rotate(x, seed)


@cache
def _matrix(seed: int) -> Tensor:
    """``D H``: ``[WIDTH, WIDTH]`` float32, Sylvester's construction."""
    h = torch.ones(1, 1)
    while h.shape[0] < WIDTH:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.randint(0, 2, (WIDTH, 1), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
    return signs * (h / torch.tensor(WIDTH).sqrt())
