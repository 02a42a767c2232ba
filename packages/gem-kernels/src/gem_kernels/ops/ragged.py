"""Ragged descriptors of Hopper's copy engine for the portable kernels (``gem_kernels.common.hopper.language`` says how they end at a row)."""

from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from gem_kernels.ops import host

AXIS = 2**31 - 2**16
"""Size of the descriptor axes that are not to end anywhere."""


@cache
def _descriptor() -> Any:
    """A descriptor without the checks of Triton's, which take longer than the rest of a launch; ``copied`` has seen to what they ask."""
    base = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return type("Ragged", (base,), {"__post_init__": lambda self: None})


def ragged(x: Tensor, rows: int) -> Any:
    """The ragged descriptor of ``gem_kernels.common.hopper.language`` for tiles of ``rows`` tokens of one head of ``x [tokens, heads, width]``."""
    token, (heads, width) = x.stride(0), x.shape[1:]
    shape = [AXIS, AXIS, 2**30, (heads - 1) * x.stride(1) + width]
    return _descriptor()(x, shape, [2**34 - token, token, token, 1], [1, 1, rows, width])


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
