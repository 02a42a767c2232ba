"""Parts of one tensor whose gradients go back as one.

Models make queries, keys and values by one product, ``[tokens, parts, heads, dim]``, and a kernel takes the parts. Gradients that it makes apart have
to be copied together again. So the node that parts them offers memory for the whole: a kernel asks for a part of it by the edge along which its
gradient goes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


class Room:
    """Memory for the gradient of ``[tokens, parts, ...]``, given out part by part; made when the first is asked for.

    The first ``flat`` parts are ``[tokens, width]``, whatever dimensions the whole has.
    """

    def __init__(self, like: Tensor, flat: int = 0) -> None:
        self.shape, self.dtype, self.device, self.flat = like.shape, like.dtype, like.device, flat
        self._whole: Tensor | None = None
        self._given: dict[int, Tensor] = {}

    def give(self, part: int) -> Tensor | None:
        """Uninitialised memory for one part, of its shape, to one caller."""
        if part in self._given:
            return None
        if self._whole is None:
            self._whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        place = self._whole.select(1, part)
        self._given[part] = place = place.flatten(1) if part < self.flat else place
        return place

    def joined(self, grads: tuple[Tensor | None, ...]) -> Tensor:
        """The gradients as one tensor, and the room as it was before anything was given out.

        Where every part came back as the very tensor that was given, the others are copied beside them: their memory is known to nobody else. Else
        (a part was used twice, or a hook replaced its gradient) nothing is written to, for somebody may still read what he got.
        """
        whole, given = self._whole, self._given
        self._whole, self._given = None, {}
        if whole is None or any(grads[part] is not place for part, place in given.items()):
            return torch.stack([self._full(grad) for grad in grads], 1)
        for part in range(self.shape[1]):
            if part not in given:
                whole.select(1, part).copy_(self._full(grads[part]))
        return whole

    def _full(self, grad: Tensor | None) -> Tensor:
        """``[tokens, ...]``, zeros for None."""
        shape = (self.shape[0], *self.shape[2:])
        return torch.zeros(shape, dtype=self.dtype, device=self.device) if grad is None else grad.reshape(shape)


def _parts(x: Tensor, flat: int) -> tuple[Tensor, ...]:
    return tuple(part.flatten(1) if i < flat else part for i, part in enumerate(x.unbind(1)))


class _Unbind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.room = Room(x, flat)
        return _parts(x, flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        room: Room = ctx.room
        return room.joined(grads), None


def unbind_packed(x: Tensor, flat: int = 0) -> tuple[Tensor, ...]:
    """``x.unbind(1)`` of ``[tokens, parts, ...]``, with memory for a gradient in one piece (``place_for``).

    The first ``flat`` parts come as ``[tokens, width]``: memory is found along the edge of a gradient, and to flatten a part would put another node
    between. Plain ``unbind`` where code is compiled, which joins the gradients by itself, and under transforms of functions.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return _parts(x, flat)
    return _Unbind.apply(x, flat)  # type: ignore[no-any-return,no-untyped-call]


def place_for(edge: tuple[Node | None, int]) -> Tensor | None:
    """Memory for the gradient that goes along ``edge``, None where a kernel is to take its own.

    For a backward that autograd calls, not for a custom op: results of an op may share no memory.

    Args:
        edge: an item of ``ctx.next_functions``.

    Returns:
        ``[tokens, ...]``, uninitialised, contiguous but for its first stride. Who takes it writes all of it, and returns that very tensor.
    """
    node, part = edge
    room = getattr(node, "room", None)
    return room.give(part) if isinstance(room, Room) else None
