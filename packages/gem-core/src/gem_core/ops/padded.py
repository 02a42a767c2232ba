"""Packed rows to padded rows and back, without a loop and without a synchronisation, differentiable both ways."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from gem_core.ops.checks import contents_readable

_plain: ContextVar[bool] = ContextVar("gem_core_plain_precision", default=False)
P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def plain_precision() -> Iterator[None]:
    """References compute in the dtype of their inputs, as unfused torch code would: the baseline that kernels' errors are measured against."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


def widen(x: Tensor) -> Tensor:
    """``x`` in the dtype that references compute in: at least float32."""
    plain = not torch.compiler.is_compiling() and _plain.get()  # a compiler cannot look into a context variable
    return x if plain or x.dtype == torch.float64 else x.float()


def own_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run a reference outside any surrounding autocast, so that the meaning of an op does not depend on it."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        lead: Any = args[0]
        device = lead.device.type if isinstance(lead, Tensor) else "cpu"
        if device == "meta" or not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return call


def _take(x: Tensor, index: Tensor, extend: bool) -> Tensor:
    """Rows of ``x`` by index; with ``extend`` the index one past the end gives zeros."""
    if extend:
        x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
    return x.index_select(0, index)


class _Move(torch.autograd.Function):
    """Gather by ``forth``; its gradient is the gather by ``back``: no atomics, no additions, deterministic."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Tensor, back: Tensor, extend_forth: bool, extend_back: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.extend = extend_back
        return _take(x, forth, extend_forth)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (back,) = ctx.saved_tensors
        return _take(grads[0], back, ctx.extend), None, None, None, None


def move(x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
    """Reorder the rows of ``x`` by the permutation ``forth``, whose inverse is ``back``."""
    out: Tensor = _Move.apply(x, forth, back, False, False)  # type: ignore[no-untyped-call]
    return out


class Padding:
    """Where each packed token of ``offsets`` sits among ``rows x max_length`` slots.

    Tokens beyond ``limit`` are cut: they are in no slot, give zeros and get zero gradients.

    Args:
        offsets: ``[rows + 1]`` int64.
        total: number of packed tokens.
        max_length: slots of a row.
        limit: tokens of a row that get a slot, ``max_length`` by default.
        skip: ``[rows]`` int64, tokens at the start of each row that are cut.

    Attributes:
        lengths: ``[rows]`` int64, tokens with a slot.
        slot: ``[total]`` int64, slot of each token, ``rows * max_length`` for one that is cut.
        token: ``[rows * max_length]`` int64, token of each slot, ``total`` for an empty one.
    """

    def __init__(self, offsets: Tensor, total: int, max_length: int, *, limit: int | None = None, skip: Tensor | int = 0) -> None:
        self.rows, self.max_length, limit = offsets.numel() - 1, max_length, max_length if limit is None else limit
        self.lengths = (offsets.diff() - skip).clamp(max=limit)
        first = offsets[:-1] + skip
        steps = torch.arange(max_length, device=offsets.device)
        self.token = torch.where(steps < self.lengths[:, None], first[:, None] + steps, total).flatten()
        tokens = torch.arange(total, device=offsets.device)
        row = torch.searchsorted(offsets[1:], tokens, right=True)
        ends = torch.cat([first, offsets[-1:]])
        position = tokens - ends[row]
        inside = (position >= 0) & (position < limit) & (row < self.rows)
        self.slot = torch.where(inside, row * max_length + position, self.rows * max_length)
        self.cut = not contents_readable(inside) or not bool(inside.all())

    def pad(self, x: Tensor) -> Tensor:
        """``[total, ...]`` to ``[rows, max_length, ...]``, zeros in empty slots."""
        out: Tensor = _Move.apply(x, self.token, self.slot, True, self.cut)  # type: ignore[no-untyped-call]
        return out.view(self.rows, self.max_length, *x.shape[1:])

    def unpad(self, x: Tensor) -> Tensor:
        """``[rows, max_length, ...]`` to ``[total, ...]``, zeros for cut tokens."""
        flat = x.reshape(self.rows * self.max_length, *x.shape[2:])
        out: Tensor = _Move.apply(flat, self.slot, self.token, self.cut, True)  # type: ignore[no-untyped-call]
        return out

    def is_cut(self) -> Tensor:
        """``[total]`` bool, True for tokens without a slot."""
        return self.slot == self.rows * self.max_length

    def filled(self) -> Tensor:
        """``[rows, max_length]`` bool, True where a token sits."""
        return torch.arange(self.max_length, device=self.lengths.device) < self.lengths[:, None]
