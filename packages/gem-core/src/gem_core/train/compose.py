"""Building a run, in one fixed order. Plugins say what is used; this file alone says when.

``STAGES`` is that order. Each stage fills fields of the ``Run`` that later stages read, and whatever can be refused is refused before the first step.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gem_core.config.load import LoadedConfig
from gem_core.ops.dispatch import cuda_arch, device_name
from gem_core.ops.slot import bind_kernels
from gem_core.plugins import host
from gem_core.select.policy import choose, policy_scope
from gem_core.spec import (
    DelaysReduction,
    ParallelContext,
    PluginError,
    Precision,
    PrecisionDecision,
    RequestError,
    SparseOptimizer,
)
from gem_core.spec.parallel import STAGES as STRATEGY_STAGES
from gem_core.topology.describe import described
from gem_core.train import folder
from gem_core.train.checkpoint import restore, values
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.compiled import compiled_blocks
from gem_core.train.composed import Run
from gem_core.train.efficiency import tf32_as_before
from gem_core.train.graphs import GraphedLoss, Recorder, check_recordable
from gem_core.train.ids.layout import with_rows
from gem_core.train.ids.managed import ManagedIds
from gem_core.train.ids.saving import rules_for
from gem_core.train.labels import check_tasks
from gem_core.train.materialise import fill_weights
from gem_core.train.metrics import StreamMetrics
from gem_core.train.optim import AveragedWeights, adamw
from gem_core.train.rounding import rounded_together, rounds_together
from gem_core.train.started import restore_run, start_run, write_manifest
from gem_core.train.static_inputs import Extents
from gem_core.train.step import Learner, scored_loss
from gem_core.train.world import close_world, open_world, torchrun_ranks

log = logging.getLogger("gem_core.train")


def _configuration(run: Run) -> None:
    if run.resume is None:
        folder.check_new(run.folder)
        return
    folder.require_run(run.resume)
    run.saved = find_checkpoint(run.resume)
    if run.training:
        restore.check_same_run(run.saved.about, run.config)


def _plugins(run: Run) -> None:
    host().require(run.config.plugins.require)


def _topology(run: Run) -> None:
    if run.config.parallel.topology:
        run.topology = described(run.config.parallel.topology, torchrun_ranks()[1])
        return
    found = host().first("gem_topology", world=torchrun_ranks()[1])
    if found is None:
        raise PluginError("the machine's topology", "no plugin describes it", "Core's own plugin does: see `gem plugins list`.")
    run.topology = found[1]


def _mesh(run: Run) -> None:
    if run.config.run.threads:
        torch.set_num_threads(run.config.run.threads)
    run.world = open_world(run.config.run.device)
    run.at_end(close_world, run.world, run)
    values.seed_random_state(run.config.run.seed, run.world)


def _data(run: Run) -> None:
    data = run.config.data
    run.source = host().build("data_sources", data.source, data.options)
    run.schema = run.source.schema()
    check_tasks(run.schema.tasks)
    for split in ("train", "test"):
        if run.source.rows(split) < 1:
            raise RequestError(f"the {split} split of {data.source!r}", "it has no rows", "Choose other data options.")
    if run.training and run.saved is not None:
        restore.check_same_data(run.saved.about, run.source)
    if late := [step for step in run.config.train.trace if step > run.total_steps]:
        raise RequestError(f"train.trace with steps {late}", f"the run ends with step {run.total_steps}", "Name earlier ones.")


def _model_on_meta(run: Run) -> None:
    name, options = run.config.model.name, run.config.model.options
    run.options = host().options("models", name, options)
    cls: Any = host().load("models", name)
    every_id = cls.tables(run.schema, run.options)
    rules = rules_for(every_id, run.config.embedding.ids, run.saved)
    run.ids = ManagedIds(every_id, rules, run.world, run.config.run.seed)
    run.tables = with_rows(every_id, rules)
    try:
        with torch.device("meta"):
            run.model = _build_model(run)
    except (NotImplementedError, RuntimeError) as error:  # what torch raises for a meta tensor whose values are asked for
        so = f"it cannot be built on the meta device: {error}"
        raise PluginError(f"model {name!r}", so, "Keep tensors' values out of __init__; it may use shapes only.") from error


def _precision(run: Run) -> None:
    run.enter(tf32_as_before())
    run.precision, run.decisions = _prepare(run, run.model)


def _strategies(run: Run) -> None:
    embedding, parallel = run.config.embedding, run.config.parallel
    declared = [host().declaration("parallel_strategies", name) for name in parallel.strategies]
    if run.world.size > 1 and not any(d.stage == "dense" for d in declared):
        so = f"none of the strategies {list(parallel.strategies)} spreads the dense part"
        raise RequestError(f"{run.world.size} processes", so, "Name one, for example --set 'parallel.strategies=[\"ddp\"]'.")
    optimizer = SparseOptimizer(name=embedding.optimizer, lr=embedding.lr, eps=embedding.eps)
    keywords = {"device": run.world.device, "seed": run.config.run.seed}
    run.embeddings = host().build("embedding_engines", embedding.engine, embedding.options, run.tables, optimizer, **keywords)
    if missing := [name for name in ("table_slices", "table_updates", "tables_loaded") if not hasattr(run.embeddings, name)]:
        raise PluginError(
            f"embedding engine {embedding.engine!r}", f"it lacks {', '.join(missing)}", "A checkpoint needs them: see docs/checkpoints.md."
        )
    declared.sort(key=lambda d: STRATEGY_STAGES.index(d.stage))
    run.strategies = [(d.name, d.on_meta, host().build("parallel_strategies", d.name, parallel.options.get(d.name, {}))) for d in declared]
    run.dense = _apply_strategies(run, run.model, on_meta=True)


def _materialise(run: Run) -> None:
    def weights() -> nn.Module:
        model = _build_model(run)
        _prepare(run, model)
        return model

    fill_weights(run.model, weights, run.world.device, run.config.run.seed)
    run.dense = _apply_strategies(run, run.dense, on_meta=False)


def _kernels_bound(run: Run) -> None:
    run.enter(policy_scope(run.loaded.kernel_policy()))
    device = run.world.device
    asked: dict[str, Any] = {
        "device": device_name(device),
        "dtype": run.precision.compute_dtype(),
        "arch": cuda_arch(device.index or 0) if device.type == "cuda" else None,
        "backward": True,  # evaluation uses the kernels that training uses
    }
    model: Any = run.model
    bound = bind_kernels(run.model, **asked)
    known = {choice.request for choice in bound}
    others = [choose(request) for request in model.kernel_requests(**asked) if request not in known]  # a model may call ops without slots
    run.choices = list({(choice.request, choice.backend): choice for choice in (*bound, *others)}.values())
    backends: dict[str, set[str]] = {}
    for choice in run.choices:
        backends.setdefault(choice.request.op, set()).add(choice.backend)
    run.kernels = {op: "+".join(sorted(names)) for op, names in sorted(backends.items())}


def _compile(run: Run) -> None:
    if run.config.compile.graphs:
        check_recordable(run.world, run.precision, run.config, run.model)
    if run.config.compile.blocks != "off":
        run.compiled = run.enter(compiled_blocks(run.model, run.config.compile, run.schema))
    if rounds_together(run.world, run.precision, run.config.parallel.strategies):
        run.enter(rounded_together(run.model, run.decisions))


def _optimisers(run: Run) -> None:
    optim, decay = run.config.optim, run.config.train.ema_decay
    run.average = AveragedWeights(run.model, decay) if decay else None
    run.learner = Learner(
        world=run.world,
        tasks=run.schema.tasks,
        model=run.model,
        dense=run.dense,
        embeddings=run.embeddings,
        precision=run.precision,
        optimizer=adamw(run.model, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay),
        dense_lr=optim.lr,
        sparse_lr=run.config.embedding.lr,
        clip_norm=optim.clip_norm,
        average=run.average,
        stream=StreamMetrics(run.schema.tasks, run.world.device),
        delaying=[strategy for _, _, strategy in run.strategies if isinstance(strategy, DelaysReduction)],
    )
    if run.config.compile.graphs:
        run.learner.graphs = graphs_of(run, count=run.config.compile.graphs)


def graphs_of(run: Run, *, count: int, recorder: Recorder | None = None) -> GraphedLoss:
    """What computes the loss of a run by ``count`` recordings."""
    return GraphedLoss(
        loss_of=partial(scored_loss, run.dense, run.schema.tasks),
        context=partial(run.precision.forward_context, run.world.device.type),
        parameters=list(run.model.parameters()),
        extents=Extents(run.schema, frozenset(feature for table in run.tables if table.pooling != "none" for feature in table.features)),
        tasks=run.schema.tasks,
        rows=run.config.data.batch_size,
        count=count,
        accumulates=run.config.optim.accumulate > 1,
        recorder=recorder,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of composing: its printed name, what it does, and whether only training does it."""

    name: str
    do: Callable[[Run], None]
    training_only: bool = False


