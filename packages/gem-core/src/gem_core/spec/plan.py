"""What is planned before a run: where an embedding engine puts its tables, and what a step takes in a layout of ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gem_core.spec.parallel import Topology


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFacts:
    """What one rank looks up in a step, as an average over ranks.

    Args:
        rows: rows of its share of a global batch.
        ids: ids by feature.
        distinct: distinct rows by table.
    """

    rows: float
    ids: Mapping[str, float]
    distinct: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TablePlan:
    """Where one table lies.

    Args:
        table: its name.
        rows: its rows.
        dim: its width.
        sharding: the engine's word for how it is spread.
        where: the ranks that hold it, in words.
        bytes: weights and optimiser state, over all ranks.
    """

    table: str
    rows: int
    dim: int
    sharding: str
    where: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingPlan:
    """What an engine would do on ``world`` ranks.

    Args:
        world: number of ranks.
        tables: every table once.
        held: bytes of weights and optimiser state that each rank keeps, ``[world]``.
        working: bytes a rank needs beside them in a step, for tables that are gathered.
        sent: bytes that each rank sends in a step by what they are sent for, ``{name: [world]}``, estimated from ``BatchFacts``.
        file: text of a plan file that pins the placement; None where nothing can be pinned.
    """

    world: int
    tables: tuple[TablePlan, ...]
    held: tuple[int, ...]
    working: int
    sent: Mapping[str, tuple[float, ...]]
    file: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """One block of the dense part: an entry of a list of modules under the model, or ``rest`` for everything else.

    Args:
        name: its name in the model.
        parameters: numbers in its weights, experts included.
        flops: forward model FLOPs of one row, experts included.
        saved: bytes of activations that one row leaves for backward, as measured.
        experts: how many interaction experts it has.
        expert_parameters: numbers in the experts' weights.
        expert_flops: forward model FLOPs of one row through the experts.
        expert_numbers: numbers of one row that enter its experts, and that come out of them.
    """

    name: str
    parameters: int
    flops: float
    saved: float
    experts: int = 0
    expert_parameters: int = 0
    expert_flops: float = 0.0
    expert_numbers: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What a cost model knows of the dense part.

    Args:
        blocks: in the order of the forward pass; ``rest`` first.
        dtype: the compute dtype: ``fp32``, ``bf16``, ...
        row_cv: standard deviation over mean of the rows' forward FLOPs.
    """

    blocks: tuple[BlockFacts, ...]
    dtype: str
    row_cv: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRequest:
    """What ``gem plan`` asks of a strategy's planner.

    Args:
        topology: the machine and the number of ranks.
        model: the dense part.
        batch: what a rank looks up in a micro-batch.
        tables: the embedding engine's plan for a number of table replicas. MachineError where the tables do not fit, RequestError where the engine
            has no such layout.
        table_replicas: the configured number.
        strategies: options by the name of each configured strategy.
        best: with 0 the configured layout is evaluated; otherwise so many of the best layouts are looked for.
        assume: figures of the user's in place of the planner's own, by name.
        micro_batches: of a step (``optim.accumulate``).
    """

    topology: Topology
    model: ModelFacts
    batch: BatchFacts
    tables: Callable[[int], EmbeddingPlan]
    table_replicas: int
    strategies: Mapping[str, Mapping[str, Any]]
    best: int = 0
    assume: Mapping[str, float] | None = None
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPlan:
    """What a step takes in one layout. Times are seconds, means over ranks whose sum is the step; bytes are those of the fullest rank.

    Args:
        axes: degrees by name.
        seconds: time of a step.
        parts: what the time goes to: compute, look-ups, optimiser, each exposed collective, waiting for slower ranks.
        communication: time of each collective, hidden or not.
        sent: bytes that a rank sends by collective.
        memory: bytes by what they are for.
        local_mfu: model FLOPs over compute time and peak.
        scaling: compute time over step time.
        samples_per_second: of all ranks.
        binding: ``compute`` where it is half of the step or more, else the longest of the other parts.
        fits: whether the memory suffices; None where that of a device is unknown.
        settings: ``--set`` values that ask for this layout.
        why: reasons in words.
    """

    axes: Mapping[str, int]
    seconds: float
    parts: Mapping[str, float]
    communication: Mapping[str, float]
    sent: Mapping[str, float]
    memory: Mapping[str, float]
    local_mfu: float
    scaling: float
    samples_per_second: float
    binding: str
    fits: bool | None
    settings: tuple[str, ...] = ()
    why: tuple[str, ...] = ()

    @property
    def mfu(self) -> float:
        """End to end: local MFU times scaling ratio."""
        return self.local_mfu * self.scaling


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A planner's answer.

    Args:
        layouts: the best first.
        considered: how many layouts were evaluated.
        refused: layouts that cannot be, by reason.
        drawing: lines that draw the first layout on the tiers.
        assumptions: figures that were assumed, with their sources.
    """

    layouts: tuple[LayoutPlan, ...]
    considered: int
    refused: Mapping[str, int]
    drawing: tuple[str, ...]
    assumptions: tuple[str, ...]
