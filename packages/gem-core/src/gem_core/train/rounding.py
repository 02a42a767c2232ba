"""Large weights rounded to bfloat16 together: a few kernels a forward pass, and a few for the gradients.

Under autocast each float32 weight is rounded by a kernel of its own when a layer reads it, and its gradient widened by another: hundreds of small
ones a step. Here one operation does it for all, and layers find rounded weights in the place of their own while the model is called. Parameters,
their gradients and whoever sees them are as ever, and so are results: the same numbers are rounded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gem_core.model.crossing import KeyValues
from gem_core.model.layers import NormLinear
from gem_core.spec import PrecisionDecision

ROUNDS = (NormLinear, KeyValues)
"""Modules that, like ``nn.Linear`` under autocast, do nothing with ``weight`` but round it and multiply."""


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
        torch._foreach_copy_([w for w in wide if w is not None], [g for g in given if g is not None])
        return tuple(wide)


def to_round(model: nn.Module, decisions: Sequence[PrecisionDecision]) -> list[nn.Module]:
    """The modules whose ``weight`` is a float32 parameter that they round to bfloat16 before they multiply it, as the recipe decided."""
    low = {decision.module for decision in decisions if decision.format == "bf16"}
    named = [module for name, module in model.named_modules() if name in low and (type(module) is nn.Linear or isinstance(module, ROUNDS))]
    return [module for module in named if isinstance(module.weight, nn.Parameter) and module.weight.dtype is torch.float32]


@contextmanager
def rounded_together(model: nn.Module, decisions: Sequence[PrecisionDecision]) -> Iterator[None]:
    """While open, calls of ``model`` under autocast to bfloat16 round the weights of ``to_round`` together; other calls are as ever.

    Not for models whose weights a strategy holds in another way, or whose layers run again in backward: they then find the wide weights.
    """
    modules = to_round(model, decisions)
    own: list[tuple[nn.Module, nn.Parameter]] = []

    def swap(called: nn.Module, inputs: Any) -> None:
        if not modules or not _rounds(modules[0]._parameters["weight"]):
            return
        weights = {id(weight): weight for module in modules if (weight := module._parameters["weight"]) is not None}
        low = dict(zip(weights, RoundTogether.apply(*weights.values()), strict=True))  # type: ignore[no-untyped-call]
        own.extend((module, weights[id(module._parameters["weight"])]) for module in modules)
        for module, weight in own:
            module._parameters["weight"] = low[id(weight)]

    def restore(called: nn.Module, inputs: Any, outputs: Any) -> None:
        for module, weight in own:
            module._parameters["weight"] = weight
        own.clear()

    hooks = [model.register_forward_pre_hook(swap), model.register_forward_hook(restore, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _rounds(weight: Tensor | None) -> bool:
    """Whether layers would round this weight to bfloat16 now."""
    assert weight is not None
    kind = weight.device.type
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