STAGES = (
    Stage("configuration", _configuration),
    Stage("plugins", _plugins),
    Stage("topology", _topology),
    Stage("mesh", _mesh),
    Stage("data source and schema", _data),
    Stage("model on meta", _model_on_meta),
    Stage("precision", _precision),
    Stage("strategies by stage", _strategies),
    Stage("materialise", _materialise),
    Stage("kernels bound", _kernels_bound),
    Stage("compile per block", _compile),
    Stage("optimisers", _optimisers, training_only=True),
    Stage("restore", restore_run),
    Stage("manifest", write_manifest, training_only=True),
    Stage("run started", start_run, training_only=True),
)


PREVIEWED = (_configuration, _plugins, _topology, _mesh, _data, _model_on_meta, _precision, _kernels_bound)
"""What can be refused without weights and tables."""


def preview(loaded: LoadedConfig) -> Run:
    """A run with its data source, its model on the meta device, decisions and kernels: no weights, no tables, no folder. It is closed.

    Raises:
        GemError: as ``compose`` would say it.
    """
    run = Run(loaded)
    try:
        for stage in PREVIEWED:
            stage(run)
    finally:
        run.close()
    return run


def compose(loaded: LoadedConfig, *, resume: Path | None = None, training: bool = True) -> Run:
    """Build a run through all stages. The caller closes it.

    Raises:
        GemError: the first stage that cannot do what the configuration asks says so.
    """
    run = Run(loaded, resume=resume, training=training)
    try:
        for stage in STAGES:
            skipped = stage.training_only and not training
            log.debug("compose: %s%s", stage.name, " (nothing to do)" if skipped else "")
            if not skipped:
                stage.do(run)
    except BaseException:
        run.close()
        raise
    return run


def _build_model(run: Run) -> nn.Module:
    model: nn.Module = host().build("models", run.config.model.name, run.config.model.options, run.schema)
    return model


def _prepare(run: Run, model: nn.Module) -> tuple[Precision, Sequence[PrecisionDecision]]:
    precision: Precision = host().build("precision_recipes", run.config.precision.recipe, run.config.precision.options)
    return precision, precision.prepare(model, run.world.device.type)


def _apply_strategies(run: Run, dense: nn.Module, *, on_meta: bool) -> nn.Module:
    world = run.world
    context = ParallelContext(rank=world.rank, world=world.size, device=str(world.device), topology=run.topology)
    for _, early, strategy in run.strategies:
        if early == on_meta:
            dense = strategy.apply(dense, context)
    return dense
