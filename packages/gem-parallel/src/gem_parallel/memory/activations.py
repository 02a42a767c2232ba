"""Strategy ``activations``: what each block of the dense part does with what it would save for backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from gem_core.spec import BlockMemory, MemoryReport, ParallelContext, RequestError
from gem_parallel.dense.fsdp import blocks
from gem_parallel.memory.knapsack import Option, choose
from gem_parallel.memory.measuring import Alive, Gauge, Measured, agreed, copy_speeds
from gem_parallel.memory.options import BlockRule
from gem_parallel.memory.storing import Scope, storage_of

BACKWARD_OVER_FORWARD = 2
"""Seconds of a block's backward in those of its forward, for what a copy from host memory can hide behind."""


class Activations:
    """Each block keeps what it saves for backward, computes it again, holds it in host memory, or holds it in eight bits.

    A block is an entry of a list of modules under the model, as for ``fsdp``, or a module that ``blocks`` names: smaller ones leave a plan more to
    choose from, and less is alive at once when one is computed again. With a budget, the first forward pass for training is preceded by one that
    measures: it keeps nothing, and leaves random state and buffers as they were. All ranks then plan on the largest figures of any of them.

    ``keep``, ``recompute`` and ``offload`` give the same bits. ``fp8`` rounds activations that gradients are computed from (relative error 1/16 at
    most of each, or 2.2e-6 of the largest in its row); the forward pass is the same.

    Args:
        budget: GB that the blocks of a rank may hold for backward; None plans nothing.
        policies: rules by block name.
        allow: what a plan may choose beside keeping.
        blocks: patterns of names of modules.
        compiled_budget: share of its activations that a compiled graph may save, from 0 to 1; None leaves what torch is set to.
    """

    def __init__(
        self,
        *,
        budget: float | None = None,
        policies: Sequence[Any] = (),
        allow: Sequence[str] = ("recompute", "offload"),
        blocks: Sequence[str] = (),
        compiled_budget: float | None = None,
    ) -> None:
        self._budget, self._allow, self._named = None if budget is None else int(budget * 1e9), tuple(allow), tuple(blocks)
        self._compiled_budget = compiled_budget
        self._rules = [BlockRule.model_validate(rule) for rule in policies]
        self._policies: dict[str, str] = {}
        self._modules: list[nn.Module] = []
        self._measured: list[Measured] = []
        self._planned: dict[str, Option] = {}
        self._wanted = budget is not None
        self._gauge: Gauge | None = None
        self._alive: Alive | None = None
        self._world, self._device = 1, torch.device("cpu")

    def apply(self, module: nn.Module, context: ParallelContext) -> nn.Module:
        """``module`` itself; the ``forward`` of its blocks is replaced.

        Raises:
            RequestError: it has no blocks, or a pattern matches none.
        """
        self._world, self._device = context.world, torch.device(context.device)
        inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
        found = named_blocks(inner, self._named) if self._named else dict(blocks(inner))
        if not found:
            raise RequestError("strategy 'activations'", "the model has no list of blocks", "Use a model with layers, such as gem, or leave it out.")
        for rule in self._rules:
            if not any(fnmatchcase(name, rule.pattern) for name in found):
                raise RequestError(
                    f"strategy 'activations' with {rule.pattern!r}", f"no block has such a name; there are {', '.join(found)}", "Name one."
                )
        self._modules = list(found.values())
        for name, block in found.items():
            self._policies[name] = self._ruled(name) or "keep"
            block.forward = partial(self._forward, name, block, block.forward)
        inner.forward = partial(self._whole, inner, inner.forward)
        return module

    def _ruled(self, name: str) -> str | None:
        return next((rule.policy for rule in self._rules if fnmatchcase(name, rule.pattern)), None)

    # ---- in a forward pass ------------------------------------------------------------------------------------------------------------

    def _whole(self, inner: nn.Module, forward: Callable[..., Any], *arguments: Any) -> Any:
        with nullcontext() if self._compiled_budget is None else compiling_within(self._compiled_budget):
            if self._wanted and torch.is_grad_enabled():
                self._wanted = False
                self._measure(inner, forward, arguments)
                self._plan()
            return forward(*arguments)

    def _forward(self, name: str, block: nn.Module, forward: Callable[..., Any], *arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        if self._gauge is not None:
            result, measured = self._gauge.measure(name, block, forward, arguments)
            self._measured.append(measured)
            return result
        held = partial(self._held, name, forward)
        return held(*arguments) if self._alive is None else self._alive.at_work(name, arguments, held)

    def _held(self, name: str, forward: Callable[..., Any], *arguments: Any) -> Any:
        policy = self._policies[name]
        if policy == "keep":
            return forward(*arguments)
        if policy == "recompute":
            with set_checkpoint_early_stop(self._world == 1):  # ranks that stop at different places would leave collectives out
                return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=True)
        scope = Scope(policy)
        with torch.autograd.graph.saved_tensors_hooks(scope.pack, scope.unpack):
            return forward(*arguments)

    # ---- planning ---------------------------------------------------------------------------------------------------------------------

    def _measure(self, inner: nn.Module, forward: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        buffers = {name: buffer.clone() for name, buffer in inner.named_buffers()}
        devices = [self._device] if self._device.type == "cuda" else []
        for _ in range(2):  # the first pass warms up: kernels are compiled, memory is allocated
            self._gauge, self._measured = Gauge(), []
            try:
                with torch.random.fork_rng(devices=devices), uncompiled(self._modules):
                    forward(*arguments)
            finally:
                self._gauge = None
        with torch.no_grad():
            for name, buffer in inner.named_buffers():
                buffer.copy_(buffers[name])
        self._measured = agreed(self._measured)

    def _plan(self) -> None:
        """Choose a policy for every block.

        Raises:
            RequestError: no choice fits the budget.
        """
        narrowing, copying = copy_speeds(self._device)
        every = [self._options(measured, narrowing, copying) for measured in self._measured]
        names = [list(options) for options in every]
        if self._budget is None:
            chosen = [names.index(self._policies[m.name]) for names, m in zip(names, self._measured, strict=True)]
        else:
            chosen = choose([list(options.values()) for options in every], self._budget)
        for measured, options, index in zip(self._measured, every, chosen, strict=True):
            policy = list(options)[index]
            self._policies[measured.name], self._planned[measured.name] = policy, options[policy]

    def _options(self, block: Measured, narrowing: float, copying: float) -> dict[str, Option]:
        """What a block may do, with bytes held and seconds added to a step."""
        out = block.movable / copying
        hidden = block.seconds * (1 if self._device.type == "cuda" else 0)
        exposed = max(0.0, out - hidden) + max(0.0, out - BACKWARD_OVER_FORWARD * hidden)
        gone = block.movable if self._device.type == "cuda" else 0  # on the CPU the copy lies in the same memory
        options = {
            "keep": Option(block.saved, 0.0),
            "recompute": Option(block.inputs, block.seconds),
            "offload": Option(block.saved - gone, exposed),
            "fp8": Option(block.saved - block.movable + block.narrow, block.movable / narrowing),
        }
        ruled = self._ruled(block.name)
        if ruled is not None:
            return {ruled: options[ruled]}
        if self._budget is None:
            return {"keep": options["keep"]}
        return {policy: option for policy, option in options.items() if policy == "keep" or policy in self._allow}

    # ---- telling ----------------------------------------------------------------------------------------------------------------------

    def describe(self) -> Mapping[str, Any]:
        """The policy of each block; with a budget, once the first batch has been measured, also what each holds and costs."""
        plan = [asdict(block) for block in self._blocks({})] if self._planned else []
        return {"strategy": "activations", "budget": self._budget, "policies": dict(self._policies), "plan": plan}

    def memory_report(self, module: nn.Module, forward: Callable[[], Tensor]) -> MemoryReport:
        """Measure blocks, plan, and hold the plan against what is alive after a real forward pass.

        Args:
            module: what ``apply`` returned.
            forward: one forward pass, from batch to loss.
        """
        self._wanted = True
        forward().backward()  # type: ignore[no-untyped-call]
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device) if on_cuda else 0
        self._alive = Alive({storage_of(p) for p in module.parameters() if type(p) is nn.Parameter}, self._device.type)
        with self._alive, uncompiled(self._modules):
            loss = forward()
        alive, self._alive = self._alive.held(), None
        loss.backward()  # type: ignore[no-untyped-call]
        peak = torch.cuda.max_memory_allocated(self._device) - before if on_cuda else None
        return MemoryReport(budget=self._budget, blocks=tuple(self._blocks(alive)), rest=alive.get("", 0), peak=self._peak(), measured_peak=peak)

    def _blocks(self, alive: Mapping[str, int]) -> list[BlockMemory]:
        return [
            BlockMemory(
                name=m.name,
                saved=m.saved,
                seconds=m.seconds,
                policy=self._policies[m.name],
                held=self._planned[m.name].bytes,
                extra=self._planned[m.name].seconds,
                measured=alive.get(m.name),
            )
            for m in self._measured
        ]

    def _peak(self) -> int:
        """Most bytes of activations at once: what earlier blocks hold, and all that one block saves while it is at work."""
        held, peak = 0, 0
        for m in self._measured:
            peak = max(peak, held + m.saved)
            held += self._planned[m.name].bytes
        return peak


@contextmanager
def uncompiled(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules that are compiled themselves run as they are written: what a compiler traces cannot be measured. What is compiled in them stays."""
    compiled = [(module, module._compiled_call_impl) for module in modules]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


def compiling_within(share: float) -> AbstractContextManager[None]:
    """Graphs that are compiled in here, which each is when it first runs, save so much of their activations."""
    from torch._functorch import config

    patched: AbstractContextManager[None] = config.patch(activation_memory_budget=share)
    return patched


def named_blocks(module: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """The modules within ``module`` whose names match, those within another one that does left out.

    Raises:
        RequestError: a pattern matches no name.
    """
    names = {name: child for name, child in module.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            so = f"no module has such a name; one is {next(iter(names), 'missing')}"
            raise RequestError(f"strategy 'activations' with blocks {pattern!r}", so, "Name modules of the model; * and ? are as in a shell.")
    found: dict[str, nn.Module] = {}
    for name, child in names.items():  # parents come before what is in them
        if any(fnmatchcase(name, pattern) for pattern in patterns) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = child
    return found
