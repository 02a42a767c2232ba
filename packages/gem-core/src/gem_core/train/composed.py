"""A run while it is composed and while it lasts."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from gem_core.config.load import LoadedConfig
from gem_core.config.schema import RunConfig
from gem_core.select.policy import KernelChoice
from gem_core.spec import DataSchema, Embeddings, Precision, PrecisionDecision, RunInfo, Source, Strategy, TableSpec, Topology
from gem_core.train.checkpoint.saved import Saved
from gem_core.train.checkpoint.saver import Saver
from gem_core.train.compiled import Compiled
from gem_core.train.efficiency import Peak
from gem_core.train.ids.managed import ManagedIds
from gem_core.train.ledger.keeper import StepLedger
from gem_core.train.log import RunLog
from gem_core.train.optim import AveragedWeights
from gem_core.train.progress import Progress
from gem_core.train.step import Learner
from gem_core.train.world import World


class Run:
    """A run being composed, then running. Fields are filled by the stages, in their order.

    Args:
        loaded: the configuration.
        resume: the run folder to go on from (training), or to take the weights from (evaluation).
        training: False composes for evaluation only: no optimisers, no folder is written, nobody is notified.
    """

    config: RunConfig
    topology: Topology
    world: World
    source: Source
    schema: DataSchema
    options: Any
    tables: Sequence[TableSpec]
    ids: ManagedIds
    model: nn.Module
    precision: Precision
    decisions: Sequence[PrecisionDecision]
    embeddings: Embeddings
    strategies: list[tuple[str, bool, Strategy]]
    dense: nn.Module
    choices: list[KernelChoice]
    kernels: dict[str, str]
    learner: Learner
    peak: Peak
    peak_flops: float
    manifest: dict[str, Any]
    info: RunInfo
    log: RunLog
    ledger: StepLedger
    saver: Saver

    def __init__(self, loaded: LoadedConfig, *, resume: Path | None = None, training: bool = True) -> None:
        self.loaded, self.config = loaded, loaded.config
        self.resume, self.training = resume, training
        self.folder = resume or Path(loaded.config.run.out)
        self.saved: Saved | None = None
        self.average: AveragedWeights | None = None
        self.compiled = Compiled()
        self.begun = time.perf_counter()
        self.first_step_seconds = 0.0
        """From here to the end of the first step that this process takes: composing and compiling included."""
        self.progress = Progress()
        self.saved_step = -1
        self._stack = ExitStack()

    def enter(self, context: Any) -> Any:
        """Enter a context that lasts as long as the run."""
        return self._stack.enter_context(context)

    def at_end(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call this when the run is closed, before what was asked for earlier."""
        self._stack.callback(function, *arguments)

    def close(self) -> None:
        """Leave every context that the run has entered, and call what was asked for, the last first."""
        self._stack.close()

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run, by the rows that the source promises."""
        batches = math.ceil(self.source.rows("train") / self.config.data.batch_size)
        steps = self.config.train.epochs * math.ceil(batches / self.config.optim.accumulate)
        return min(steps, self.config.train.max_steps or steps)
