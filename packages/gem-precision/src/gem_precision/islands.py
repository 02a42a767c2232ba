"""Running a module in float32 inside a surrounding autocast."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.ops.slot import kernel_slots
from gem_core.spec.kernels import KernelRequest


class Fp32Forward:
    """The forward of an island: autocast is off, and low-precision inputs arrive in float32. Gradients return in the inputs' own dtype.

    It is an attribute of the module, so the module's class, parameters and state dict stay as they are, and a deep copy of the module has its own.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kind = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
        with nullcontext() if kind is None else torch.autocast(kind, enabled=False):
            return self.forward(*widen(args), **widen(kwargs))


class Fp32Request:
    """``KernelSlot.request`` of a slot in an island: its kernel will be called with float32."""

    def __init__(self, request: Callable[..., KernelRequest]) -> None:
        self.request = request

    def __call__(self, **asked: Any) -> KernelRequest:
        return self.request(**{**asked, "dtype": "fp32"})


def is_island(module: nn.Module) -> bool:
    """Whether ``make_island`` has changed ``module``."""
    return isinstance(module.forward, Fp32Forward)


def make_island(module: nn.Module) -> None:
    """Change ``module`` in place so that it computes in float32, the kernels of its slots included. Touches no tensor.

    Modules inside are changed one by one too, as they may be called from outside (by another method, or because they are shared).
    """
    for part in module.modules():
        if not is_island(part):
            part.forward = Fp32Forward(part.forward)
    for slot in kernel_slots(module):
        if not isinstance(slot.request, Fp32Request):
            vars(slot)["request"] = Fp32Request(slot.request)


def widen(value: Any) -> Any:
    """``value`` with bfloat16 and float16 tensors in float32, inside dicts, lists, tuples and dataclasses too; the same object where none is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, Mapping):
        wide = {key: widen(item) for key, item in value.items()}
        return value if all(wide[key] is value[key] for key in wide) else wide
    if isinstance(value, list | tuple):
        items = [widen(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        changed = {name: new for name, old in held.items() if (new := widen(old)) is not old}
        return replace(value, **changed) if changed else value
    return value
