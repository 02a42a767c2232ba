"""Parameters rounded to bfloat16 together: a few kernels a forward pass, and a few for the gradients.

Under autocast each float32 parameter is rounded by a kernel of its own when a layer reads it, and its gradient widened by another: hundreds of small
ones a step. Here one operation does it for all, and layers find rounded tensors in the place of their parameters while the model is called.
Parameters, their gradients and whoever sees them are as ever, and so are results: the same numbers are rounded.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_core.model.crossing import KeyValues
from gem_core.model.layers import AddNorm, NormLinear
from gem_core.spec import Precision, PrecisionDecision
from gem_core.train.graphs import not_recordable
from gem_core.train.world import World

ROUNDING = (NormLinear, AddNorm, KeyValues)
"""Modules that, like ``nn.Linear`` under autocast, round each parameter of theirs before they do anything with it."""
Place = tuple[nn.Module, str]
"""A module and the name of a parameter of its own."""


class RoundTogether(torch.autograd.Function):
    """Float32 tensors in bfloat16, and their gradients in float32, by one operation on all of them. A tensor that nobody used gets no gradient."""

    @staticmethod
    def forward(ctx: Any, *wide: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        low = [torch.empty_like(tensor, dtype=torch.bfloat16) for tensor in wide]
        torch._foreach_copy_(low, list(wide))
        return tuple(low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *low: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [None if gradient is None else gradient.contiguous() for gradient in low]  # lists of one layout are copied by few kernels
        wide = [None if gradient is None else torch.empty_like(gradient, dtype=torch.float32) for gradient in given]
        if found := [g for g in given if g is not None]:
            torch._foreach_copy_([w for w in wide if w is not None], found)
        return tuple(wide)


def rounds_together(world: World, precision: Precision, strategies: Collection[str]) -> bool:
    """Whether a run gains by ``rounded_together``, and may use it: one process on a GPU, where formats stay and strategies leave weights alone."""
    alone = world.size == 1 and world.device.type == "cuda" and set(strategies) <= {"single"}
    return alone and precision.compute_dtype() == "bf16" and not_recordable(precision) is None


def to_round(model: nn.Module, decisions: Sequence[PrecisionDecision]) -> list[Place]:
    """The float32 parameters of modules that round them to bfloat16 as the recipe decided.

    A module whose ``forward`` a recipe has replaced is left alone: what stands there may want to see weights as they are.
    """
    low = {decision.module for decision in decisions if decision.format == "bf16"}
    known = [m for name, m in model.named_modules() if name in low and (type(m) is nn.Linear or isinstance(m, ROUNDING))]
    own = [m for m in known if "forward" not in vars(m)]
    return [(m, name) for m in own for name, parameter in m.named_parameters(recurse=False) if parameter.dtype is torch.float32]


@contextmanager
def rounded_together(model: nn.Module, decisions: Sequence[PrecisionDecision]) -> Iterator[None]:
    """While open, calls of ``model`` under autocast to bfloat16 round what ``to_round`` names together; other calls are as ever.

    Not for models whose weights a strategy holds in another way, or whose layers run again in backward: they then find the wide weights.
    """
    places = to_round(model, decisions)
    own: list[tuple[Place, Any]] = []

    def swap(called: nn.Module, inputs: Any) -> None:
        found = [((module, name), module._parameters[name]) for module, name in places]
        wide = list(dict.fromkeys(parameter for _, parameter in found))  # one that modules share is rounded once
        if not wide or not _rounds(wide[0]):
            return
        low = dict(zip(wide, RoundTogether.apply(*wide), strict=True))  # type: ignore[no-untyped-call]
        own.extend(found)
        for (module, name), parameter in found:
            module._parameters[name] = low[parameter]

    def restore(called: nn.Module, inputs: Any, outputs: Any) -> None:
        for (module, name), parameter in own:
            module._parameters[name] = parameter
        own.clear()

    hooks = [model.register_forward_pre_hook(swap), model.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounds(parameter: Any) -> bool:
    """Whether layers would round this parameter to bfloat16 now."""
    kind = parameter.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
