"""The contract between core and its plugins. Imports only the standard library and pluggy."""

from gem_core.spec.cli import CliCommand
from gem_core.spec.data import (
    CountsUnknownIds,
    DataSchema,
    DataSource,
    DenseFeature,
    IdFeature,
    ResumableSource,
    SequenceFeature,
    Shard,
    Source,
    Task,
)
from gem_core.spec.embedding import (
    ADAM_BETAS,
    EmbeddingEngine,
    Embeddings,
    SparseOptimizer,
    TableSlice,
    TableSpec,
    check_import,
    check_lr,
    check_tables,
    table_seed,
    table_state,
)
from gem_core.spec.errors import GemError, KernelUnavailable, MachineError, PluginError, RequestError, RunFailed
from gem_core.spec.events import CheckpointInfo, RunInfo, StepInfo
from gem_core.spec.kernels import DEVICES, DTYPES, KernelImpl, KernelRequest, OpSpec, load_object
from gem_core.spec.markers import ENTRY_POINT_GROUP, PROJECT, hookimpl, hookspec
from gem_core.spec.models import Model, ModelSpec
from gem_core.spec.parallel import STAGES, ParallelContext, ParallelStrategy, Strategy, Tier, Topology
from gem_core.spec.plan import BatchFacts, EmbeddingPlan, TablePlan
from gem_core.spec.precision import Precision, PrecisionDecision, PrecisionRecipe

__all__ = [
    "ADAM_BETAS",
    "DEVICES",
    "DTYPES",
    "ENTRY_POINT_GROUP",
    "PROJECT",
    "STAGES",
    "BatchFacts",
    "CheckpointInfo",
    "CliCommand",
    "CountsUnknownIds",
    "DataSchema",
    "DataSource",
    "DenseFeature",
    "EmbeddingEngine",
    "EmbeddingPlan",
    "Embeddings",
    "GemError",
    "IdFeature",
    "KernelImpl",
    "KernelRequest",
    "KernelUnavailable",
    "MachineError",
    "Model",
    "ModelSpec",
    "OpSpec",
    "ParallelContext",
    "ParallelStrategy",
    "PluginError",
    "Precision",
    "PrecisionDecision",
    "PrecisionRecipe",
    "RequestError",
    "ResumableSource",
    "RunFailed",
    "RunInfo",
    "SequenceFeature",
    "Shard",
    "Source",
    "SparseOptimizer",
    "StepInfo",
    "Strategy",
    "TablePlan",
    "TableSlice",
    "TableSpec",
    "Task",
    "Tier",
    "Topology",
    "check_import",
    "check_lr",
    "check_tables",
    "hookimpl",
    "hookspec",
    "load_object",
    "table_seed",
    "table_state",
]
