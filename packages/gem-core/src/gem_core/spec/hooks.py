"""The hooks of the trainer. docs/hooks.md holds a heading with the exact signature and an example of each.

Registration hooks are pure and quick, import nothing heavy and answer the same each time. Notices are guarded: one that raises is logged with its
owner, that plugin hears no more of that run, and training goes on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gem_core.spec.cli import CliCommand
from gem_core.spec.data import DataSource
from gem_core.spec.embedding import EmbeddingEngine
from gem_core.spec.events import CheckpointInfo, RunInfo, StepInfo
from gem_core.spec.kernels import KernelImpl, OpSpec
from gem_core.spec.markers import hookspec
from gem_core.spec.models import ModelSpec
from gem_core.spec.parallel import ParallelStrategy, Topology
from gem_core.spec.precision import PrecisionRecipe

# ---- registration: lists of declarations --------------------------------------------------------------------------------------------


@hookspec
def gem_kernel_ops() -> Sequence[OpSpec]:  # type: ignore[empty-body]
    """Declare ops. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_kernel_impls() -> Sequence[KernelImpl]:  # type: ignore[empty-body]
    """Declare kernels for ops, one's own or others'. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_precision_recipes() -> Sequence[PrecisionRecipe]:  # type: ignore[empty-body]
    """Declare precision recipes. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_parallel_strategies() -> Sequence[ParallelStrategy]:  # type: ignore[empty-body]
    """Declare parallel strategies. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_embedding_engines() -> Sequence[EmbeddingEngine]:  # type: ignore[empty-body]
    """Declare embedding engines. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_data_sources() -> Sequence[DataSource]:  # type: ignore[empty-body]
    """Declare data sources. Called once, when the first declaration of any kind is needed."""


@hookspec
def gem_models() -> Sequence[ModelSpec]:  # type: ignore[empty-body]
    """Declare models. Called once, when the first declaration of any kind is needed."""


@hookspec(firstresult=True)
def gem_topology(world: int) -> Topology | None:
    """Describe the machine for ``world`` ranks, or None to leave it to the next plugin; core's own comes last. Called when a run is composed."""


@hookspec
def gem_cli_commands() -> Sequence[CliCommand]:  # type: ignore[empty-body]
    """Add sub-commands. Called only by the ``gem`` command."""


# ---- notices: nothing is returned ---------------------------------------------------------------------------------------------------


@hookspec
def gem_run_started(run: RunInfo) -> None:
    """A run is composed and about to take its first step."""


@hookspec
def gem_step_finished(run: RunInfo, step: StepInfo) -> None:
    """An optimiser step is done. Called at logging steps only, on every rank."""


@hookspec
def gem_checkpoint_saved(run: RunInfo, checkpoint: CheckpointInfo) -> None:
    """A checkpoint is complete on disk. Called on rank 0."""


@hookspec
def gem_run_finished(run: RunInfo, summary: Mapping[str, Any]) -> None:
    """A run ended well; ``summary`` is what ``summary.json`` holds. Called on rank 0."""
