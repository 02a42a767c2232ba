"""Counting matrix products: who multiplies, how much, and whether the input's gradient is needed.

Models count through these functions, so whoever listens while ``model.flops(batch)`` runs learns each product and its owner.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gem_core.ops.slot import KernelSlot

_heard: ContextVar["list[Product] | None"] = ContextVar("gem_core_products", default=None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Product:
    """The matrix products of one layer or kernel for one batch.

    Args:
        owner: the module whose weights are multiplied, or the slot whose kernel multiplies.
        forward: forward model FLOPs.
        input_gradient: whether backward also needs the gradient of the input. It does not for data without a learned part, such as dense features.
        count: the op's own count; only for a slot.
        shape: what ``count`` was called with.
    """

    owner: nn.Module | KernelSlot
    forward: int
    input_gradient: bool = True
    count: Callable[..., int] | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def products() -> Iterator[list[Product]]:
    """Every product that is counted inside the block, in order."""
    found: list[Product] = []
    token = _heard.set(found)
    try:
        yield found
    finally:
        _heard.reset(token)


def _tell(product: Product) -> int:
    found = _heard.get()
    if found is not None:
        found.append(product)
    return product.forward


def own_flops(module: nn.Module, flops: int, *, input_gradient: bool = True) -> int:
    """``flops``, counted for a module's own weights, or for products of its activations."""
    return _tell(Product(owner=module, forward=int(flops), input_gradient=input_gradient))


def linear_flops(linear: nn.Linear, rows: int, *, input_gradient: bool = True) -> int:
    """Forward model FLOPs of ``rows`` rows through a linear layer: 2 m n k."""
    return own_flops(linear, 2 * int(rows) * linear.in_features * linear.out_features, input_gradient=input_gradient)


def slot_flops(slot: KernelSlot, count: Callable[..., int], input_gradient: bool = True, /, **shape: Any) -> int:
    """Forward model FLOPs of a call of a slot's op: ``count(**shape)``, where ``count`` is the op's ``flops``."""
    return _tell(Product(owner=slot, forward=int(count(**shape)), input_gradient=input_gradient, count=count, shape=shape))
