"""Kernels bound once: a layer holds a slot, composing a run fills it, and the step calls a plain function."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gem_core.ops.checks import refuse
from gem_core.plugins.nearest import nearest
from gem_core.spec.errors import RequestError
from gem_core.spec.kernels import KernelRequest

if TYPE_CHECKING:
    from gem_core.select.policy import KernelChoice

_MODULES = {
    "jagged_concat": ("jagged", "concat_check"),
    "jagged_split": ("jagged", "split_check"),
    "jagged_pad": ("jagged", "pad_check"),
    "jagged_unpad": ("jagged", "unpad_check"),
    "jagged_dense_bmm_add": ("jagged", "bmm_check"),
}
"""Module and check of the ops that do not have a module of their own."""


def check_of(op: str) -> Callable[..., KernelRequest]:
    """The check of an op: same arguments as the op without ``backend``, raises RequestError or returns the call's request.

    Raises:
        RequestError: there is no such op; the nearest name is offered.
    """
    import gem_core.ops

    if op not in gem_core.ops.__all__:
        raise RequestError(f"op {op!r}", "there is no such op in gem_core.ops", nearest(op, gem_core.ops.__all__))
    module, name = _MODULES.get(op, (op, "check"))
    check: Callable[..., KernelRequest] = getattr(import_module(f"gem_core.ops.{module}"), name)
    return check


class KernelSlot:
    """A place in a layer for the kernel of one op. Call it as the op itself, without ``backend``.

    Unbound, a call goes through the public function and its automatic choice. Bound, it goes straight to the bound function; outside a compiled
    region the arguments are still checked, and features that the slot was not declared for are refused.

    Args:
        op: name of an op of ``gem_core.ops``.
        head_dim: width of one head of q, None for ops without heads.
        features: the op's feature words that calls may use.

    Raises:
        RequestError: there is no such op; the nearest name is offered.
    """

    def __init__(self, op: str, *, head_dim: int | None = None, features: Iterable[str] = ()) -> None:
        self.op, self.head_dim, self.features = op, head_dim, frozenset(features)
        self._check = check_of(op)
        self._public: Callable[..., Any] = getattr(import_module("gem_core.ops"), op)
        self._kernel: Callable[..., Any] | None = None
        self.backend: str | None = None
        self.asked: str | None = None
        """The backend that ``bind_kernels`` has to take, set by a precision recipe; None leaves it to the policy."""

    def request(self, *, device: str, dtype: str, arch: int | None = None, backward: bool = True, deterministic: bool = False) -> KernelRequest:
        """The request that calls of this slot will make on that machine; words as in ``KernelRequest``."""
        return KernelRequest(
            op=self.op,
            device=device,
            dtype=dtype,
            arch=arch,
            head_dim=self.head_dim,
            features=self.features,
            backward=backward,
            deterministic=deterministic,
        )

    def bind(self, kernel: Callable[..., Any], backend: str = "bound") -> None:
        """Call ``kernel`` from now on; it has the signature of the op's reference."""
        self._kernel, self.backend = kernel, backend

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._kernel is None:
            return self._public(*args, **options)
        if not torch.compiler.is_compiling():
            extra = self._check(*args, **options).features - self.features
            if extra:
                refuse(
                    self.op, f"the call uses {', '.join(sorted(extra))}, which its slot was not declared for", "Declare it: KernelSlot(features=...)."
                )
        return self._kernel(*args, **options)

    def __repr__(self) -> str:
        return f"KernelSlot({self.op!r}, head_dim={self.head_dim}, features={sorted(self.features)}, backend={self.backend!r})"


def kernel_slots(module: nn.Module) -> list[KernelSlot]:
    """Every slot that is a plain attribute of a module of the tree, in module order, each once."""
    found = (value for part in module.modules() for value in vars(part).values() if isinstance(value, KernelSlot))
    return list(dict.fromkeys(found))


def bind_kernels(module: nn.Module, *, device: str, dtype: str, arch: int | None, backward: bool) -> "list[KernelChoice]":
    """Choose a kernel for each slot of ``module`` and bind it: the one that is asked for, or the policy's.

    Args:
        module: the model.
        device: one of ``gem_core.spec.DEVICES``.
        dtype: one of ``gem_core.spec.DTYPES``.
        arch: CUDA compute capability as an integer, None without a GPU.
        backward: whether gradients will be wanted.

    Returns:
        The choice of each slot, in their order.

    Raises:
        KernelUnavailable: nothing fits a slot. No slot is bound then.
        RequestError: a slot is asked to take one backend, and a user names another for its op.
    """
    from gem_core.select.policy import choose

    slots = kernel_slots(module)
    for slot in slots:
        _agree(slot)
    chosen = []
    for slot in slots:
        choice = choose(slot.request(device=device, dtype=dtype, arch=arch, backward=backward), slot.asked)
        chosen.append(choice if slot.asked is None else replace(choice, rule="the precision recipe"))
    for slot, choice in zip(slots, chosen, strict=True):
        slot.bind(choice.impl.resolve(), choice.backend)
    return chosen


def _agree(slot: KernelSlot) -> None:
    from gem_core.select.policy import named_backend

    name, rule = named_backend(slot.op)
    if slot.asked is not None and name not in (None, slot.asked):
        so = f"the precision recipe asks for {slot.asked!r}"
        raise RequestError(f"backend {name!r} for {slot.op} ({rule})", so, "Leave the name out, or keep this op high in the precision recipe.")
