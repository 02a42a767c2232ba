"""Declaration of parallel strategies and of the machine's topology."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

STAGES = ("sparse", "experts", "dense", "memory")
"""The order in which strategies are applied while a run is composed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One level of the network: ``size`` devices, those of the tiers inside it included, share its links.

    Args:
        name: ``host``, ``zone``, ``region``, ...
        size: devices within it.
        bandwidth: bytes a second that one device can send through it while all others are silent; as much again the other way.
        latency: seconds of a message.
        oversubscription: by how much the devices together can ask for more than the tier carries. 1 carries them all.
    """

    name: str
    size: int
    bandwidth: float
    latency: float = 0.0
    oversubscription: float = 1.0

    @property
    def share(self) -> float:
        """Bytes a second each way that a device gets when all send at once."""
        return self.bandwidth / self.oversubscription


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The machine: ``world`` ranks on ``device`` devices, one rank a device. What nobody knows is None or empty.

    Args:
        world: number of ranks.
        device: ``cpu`` or ``cuda``.
        tiers: innermost first; the last one holds all ranks.
        source: who says so.
        memory: of one device, in bytes.
        memory_bandwidth: of one device, in bytes a second.
        peak_flops: dense FLOP/s of one device by dtype (``bf16``, ``fp8``, ``tf32``, ``fp32``).
    """

    world: int
    device: str
    tiers: tuple[Tier, ...] = ()
    source: str = "unknown"
    memory: int | None = None
    memory_bandwidth: float | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelContext:
    """What a strategy may use: this rank, the world, the device and the topology."""

    rank: int
    world: int
    device: str
    topology: Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelStrategy:
    """A named way of spreading one part of the model over ranks.

    Args:
        name: the name used in ``[parallel] strategies = [...]``.
        stage: one of ``STAGES``.
        summary: one line for tables.
        load: ``module:callable``; called with the options as keyword arguments, returns a ``Strategy``.
        options: optional ``module:class`` of the pydantic model that validates the options.
        plan: optional ``module:callable(request: StepRequest) -> StepPlan`` for ``gem plan``: what a step would take in this layout, or in the best
            ones. It needs no process group and no device.
        on_meta: whether ``apply`` is given the module on the meta device, before its weights exist. The others are applied, in the same order of
            stages, right after the weights have been made.
    """

    name: str
    stage: str
    summary: str
    load: str
    options: str | None = None
    plan: str | None = None
    on_meta: bool = False


class Strategy(Protocol):
    """What a strategy loads."""

    def apply(self, module: Any, context: ParallelContext) -> Any:
        """Wrap or change the dense module; return the module to call in its place."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Plain values for the manifest."""
        ...


@runtime_checkable
class DelaysReduction(Protocol):
    """A strategy that need not reduce gradients over all ranks before the last micro-batch of a step."""

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """What the trainer enters around forward and backward of each of several micro-batches. After the last one gradients are as without it."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockMemory:
    """What one block of the dense part does with its activations, in bytes of a rank and seconds of a step.

    Args:
        name: of the block.
        saved: what it would hold for backward if nothing were done.
        seconds: of its forward.
        policy: what it does.
        held: what it holds by the plan.
        extra: seconds that the policy adds to a step.
        measured: what was alive after a forward pass; None where that was not looked at.
    """

    name: str
    saved: int
    seconds: float
    policy: str
    held: int
    extra: float
    measured: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Planned and measured activations of one batch.

    Args:
        budget: bytes that the blocks may hold, or None.
        blocks: in the order of the forward pass.
        rest: bytes alive after a forward pass that belong to no block.
        peak: most bytes of activations at once, by the plan.
        measured_peak: most bytes allocated beside what is there before a step; None on the CPU.
    """

    budget: int | None
    blocks: tuple[BlockMemory, ...]
    rest: int
    peak: int
    measured_peak: int | None


@runtime_checkable
class ReportsMemory(Protocol):
    """A strategy that ``gem memory`` can ask."""

    def memory_report(self, module: Any, forward: Any) -> MemoryReport:
        """Plan and measure.

        Args:
            module: what ``apply`` returned.
            forward: callable without arguments: one forward pass from batch to loss. It is called several times.
        """
        ...
