"""How long computing waits for the weights and gradients that ``fully_shard`` moves on streams of its own.

A collective on another stream may end long before or after its result is needed. So the stream that computes is timed across the very place where
``fully_shard`` makes it wait: its hook is put between two of ours.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gem_parallel.comm.ledger import COMPUTE, LEDGER, Span


class Gap:
    """A stretch of the stream that computes, from ``begin`` to ``end``, recorded as a wait."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._span: Span | None = None

    def begin(self) -> None:
        self._span = LEDGER.span(self._name, "wait", 0, "", 0, self._device, COMPUTE)

    def end(self) -> None:
        if self._span is not None:
            self._span.done(exposed=True)
        self._span = None


class WeightWaits:
    """Records the waits of one unit for its weights, in forward and in backward.

    Args:
        name: of the unit.
        first: the module before which its weights are gathered, after ``fully_shard`` has been applied.
        last: the module after which they are dropped.
        device: of the stream that computes.
    """

    def __init__(self, name: str, first: nn.Module, last: nn.Module, device: torch.device) -> None:
        self._forward = Gap(f"dense: wait for weights of {name}", device)
        self._backward = Gap(f"dense: wait for weights of {name}, backward", device)
        first.register_forward_pre_hook(lambda *_: self._forward.begin(), prepend=True)
        first.register_forward_pre_hook(lambda *_: self._forward.end())
        last.register_forward_hook(self._before, prepend=True)
        last.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _with_gradient(output):
            tensor.register_hook(lambda _: self._backward.begin())

    def _after(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _with_gradient(output):
            tensor.register_hook(lambda _: self._backward.end())


class GradientWaits:
    """Records how long the end of backward waits for gradients that are still on their way.

    Args:
        root: the module whose backward begins first, after ``fully_shard`` has been applied to it.
        device: of the stream that computes.
    """

    def __init__(self, root: nn.Module, device: torch.device) -> None:
        self._gap = Gap("dense: wait for gradients", device)
        self._queued = [False, False]
        root.register_forward_hook(self._before, prepend=True)
        root.register_forward_hook(self._after)

    def _before(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _with_gradient(output):
            tensor.register_hook(lambda _: self._queue(0))

    def _after(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in _with_gradient(output):
            tensor.register_hook(lambda _: self._queue(1))

    def _queue(self, which: int) -> None:
        """Callbacks at the end of backward run in the order in which they are queued, and ``fully_shard`` queues its own between these two."""
        if not self._queued[which]:
            self._queued[which] = True
            torch.autograd.Variable._execution_engine.queue_callback((self._gap.begin, self._finish)[which])

    def _finish(self) -> None:
        self._gap.end()
        self._queued = [False, False]


def _with_gradient(output: Any) -> list[Any]:
    """The tensors of an output that backward will reach."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
