"""Core's own plugin: declarations only, through the same hooks as anybody's. Imports no torch."""

from collections.abc import Sequence

from gem_core.builtin.baselines import BASELINE_KERNELS
from gem_core.builtin.kernels import OPS, REFERENCE_KERNELS
from gem_core.spec import (
    DataSource,
    EmbeddingEngine,
    KernelImpl,
    ModelSpec,
    OpSpec,
    ParallelStrategy,
    PrecisionRecipe,
    Topology,
    hookimpl,
)


@hookimpl
def gem_kernel_ops() -> Sequence[OpSpec]:
    return OPS


@hookimpl
def gem_kernel_impls() -> Sequence[KernelImpl]:
    return (*REFERENCE_KERNELS, *BASELINE_KERNELS)


@hookimpl
def gem_precision_recipes() -> Sequence[PrecisionRecipe]:
    return [
        PrecisionRecipe(name="fp32", summary="everything in float32", load="gem_core.builtin.precision:Fp32"),
        PrecisionRecipe(name="bf16", summary="matmuls and kernels in bfloat16, parameters in float32", load="gem_core.builtin.precision:Bf16"),
    ]


@hookimpl
def gem_parallel_strategies() -> Sequence[ParallelStrategy]:
    return [ParallelStrategy(name="single", stage="dense", summary="one process, one device", load="gem_core.builtin.parallel:SingleDevice")]


@hookimpl
def gem_embedding_engines() -> Sequence[EmbeddingEngine]:
    return [EmbeddingEngine(name="torch", summary="whole tables in plain torch, on one device", load="gem_core.builtin.embedding:TorchEmbeddings")]


@hookimpl
def gem_data_sources() -> Sequence[DataSource]:
    return [DataSource(name="toy", summary="small generated data with every kind of feature, for tests", load="gem_core.builtin.toy:ToySource")]


@hookimpl
def gem_models() -> Sequence[ModelSpec]:
    return [
        ModelSpec(
            name="gem",
            summary="generative ads model: event sequences and features, crossed layer by layer",
            load="gem_core.model.gem:GemModel",
            options="gem_core.model.gem:GemOptions",
        ),
        ModelSpec(
            name="hstu",
            summary="HSTU ranker over one merged history",
            load="gem_core.model.hstu:HstuModel",
            options="gem_core.model.hstu:HstuOptions",
        ),
        ModelSpec(
            name="dlrm",
            summary="DLRM/DCN-style baseline without sequence layers",
            load="gem_core.model.dlrm:DlrmModel",
            options="gem_core.model.dlrm:DlrmOptions",
        ),
    ]


@hookimpl(trylast=True)
def gem_topology(world: int) -> Topology:
    from gem_core.topology.detect import detect

    return detect(world)
