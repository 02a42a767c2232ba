"""What a run tells its listeners."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """A run that starts: its folder, seed, resolved configuration and chosen kernels."""

    folder: Path
    seed: int
    config: Mapping[str, Any]
    kernels: Mapping[str, str]
    rank: int
    world: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInfo:
    """One finished optimiser step.

    ``seconds`` is wall time since the last one; ``flops`` counts forward and backward model FLOPs of all ranks' rows.
    """

    step: int
    epoch: int
    loss: float
    rows: int
    seconds: float
    flops: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A checkpoint that is complete on disk."""

    step: int
    path: Path
