"""Calls that go past torch's dispatcher. A custom op written in Python costs 50 microseconds of the host a call, more than a short kernel takes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_PLAIN = (Tensor, nn.Parameter)
_KNOWN = frozenset((*_PLAIN, type(None), bool, int, float, str))
# With these two, inputs are walked in C: a loop of Python takes longer than all else that is asked here.
_is_tensor = Tensor.__instancecheck__
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def unwatched(inputs: Sequence[Any]) -> bool:
    """Whether nobody could tell a custom op from a plain call of what it does.

    A compiler, a dispatch mode (fake tensors, a FLOP counter), a functorch transform, what a transform left behind and a tensor subclass could: they
    need the op. ``inputs`` may hold lists of tensors.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if not _KNOWN.issuperset(map(type, inputs)):
        parts = (x if isinstance(x, list | tuple) else (x,) for x in inputs)
        inputs = [x for part in parts for x in part if isinstance(x, Tensor)]
        if any(type(x) not in _PLAIN for x in inputs):
            return False
    return not any(map(_is_wrapped, filter(_is_tensor, inputs)))


def direct(op: Any, *inputs: Any) -> Any:
    """The result of a custom op, past the dispatcher where nobody watches. For ops without a gradient of their own, such as a backward pass."""
    return op._init_fn(*inputs) if unwatched(inputs) else op(*inputs)


def differentiable(op: Any, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """Register the gradient of a custom op without lists of tensors, and return a call of it that goes past the dispatcher where nobody watches.

    Args:
        op: the custom op, as ``torch.library.custom_op`` made it.
        backward: ``(ctx, *grads) -> grads of the inputs``, once.
        save: ``(ctx, inputs, output)``.
    """
    op.register_autograd(backward, setup_context=save)
    compute: Callable[..., Any] = op._init_fn

    class Direct(torch.autograd.Function):
        """What the op does, without torch's dispatcher."""

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = compute(*inputs)
            save(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            return once(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    apply, once = _apply(Direct), once_differentiable(backward)

    def call(*inputs: Any) -> Any:
        return apply(*inputs) if unwatched(inputs) else op(*inputs)

    return call


def _apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its search for functorch transforms and what they left behind: ``unwatched`` has found none."""
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def differentiable_lists(op: Any, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """As ``differentiable``, for an op with lists of tensors among its inputs, or a list of tensors as its output.

    Args:
        op: the custom op.
        backward: ``(ctx, grad) -> grads of the inputs``, a list of gradients for a list of tensors.
        save: ``(ctx, inputs, output)``.
    """
    op.register_autograd(backward, setup_context=save)
    compute: Callable[..., Any] = op._init_fn

    class Direct(torch.autograd.Function):
        """Lists of tensors are laid out one after another behind their lengths, for autograd looks into no list."""

        @staticmethod
        def forward(ctx: Any, counts: list[int | None], *flat: Any) -> Any:
            rest = iter(flat)
            inputs = tuple(next(rest) if count is None else [next(rest) for _ in range(count)] for count in counts)
            output = compute(*inputs)
            save(ctx, inputs, output)
            ctx.listed = isinstance(output, list)
            return tuple(output) if ctx.listed else output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Tensor) -> Any:
            found = backward(ctx, list(grads) if ctx.listed else grads[0])
            return (None, *(one for grad in found for one in (grad if isinstance(grad, list) else (grad,))))

    apply = _apply(Direct)

    def call(*inputs: Any) -> Any:
        if not unwatched(inputs):
            return op(*inputs)
        counts = [len(x) if isinstance(x, list) and x and isinstance(x[0], Tensor) else None for x in inputs]
        flat = [one for x, count in zip(inputs, counts, strict=True) for one in ((x,) if count is None else x)]
        return apply(counts, *flat)

    return call
