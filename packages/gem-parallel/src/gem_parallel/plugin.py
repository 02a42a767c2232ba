"""Declarations of this package. Imports no torch."""

from collections.abc import Sequence

from gem_core.spec import CliCommand, EmbeddingEngine, ParallelStrategy, hookimpl


@hookimpl
def gem_embedding_engines() -> Sequence[EmbeddingEngine]:
    return [
        EmbeddingEngine(
            name="torchrec",
            summary="fbgemm tables updated inside backward; sharded over ranks by torchrec",
            load="gem_parallel.sparse.engine:TorchRecEmbeddings",
            options="gem_parallel.sparse.options:TorchRecOptions",
            plan="gem_parallel.sparse.planning:plan_torchrec",
        ),
        EmbeddingEngine(
            name="sharded_2d",
            summary="tables and optimiser state fully sharded over shard groups and replicas, exact",
            load="gem_parallel.sparse.sharded2d:Sharded2DEmbeddings",
            options="gem_parallel.sparse.options:Sharded2DOptions",
            plan="gem_parallel.sparse.planning:plan_sharded_2d",
        ),
    ]


@hookimpl
def gem_parallel_strategies() -> Sequence[ParallelStrategy]:
    return [
        ParallelStrategy(
            name="experts",
            stage="experts",
            summary="neighbouring ranks share out the interaction experts; each expert sees the joined rows",
            load="gem_parallel.dense.experts:ExpertParallel",
            options="gem_parallel.dense.options:ExpertOptions",
            plan="gem_parallel.costmodel.planning:plan_step",
            on_meta=True,
        ),
        ParallelStrategy(
            name="ddp",
            stage="dense",
            summary="a copy of the dense part on each rank, gradients averaged",
            load="gem_parallel.dense.ddp:DataParallel",
            plan="gem_parallel.costmodel.planning:plan_step",
        ),
        ParallelStrategy(
            name="fsdp",
            stage="dense",
            summary="the dense part sharded over ranks block by block, with or without replicas",
            load="gem_parallel.dense.fsdp:FullyShard",
            options="gem_parallel.dense.options:FsdpOptions",
            plan="gem_parallel.costmodel.planning:plan_step",
            on_meta=True,
        ),
        ParallelStrategy(
            name="activations",
            stage="memory",
            summary="blocks keep what backward needs, compute it again, hold it in host memory or in eight bits",
            load="gem_parallel.memory.activations:Activations",
            options="gem_parallel.memory.options:ActivationOptions",
        ),
    ]


@hookimpl
def gem_cli_commands() -> Sequence[CliCommand]:
    return [
        CliCommand(name="bench comm", load="gem_parallel.comm.cli:comm", summary="Measure collectives, and what they cost the work beside them."),
        CliCommand(
            name="bench scale", load="gem_parallel.scale.cli:scale", summary="Train on 1, 2, 4 ... ranks: where a step goes, beside the prediction."
        ),
    ]
