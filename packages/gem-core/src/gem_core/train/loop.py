"""The training loop, read from top to bottom."""

import time
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import torch

from gem_core import __version__
from gem_core.plugins import host
from gem_core.spec import GemError, ResumableSource, RunFailed, Shard, StepInfo
from gem_core.train.checkpoint import restore, values
from gem_core.train.checkpoint.pieces import dense_pieces, table_pieces
from gem_core.train.checkpoint.saver import Content
from gem_core.train.compiled import limit_named
from gem_core.train.composed import Run
from gem_core.train.efficiency import TRAIN_OVER_FORWARD
from gem_core.train.evaluate import Evaluation, evaluate
from gem_core.train.feed import Feed, Work
from gem_core.train.garbage import spared
from gem_core.train.ids.saving import describe, ids_pieces
from gem_core.train.ledger.clock import LOG, PAUSED
from gem_core.train.ledger.keeper import in_words
from gem_core.train.optim import lr_factor
from gem_core.train.paired import heed
from gem_core.train.scoring import schema_as_json
from gem_core.train.started import describe_again
from gem_core.train.step import StepResult, settle, train_step


def train_epochs(run: Run) -> None:
    """Train from where the run stands to its end, and save the last checkpoint unless ``train.checkpoint_last`` is off.

    Raises:
        RunFailed: a loss, gradient or weight is not finite; earlier checkpoints stay.
        RequestError: a label is wrong.
    """
    try:
        _epochs(run)
        if run.config.train.checkpoint_last and run.saved_step != run.progress.step:
            save(run, background=False)
        run.saver.wait()
    except GemError as error:
        run.log.event("failed", run.progress.step, error=str(error))
        raise


def _epochs(run: Run) -> None:
    config, progress = run.config, run.progress
    for epoch in range(progress.epoch, config.train.epochs):
        feed = epoch_feed(run, epoch)
        if _steps(run, feed):
            return
        progress.close_epoch(feed.dropped)
        if feed.ran_out is not None:
            _tell_uneven(run, feed, epoch)
            if config.train.uneven == "stop":
                return


def epoch_feed(run: Run, epoch: int) -> Feed:
    """The steps of an epoch from where the run stands."""
    config = run.config
    batches = run.source.batches(
        "train",
        batch_size=config.data.batch_size,
        shard=Shard(rank=run.world.rank, world=run.world.size),
        seed=config.run.seed if config.train.shuffle else None,
        epoch=epoch,
        start=0 if isinstance(run.source, ResumableSource) else run.progress.next_batch,
    )
    flops: Any = run.model.flops
    return Feed(batches, run.world, run.schema, flops=flops, accumulate=config.optim.accumulate, uneven=config.train.uneven, prepare=run.ids.admit)


def _steps(run: Run, feed: Feed) -> bool:
    """Take the steps of an epoch; True when the run has reached its largest number of steps."""
    config, progress, limit = run.config, run.progress, run.config.train.max_steps
    if limit and progress.step >= limit:
        return True
    run.ledger.begin(progress.step)
    mark = time.perf_counter()
    for work in feed:
        factor = _lr_factor(run)
        result = take_step(run, feed, work)
        progress.step += 1
        progress.next_batch += len(work.batches)
        progress.trained_rows += work.rows
        now = time.perf_counter()
        seconds, mark = now - mark, now
        run.ledger.end_step(progress.step, work.batches)
        progress.meter.add(rows=work.rows, forward_flops=work.flops, seconds=seconds, data_seconds=work.data_seconds, loss=result.loss)
        run.log.advance(progress.step)
        run.saver.poll()
        _heed_pair(run, result)
        if progress.step % config.train.log_every == 0 or progress.step == run.total_steps:
            with run.world.clock.phase(LOG):
                _log_step(run, work, result, seconds, factor=factor)
        pause = time.perf_counter()
        with run.world.clock.phase(PAUSED):
            if config.train.eval_every and progress.step % config.train.eval_every == 0:
                evaluate_now(run)
            if config.train.checkpoint_every and progress.step % config.train.checkpoint_every == 0:
                save(run, background=config.train.checkpoint_background)
        mark += time.perf_counter() - pause  # neither is training time
        if progress.step == limit:
            return True
    return False


def take_step(run: Run, feed: Feed, work: Work) -> StepResult:
    """Take one step of the feed, and prepare the next one's first batch where ``train.ahead`` and what comes after this step allow it. Collective.

    Raises:
        RunFailed: the loss or a gradient is not finite, or a compiled block met too many kinds of input.
    """
    number, changing = run.progress.step + 1, run.learner.changing
    run.ids.begin_step(run.embeddings)
    paired = changing is not None and changing.begin_step(number)
    waits = paired or not run.config.train.ahead or _pauses(run, number)  # a pair may end the run with a checkpoint
    with limit_named(run.config.compile.recompiles):
        result = train_step(run.learner, work, step=number, lr_factor=_lr_factor(run), following=None if waits else feed.peek, paired=paired)
    if isinstance(run.source, ResumableSource):
        run.source.trained(work.batches)
    if not run.first_step_seconds:
        run.first_step_seconds = time.perf_counter() - run.begun
        run.log.event("first_step", number, seconds=run.first_step_seconds, compile=run.compiled.told())
        if run.world.device.type == "cuda":
            run.enter(spared())
    return result


def _lr_factor(run: Run) -> float:
    optim = run.config.optim
    return lr_factor(run.progress.step, total=run.total_steps, schedule=optim.schedule, warmup=optim.warmup_steps, final=optim.final_lr_fraction)


