"""Memory that kernels write gradients to."""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from gem_core.ops.packed import place_for
from gem_kernels.ops.host import MAX_TOKEN_STRIDE

Edge = tuple[Node | None, int]
"""An item of ``ctx.next_functions``."""
NOWHERE: tuple[Edge, ...] = ((None, 0),) * 3
"""Edges of gradients that are to have memory of their own."""


def grad_memory(edges: Sequence[Edge], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised memory for the gradients of ``tensors`` ``[tokens, heads, width]``, to be written in whole.

    Each is contiguous, or lies beside those of other parts of one tensor, with heads and widths contiguous in a token. So kernels write both by the
    stride of tokens, and where a contiguous gradient suits the copy engine, so does one beside others: heads of 16 bytes and more start at multiples.

    Args:
        edges: where the gradients go; ``NOWHERE`` in a backward that is a custom op, whose results may share no memory.
        tensors: as many inputs of the call.
    """
    return [_memory(edge, like) for edge, like in zip(edges, tensors, strict=True)]


def _memory(edge: Edge, like: Tensor) -> Tensor:
    place = place_for(edge)
    return place if place is not None and place.stride(0) <= MAX_TOKEN_STRIDE else like.new_empty(like.shape)
