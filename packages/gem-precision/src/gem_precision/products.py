"""Matrix products of attention and of norm-linear ops that read low-precision operands: the ops' references, product by product.

A reference multiplies through ``torch.einsum`` and ``linear`` alone. ``LowProducts`` takes their place with products whose operands are rounded to
a format along the axis that each of them contracts, in the forward pass and in both products of the backward pass, and leaves the rest as it is:
softmax, activations and norms see float32. Emulated, so exact on any device and slower than bfloat16.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from gem_precision.formats import Format, Rounding, fake_quantize
from gem_precision.linear import LinearRule, low_linear
from gem_precision.weights import HeldWeight


class Products(TorchFunctionMode):
    """Takes the place of every ``torch.einsum`` of two operands and every ``linear`` inside the block; a bias is added as it is."""

    def einsum(self, equation: str, left: Tensor, right: Tensor) -> Tensor:
        """``torch.einsum``."""
        raise NotImplementedError

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """``x weight^T``: ``[..., in]`` and ``[out, in]`` to ``[..., out]``."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.einsum:
            return self.einsum(*args)
        if func is linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]  # as torch calls it: bias last, by place or by name
            out = self.linear(x, weight)
            return out if bias is None else out + bias
        return func(*args, **(kwargs or {}))


class LowProducts(Products):
    """Products that follow the rule.

    Args:
        rule: ``inputs`` is the format of both operands of an einsum, which has no weights; ``grads`` that of what comes back.
        held: what holds the weight of the one ``linear`` inside between blocks; None holds nothing.
    """

    def __init__(self, rule: LinearRule, held: HeldWeight | None = None) -> None:
        super().__init__()
        self._rule, self._held = rule, held

    def einsum(self, equation: str, left: Tensor, right: Tensor) -> Tensor:
        return _Einsum.apply(equation, left, right, self._rule)  # type: ignore[no-any-return, no-untyped-call]

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return low_linear(x, weight, self._rule, self._held)


class _Einsum(torch.autograd.Function):
    """``left, right -> out`` of low-precision operands."""

    @staticmethod
    def forward(ctx: Any, equation: str, left: Tensor, right: Tensor, rule: LinearRule) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.rule, ctx.equation = rule, equation
        return multiply(equation, left, right, rule.inputs, rule.inputs).clone()  # references add in place, which a view of einsum's would not bear

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, None]:
        left, right = ctx.saved_tensors
        rule: LinearRule = ctx.rule
        rounding: Rounding = "stochastic" if rule.stochastic else "nearest"
        to_left, to_right = backward_equations(ctx.equation)
        d_left = d_right = None
        if ctx.needs_input_grad[1]:
            d_left = multiply(to_left, grad, right, rule.grads, rule.inputs, rounding)
        if ctx.needs_input_grad[2]:
            d_right = multiply(to_right, grad, left, rule.grads, rule.inputs, rounding)
        return None, d_left, d_right, None


def backward_equations(equation: str) -> tuple[str, str]:
    """Of ``first,second->out``: the products of the output's gradient with the second operand, and with the first."""
    operands, out = equation.split("->")
    first, second = operands.split(",")
    return f"{out},{second}->{first}", f"{out},{first}->{second}"


def multiply(equation: str, left: Tensor, right: Tensor, left_format: Format, right_format: Format, rounding: Rounding = "nearest") -> Tensor:
    """``torch.einsum`` of operands rounded along the axis that they contract; ``rounding`` is the left one's. float32."""
    operands, out = equation.split("->")
    first, second = operands.split(",")
    sizes = dict(zip(first, left.shape, strict=True))
    # Where heads of a group share a key, its gradient contracts their axis as well; blocks lie along the longer one, of positions.
    axis = max((letter for letter in first if letter in second and letter not in out), key=lambda letter: sizes[letter])
    return torch.einsum(equation, _along(left, first.index(axis), left_format, rounding), _along(right, second.index(axis), right_format))


def _along(x: Tensor, axis: int, form: Format, rounding: Rounding = "nearest") -> Tensor:
    """``x`` rounded in blocks along an axis; a scale of the format's for the whole tensor is one for the whole tensor."""
    if not x.numel():
        return x
    moved = x.movedim(axis, -1)
    return fake_quantize(moved.reshape(-1, moved.shape[-1]), form, rounding=rounding).view(moved.shape).movedim(-1, axis)


class LowKernel:
    """An op's reference with its products under the rule; results in the dtype of the call, as the op promises.

    Args:
        rule: of the products.
        reference: the op's.
        held: as in ``LowProducts``.
    """

    def __init__(self, rule: LinearRule, reference: Callable[..., Any], held: HeldWeight | None = None) -> None:
        self._rule, self._reference, self._held = rule, reference, held

    def holding(self, held: HeldWeight) -> "LowKernel":
        """The same for one layer alone."""
        return LowKernel(self._rule, self._reference, held)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **options: Any) -> Any:
        with LowProducts(self._rule, self._held):
            return self._reference(*args, **options)


class HeldBind:
    """``KernelSlot.bind`` of a layer's matmul fused with a norm: its kernel holds the layer's weight."""

    def __init__(self, bind: Callable[..., None], held: HeldWeight) -> None:
        self._bind, self.held = bind, held

    def __call__(self, kernel: Callable[..., Any], backend: str = "bound") -> None:
        self._bind(kernel.holding(self.held) if isinstance(kernel, LowKernel) else kernel, backend)
