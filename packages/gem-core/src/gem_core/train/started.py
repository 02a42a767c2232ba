"""The last stages of composing: what a checkpoint gives back, the manifest, and what a run keeps open while it lasts."""

import logging
from functools import partial
from pathlib import Path

import torch

from gem_core.config.resolve import resolved
from gem_core.plugins import host
from gem_core.spec import ChangingPrecision, CheckpointInfo, RequestError, ResumableSource, RunInfo
from gem_core.train import folder, manifest
from gem_core.train.checkpoint import restore, values
from gem_core.train.checkpoint.saver import Saver
from gem_core.train.composed import Run
from gem_core.train.efficiency import peak_of
from gem_core.train.ids.saving import restore_ids
from gem_core.train.ledger.keeper import StepLedger
from gem_core.train.ledger.trace import Tracer
from gem_core.train.log import RunLog
from gem_core.train.optim import AveragedWeights

log = logging.getLogger("gem_core.train")


def restore_run(run: Run) -> None:
    """Go on from the checkpoint that the run has found, if it has."""
    if run.saved is None:
        return
    if run.training and run.saved.about["kernels"] != run.kernels:
        so = f"the run was started with {run.saved.about['kernels']} and would go on with {run.kernels}"
        raise RequestError(f"resuming {run.resume}", so, "Name the kernels it was started with: --set kernels.use.OP=BACKEND.")
    restore.verify_together(run.saved, run.world)
    trainer = run.saved.trainer()
    restore.restore_dense(run.model, run.saved, run.learner.optimizer if run.training else None)
    moves = restore_ids(run.ids, run.saved, run.world, clock=trainer.get("ids", 0))
    restore.restore_tables(run.embeddings, run.saved, updates=trainer["updates"] if run.training else None, moves=moves)
    same_recipe = run.saved.about["config"]["precision"]["recipe"] == run.config.precision.recipe  # an evaluation may have another
    if isinstance(run.precision, ChangingPrecision) and same_recipe and trainer.get("precision") is not None:
        run.precision.load_state_dict(trainer["precision"])
        run.decisions = run.precision.decisions()
    if run.config.train.ema_decay:
        run.average = run.average or AveragedWeights(run.model, run.config.train.ema_decay)
        restore.restore_average(run.average.state_dict(), run.saved)
    if not run.training:
        return
    unknown = run.learner.stream.load_state_dict(trainer["stream"], run.world)
    if unknown:
        log.warning("training metrics of %s stand on one side only and start afresh", ", ".join(unknown))
    run.progress.load_state_dict(trainer["progress"], run.world)
    run.saved_step = run.progress.step
    values.restore_random_state(trainer["random"], run.world)
    if isinstance(run.source, ResumableSource):
        if trainer.get("data") is None:
            raise RequestError(f"resuming {run.resume}", "its checkpoint holds no cursor of the data source", "Start a new run.")
        run.source.restore(trainer["data"])


def write_manifest(run: Run) -> None:
    """Say in the run's folder what it is made of."""
    run.peak = peak_of(run.world.device, run.precision.compute_dtype())
    run.peak_flops = float(run.world.all_gather(torch.tensor([run.peak.flops_per_second], dtype=torch.float64)).sum())
    earlier = folder.read_manifest(run.folder) if run.resume else {}
    run.manifest = manifest.manifest(
        config=manifest.config_rows(resolved(run.loaded, host()), earlier.get("config", ())),
        world=run.world,
        plugins=host().plugins,
        kernels=manifest.kernel_rows(run.choices),
        decisions=run.decisions,
        strategies={name: strategy.describe() for name, _, strategy in run.strategies},
        topology=run.topology,
        model=run.model,
        tables=run.tables,
        peak=run.peak,
        resumed=[*earlier.get("resumed", ()), *([run.progress.step] if run.resume else ())],
        precision_events=[event for event in earlier.get("precision_events", ()) if event["step"] <= run.progress.step],
    )
    if run.world.leads:
        if run.resume is None:
            folder.claim(run.folder)
        folder.write_config(run.folder / "config.toml", run.loaded)
        folder.write_json(run.folder / folder.MANIFEST, run.manifest)
    run.world.barrier()


def describe_again(run: Run) -> None:
    """Bring the manifest up to date with strategies that decide on the first batch."""
    told = {name: dict(strategy.describe()) for name, _, strategy in run.strategies}
    if told != run.manifest["parallel"]:
        run.manifest["parallel"] = told
        if run.world.leads:
            folder.write_json(run.folder / folder.MANIFEST, run.manifest)


def start_run(run: Run) -> None:
    """Open the log, the ledger and the saver, and tell plugins."""
    world, config = run.world, run.config
    run.log = run.enter(RunLog(run.folder if world.leads else None, total=run.total_steps, step=run.progress.step))
    run.log.event("resumed" if run.resume else "started", run.progress.step, kernels=run.kernels, world=world.size)
    if run.ids.report:
        run.log.event("resized", run.progress.step, tables=run.ids.report)
    dump = config.model_dump(mode="json")
    run.info = RunInfo(folder=run.folder, seed=config.run.seed, config=dump, kernels=run.kernels, rank=world.rank, world=world.size)
    parts = (*(strategy for _, _, strategy in run.strategies), run.embeddings)
    steps_csv = run.folder / "steps.csv" if config.train.steps_csv else None
    run.ledger = StepLedger(world, parts, steps_csv=steps_csv, tracer=Tracer(run.folder, config.train.trace))
    run.at_end(run.ledger.stop)
    run.saver = Saver(run.folder / "checkpoints", world, keep=config.train.keep_checkpoints, told=partial(_checkpoint_complete, run))
    run.at_end(run.saver.close)
    host().notify("gem_run_started", run=run.info)


def _checkpoint_complete(run: Run, step: int, path: Path) -> None:
    run.log.event("checkpoint", step)
    if run.world.leads:
        host().notify("gem_checkpoint_saved", run=run.info, checkpoint=CheckpointInfo(step=step, path=path))
