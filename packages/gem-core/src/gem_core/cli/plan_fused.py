"""What fused kernels leave for backward, without the kernels: stand-ins that give a reference's shapes and save its inputs and outputs alone."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gem_core.ops.slot import kernel_slots
from gem_core.select.policy import KernelChoice, named_backend

MOVING = ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad")
"""Ops whose backward needs offsets alone."""


class Fused(torch.autograd.Function):
    """``kernel(*tensors)`` as one step of autograd. Scores, padding and what else is made on the way are computed again in backward, so not saved.

    Statistics of rows, one number where an output has ``dim`` of them, are left out.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], saved: Sequence[bool] | None, *tensors: Tensor) -> Any:
        """``saved`` says it of each tensor; None for none, nor of what is made."""
        found = kernel(*tensors)
        if saved is not None:
            made = (leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
            ctx.save_for_backward(*(tensor for tensor, kept in zip(tensors, saved, strict=True) if kept), *made)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """A plan takes forward passes only."""
        raise NotImplementedError


def bind_fused(module: nn.Module, choices: Sequence[KernelChoice]) -> None:
    """Put a stand-in into every slot for whose op no backend is named.

    Args:
        module: its slots are bound.
        choices: what they are bound to, in their order: kernels of a CPU, of which shapes are taken.
    """
    for slot, choice in zip(kernel_slots(module), choices, strict=True):
        if named_backend(slot.op)[0] is None:
            slot.bind(partial(_call, choice.impl.resolve(), slot.op))


def _call(reference: Callable[..., Any], op: str, *args: Any, **options: Any) -> Any:
    leaves, shape = tree_flatten((args, options))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def kernel(*tensors: Tensor) -> Any:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        words, named = tree_unflatten(filled, shape)
        return reference(*words, **named)

    summed = (args[0], options["residual"]) if options.get("return_sum") and options.get("residual") is not None else ()
    saved = None if op in MOVING else [not any(leaves[place] is tensor for tensor in summed) for place in places]  # their sum is, which is made
    return Fused.apply(kernel, saved, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
