"""Ragged descriptors of Hopper's copy engine for the portable kernels (``gem_kernels.common.hopper.language`` says how they end at a row)."""

from functools import lru_cache

import torch
from torch import Tensor

from gem_kernels.common.compiled import Block, Described
from gem_kernels.ops import host

AXIS = 2**31 - 2**16
"""Size of the descriptor axes that are not to end anywhere."""


def ragged(x: Tensor, rows: int) -> Block:
    """The ragged descriptor of ``gem_kernels.common.hopper.language`` for tiles of ``rows`` tokens of one head of ``x [tokens, heads, width]``."""
    return Block((x, _described(x.shape[1:], x.stride(), rows)))


@lru_cache(1024)
def _described(shape: torch.Size, strides: tuple[int, ...], rows: int) -> Described:
    (heads, width), (token, head, _) = shape, strides
    return Described((1, 1, rows, width), None, (AXIS, AXIS, 2**30, (heads - 1) * head + width), (2**34 - token, token, token, 1))


def copied(*tensors: Tensor) -> bool:
    """Whether Hopper's copy engine can address the tensors and a tile of theirs holds one head and nothing else."""
    return host.hopper(tensors[0]) and all(
        x.element_size() == 2
        and x.shape[-1] == host.block_width(x.shape[-1])
        and x.data_ptr() % 16 == 0
        and x.stride(0) % 8 == 0
        and x.stride(1) % 8 == 0
        and x.shape[0] <= 2**30
        and (x.shape[1] - 1) * x.stride(1) + x.shape[2] <= AXIS
        for x in tensors
    )