def _heed_pair(run: Run, result: StepResult) -> None:
    """Raise RunFailed, with a checkpoint of the step kept, where the precision recipe says that the run has to end. Collective."""
    if result.pairs is None:
        return
    with run.world.clock.phase(LOG):
        why = heed(run, result.pairs)
    if why is not None:
        save(run, background=False)
        raise RunFailed(f"training step {run.progress.step}", why, "The checkpoint of this step is kept, and the manifest says what led to it.")


def _pauses(run: Run, step: int) -> bool:
    """Whether the run ends, is evaluated or saved after a step: nothing is read or sent ahead across that."""
    train = run.config.train
    return step == train.max_steps or any(every and step % every == 0 for every in (train.eval_every, train.checkpoint_every))


def _log_step(run: Run, work: Work, result: StepResult, seconds: float, *, factor: float) -> None:
    """Add up what the ranks know, write the log, and tell the plugins. Collective."""
    progress, world = run.progress, run.world
    window = progress.meter.close_window()
    parts = world.all_gather(torch.tensor([window.loss, result.loss], dtype=torch.float64)).sum(0).tolist()
    stream = run.learner.stream.read(world, close_window=True)
    steps = run.ledger.close_window()
    describe_again(run)
    values: dict[str, Any] = {
        "loss": parts[0] / window.steps,
        "lr": run.learner.dense_lr * factor,
        "sparse_lr": run.learner.sparse_lr * factor,
        "grad_norm": result.grad_norm,
        "train": stream,
        **({"ids": ids} if (ids := run.ids.read("train")) else {}),
        **window.figures(run.peak_flops),
        **({"time": steps} if steps else {}),
    }
    run.log.event("train", progress.step, epoch=progress.epoch, rows=progress.trained_rows, **values)
    run.log.scalars("train", progress.step, values)
    rates = f"{values['samples_per_second']:.0f} samples/s  mfu {100 * values['mfu']:.2f} %"
    run.log.say(f"step {progress.step}/{run.total_steps}  loss {values['loss']:.4f}  {rates}{in_words(steps)}")
    step = StepInfo(step=progress.step, epoch=progress.epoch, loss=parts[1], rows=work.rows, seconds=seconds, flops=TRAIN_OVER_FORWARD * work.flops)
    host().notify("gem_step_finished", run=run.info, step=step)


def evaluate_now(run: Run) -> Evaluation:
    """Evaluate the test split with the averaged weights, where there are any, and log it. Collective."""
    if run.training:
        settle(run.learner)
    weights = nullcontext if run.average is None else run.average.in_place
    size = run.config.data.eval_batch_size
    with limit_named(run.config.compile.recompiles):
        done = evaluate(run.dense, run.embeddings, run.precision, run.source, run.world, batch_size=size, weights=weights, prepare=run.ids.look_up)
    ids = run.ids.read("test")
    if run.training:
        run.progress.eval_seconds += done.seconds
        run.log.event("eval", run.progress.step, test=done.as_dict(), seconds=done.seconds, **({"ids": ids} if ids else {}))
        run.log.scalars("test", run.progress.step, done.as_dict())
        shown = "  ".join(f"{task}: AUC {_number(m['auc'])} NE {_number(m['ne'])}" for task, m in done.as_dict().items())
        run.log.say(f"step {run.progress.step}  test  {shown}")
    return done


def save(run: Run, *, background: bool) -> None:
    """Save a checkpoint of all ranks' state. Collective.

    Args:
        background: write it beside training; errors are raised by the next save or at the end of the run.

    Raises:
        RunFailed: something is not finite or cannot be written, on every rank; nothing is left of this checkpoint.
    """
    learner, world, step = run.learner, run.world, run.progress.step
    settle(learner)
    dense = restore.model_tensors(run.model) | restore.optimizer_tensors(run.model, learner.optimizer)
    if run.average is not None:
        dense |= restore.average_tensors(run.average.state_dict())
    pieces = dense_pieces(dense, leads=world.leads) | table_pieces([piece for piece in run.embeddings.table_slices() if piece.saves])
    pieces |= ids_pieces(run.ids, world)
    trainer = {
        "stream": learner.stream.state_dict(world),
        "progress": run.progress.state_dict(world),
        "random": values.random_state(world),
        "data": world.gather_objects(run.source.cursor()) if isinstance(run.source, ResumableSource) else None,
        "updates": run.embeddings.table_updates(),
        "ids": run.ids.clock,
        "precision": learner.changing.state_dict() if learner.changing is not None else None,
    }
    run.log.event("saving", step)
    run.saver.save(Content(step=step, pieces=pieces, trainer=trainer, about=about(run)), background=background)
    run.saved_step = step


def about(run: Run) -> dict[str, Any]:
    """What a checkpoint says of its run: plain values."""
    return {
        "config": run.config.model_dump(mode="json"),
        "kernels": run.kernels,
        "data": restore.data_facts(run.source),
        "schema": schema_as_json(run.schema),
        "ids": describe(run.ids.maps),
        "resized": run.ids.report,
        "world": run.world.size,
        "written_by": {"gem_core": __version__, "torch": torch.__version__, "time": datetime.now(UTC).isoformat(timespec="seconds")},
    }


def _tell_uneven(run: Run, feed: Feed, epoch: int) -> None:
    text = f"rank {feed.ran_out} ran out first in epoch {epoch + 1}: {feed.dropped} rows that other ranks had read are left out, and all after them"
    if run.config.train.uneven == "stop":
        text += "; the run ends here (train.uneven = stop)"
        run.progress.stopped = text
    run.log.event("uneven", run.progress.step, text=text)
    run.log.say(text)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"
