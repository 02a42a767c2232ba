"""Products that are computed as they are, while each low-precision recipe computes them beside and its error is recorded."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_precision.linear import LinearRule
from gem_precision.presets import PRESETS
from gem_precision.probe.record import FORWARD, LEFT, RIGHT, Record
from gem_precision.products import Products, backward_equations, multiply

RULES: Mapping[str, LinearRule] = {name: preset.rule() for name, preset in PRESETS.items()}


class ProbedProducts(Products):
    """Products that are recorded under the name of a site, if gradients are on."""

    def __init__(self, site: str, record: Record) -> None:
        super().__init__()
        self._site, self._record = site, record

    def einsum(self, equation: str, left: Tensor, right: Tensor, weights: bool = False) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.einsum(equation, left, right)
        return _Probed.apply(equation, left, right, weights, self._site, self._record)  # type: ignore[no-any-return, no-untyped-call]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():
            self._record.met(self._site, rows, weight)
        flat = self.einsum("ni,oi->no", rows, weight, weights=True)
        return flat.reshape(*x.shape[:-1], weight.shape[0])


class _Probed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, equation: str, left: Tensor, right: Tensor, weights: bool, site: str, record: Record) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.about = (equation, weights, site, record)
        record.called(site)
        exact = torch.einsum(equation, left, right).clone()
        for name, rule in RULES.items():
            low = multiply(equation, left, right, rule.inputs, rule.weights if weights else rule.inputs)
            record.add(site, FORWARD, name, exact, low)
        return exact

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (left, right), (equation, weights, site, record) = ctx.saved_tensors, ctx.about
        to_left, to_right = backward_equations(equation)
        answers: list[Tensor | None] = [None, None]
        for i, (product, turned, other) in enumerate(((LEFT, to_left, right), (RIGHT, to_right, left))):
            if not ctx.needs_input_grad[1 + i]:
                continue
            exact = torch.einsum(turned, grad, other)
            for name, rule in RULES.items():
                form = rule.weights if weights and product == LEFT else rule.inputs
                record.add(site, product, name, exact, multiply(turned, grad, other, rule.grads, form))
            answers[i] = exact
        return None, answers[0], answers[1], None, None, None


class ProbedForward:
    """The forward of a linear layer, recorded."""

    def __init__(self, forward: Callable[..., Any], site: str, record: Record) -> None:
        self.forward, self._site, self._record = forward, site, record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ProbedProducts(self._site, self._record):
            return self.forward(*args, **kwargs)


class ProbedBind:
    """``KernelSlot.bind`` of a slot that is asked to take the reference: binds it recorded."""

    def __init__(self, bind: Callable[..., None], site: str, record: Record) -> None:
        self._bind, self._site, self._record = bind, site, record

    def __call__(self, kernel: Callable[..., Any], backend: str = "bound") -> None:
        self._bind(ProbedForward(kernel, self._site, self._record), backend)
