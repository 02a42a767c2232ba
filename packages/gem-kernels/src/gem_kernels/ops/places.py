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

    Each is contiguous, or lies beside those of other parts of one tensor; the heads of a token are contiguous in both. So kernels write both by the
    stride of tokens, and where a contiguous gradient suits the copy engine, which takes widths of whole 16 bytes, so does one beside others.

    Args:
        edges: where the gradients go; ``NOWHERE`` in a backward that is a custom op, whose results may share no memory.
        tensors: as many inputs of the call.
    """
    return [_memory(edge, like) for edge, like in zip(edges, tensors, strict=True)]


def _memory(edge: Edge, like: Tensor) -> Tensor:
    place = place_for(edge)
    return place if place is not None and place.stride(0) <= MAX_TOKEN_STRIDE else like.new_empty(like.shape)


def parts_in(grad: Tensor) -> int:
    """How many gradients like this a token of its memory holds: a compile-time value, as strides of several gradients take registers."""
    return grad.stride(0) // grad.shape[1:].numel()
