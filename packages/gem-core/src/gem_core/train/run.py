"""A whole run: compose, train, evaluate, write the summary and the report."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins import host
from gem_core.spec import CountsUnknownIds, Source
from gem_core.train import folder
from gem_core.train.compose import compose
from gem_core.train.composed import Run
from gem_core.train.evaluate import Evaluation
from gem_core.train.loop import evaluate_now, train_epochs
from gem_core.train.report import write_report


def train(loaded: LoadedConfig, *, resume: Path | None = None) -> dict[str, Any]:
    """Train by a configuration, or go on with the run in the folder ``resume``.

    Returns:
        What ``summary.json`` holds; empty on every rank but the first.

    Raises:
        GemError: the request is wrong, this machine cannot do it, or the run failed.
    """
    run = compose(loaded, resume=resume)
    try:
        if known := unknown_ids(run.source):
            run.log.event("unknown_ids", run.progress.step, **known)
        train_epochs(run)
        done = evaluate_now(run)
        if not run.world.leads:
            return {}
        content = summary(run, done)
        folder.write_json(run.folder / "summary.json", content)
        run.log.event("finished", run.progress.step)
        run.log.close()
        write_report(run.folder)
        host().notify("gem_run_finished", run=run.info, summary=content)
        return content
    finally:
        run.close()


def evaluate_run(path: Path, overrides: Sequence[str] = (), *, predictions: Path | None = None) -> dict[str, Any]:
    """Evaluate the newest checkpoint of a run folder on its test split. No optimiser is made, and nothing is written into the run folder.

    Args:
        path: the run folder.
        overrides: ``a.b=c`` values in the place of the run's own, for example another embedding engine.
        predictions: a file to write the scored rows into, as ``write_predictions`` says.

    Returns:
        ``{"run", "step", "test": {TASK: metrics}, "baselines", "eval_seconds"}``; empty on every rank but the first.
    """
    folder.require_run(path)
    run = compose(load_config(path / "config.toml", list(overrides)), resume=path, training=False)
    try:
        done = evaluate_now(run)
        if not run.world.leads or run.saved is None:
            return {}
        if predictions is not None:
            write_predictions(predictions, done)
        step = run.saved.about["step"]
        return {"run": str(path), "step": step, "test": done.as_dict(), "baselines": finite_baselines(run.source), "eval_seconds": done.seconds}
    finally:
        run.close()


def write_predictions(file: Path, done: Evaluation) -> None:
    """Write the scored rows as NPZ: for each task ``TASK/logit``, ``TASK/label`` and ``TASK/weight`` ``[rows]`` float64, in the source's order.

    A row whose label is not observed weighs 0. On several ranks the order is rank after rank.
    """
    columns: dict[str, Any] = {}
    for task, rows in (done.rows or {}).items():
        logit, label, observed, weight = rows.numpy().T
        columns |= {f"{task}/logit": logit, f"{task}/label": np.where(observed > 0, label, 0.0), f"{task}/weight": weight * observed}
    with file.open("wb") as target:  # given a name, numpy would add a suffix to it
        np.savez(target, **columns)


def summary(run: Run, done: Evaluation) -> dict[str, Any]:
    """The figures of a finished run, for scripts. ``baseline`` holds those of the first task, ``baselines`` all."""
    progress, whole = run.progress, run.progress.meter.run
    rates = whole.figures(run.peak_flops)
    baselines, first = finite_baselines(run.source), run.schema.tasks[0].name
    return {
        "test": done.as_dict(),
        "train_seconds": whole.seconds,
        "eval_seconds": progress.eval_seconds,
        "rows": progress.trained_rows,
        "samples_per_second": rates["samples_per_second"],
        "mfu": rates["mfu"],
        "first_step_seconds": run.first_step_seconds,
        "compile": run.compiled.told(),
        "graphs": {} if run.learner.graphs is None else run.learner.graphs.told(),
        "kernels": run.kernels,
        "seed": run.config.run.seed,
        "baseline": {name: {key: tasks[first].get(key) for key in ("auc", "ne")} for name, tasks in baselines.items() if first in tasks},
        "baselines": baselines,
        "steps": progress.step,
        "epochs": progress.epoch,
        "stopped": progress.stopped,
        "world": run.world.size,
        "train_flops": whole.flops,
        "peak": run.manifest["peak"],
        "unknown_ids": unknown_ids(run.source),
        "ledger": {"source": run.source.ledger(), "train": progress.ledger(run.source.rows("train"))},
        "time": run.ledger.summary(),
    }


def unknown_ids(source: Source) -> dict[str, dict[str, int]]:
    """``{split: {feature: ids}}`` that were unknown or missing and became row 0; empty for a source that does not count them."""
    if not isinstance(source, CountsUnknownIds):
        return {}
    return {split: dict(source.unknown_ids(split)) for split in ("train", "test")}


def finite_baselines(source: Source) -> dict[str, dict[str, dict[str, float | None]]]:
    """A source's reference figures, with None for one that is not finite: JSON has no NaN, and a table shows a dash."""
    return {
        name: {task: {key: value if math.isfinite(value) else None for key, value in figures.items()} for task, figures in tasks.items()}
        for name, tasks in source.baselines().items()
    }
