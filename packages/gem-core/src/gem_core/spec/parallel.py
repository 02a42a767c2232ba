"""Declaration of parallel strategies and of the machine's topology."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

STAGES = ("sparse", "experts", "dense", "memory")
"""The order in which strategies are applied while a run is composed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """One level of the network: ``size`` devices share links of ``bandwidth`` bytes a second each way, with ``latency`` seconds."""

    name: str
    size: int
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """The machine: ``world`` ranks on ``device`` devices, innermost tier first. ``source`` says who found it.

    ``memory`` is that of one device in bytes and ``memory_bandwidth`` its speed in bytes a second; None where nobody knows.
    """

    world: int
    device: str
    tiers: tuple[Tier, ...] = ()
    source: str = "unknown"
    memory: int | None = None
    memory_bandwidth: float | None = None


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
        on_meta: whether ``apply`` is given the module on the meta device, before its weights exist. The others are applied, in the same order of
            stages, right after the weights have been made.
    """

    name: str
    stage: str
    summary: str
    load: str
    options: str | None = None
    on_meta: bool = False


class Strategy(Protocol):
    """What a strategy loads."""

    def apply(self, module: Any, context: ParallelContext) -> Any:
        """Wrap or change the dense module; return the module to call in its place."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """Plain values for the manifest."""
        ...
