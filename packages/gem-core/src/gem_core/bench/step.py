"""Steps of a composed run, measured whole: waiting for data, look-ups, forward, backward and all updates.

Model FLOPs are those of the measured batches, exactly by mask (``gem_core.bench.flops``), over wall time. Nothing is left out of the time but the
warm-up steps before it.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

import numpy as np
import torch

from gem_core.bench.flops import StepFlops, peak_seconds, run_flops, unit_peak
from gem_core.bench.roofline import finish
from gem_core.train.compose import Run
from gem_core.train.feed import Feed, Work
from gem_core.train.ledger.clock import DATA
from gem_core.train.ledger.load import load_of
from gem_core.train.loop import epoch_feed, take_step

COLUMNS = (
    "date", "gpu", "torch", "recipe", "rung",
    "samples_per_s", "tokens_per_s", "ms", "model_tflops", "mfu_bf16", "mfu_weighted", "hfu", "peak_gib", "ne", "steps",
    "ms_p99", "data_share", "first_step_s", "compile_s", "note",
)  # fmt: skip
"""Columns of a file of results, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What the measured steps of one run say.

    Args:
        samples_per_s: rows a second.
        tokens_per_s: events of all sequences a second.
        ms: milliseconds of a step, the median.
        model_tflops: model TFLOP/s, forward and backward, over the time of all measured steps.
        mfu_bf16: that over the device's peak in bf16.
        mfu_weighted: seconds that the model FLOPs would take at the peak of the format each is in, over the time.
        hfu: FLOP/s with padding and recomputation over the peak in bf16.
        peak_gib: most memory that torch held on the GPU; None on a CPU.
        ne: normalised entropy of the first task over the measured steps, each batch scored before it is learnt; None where it is not defined.
        steps: how many were measured.
        ms_p99: 99th percentile of steps.
        data_share: share of the time in which the host read batches; with ``train.ahead`` a GPU computes meanwhile.
        first_step_s: seconds from the start of composing to the end of the first step.
        compile_s: seconds of compiling, over all steps.
    """

    samples_per_s: float
    tokens_per_s: float
    ms: float
    model_tflops: float
    mfu_bf16: float
    mfu_weighted: float
    hfu: float
    peak_gib: float | None
    ne: float | None
    steps: int
    ms_p99: float
    data_share: float
    first_step_s: float
    compile_s: float

    def row(self) -> dict[str, Any]:
        """By column, rounded to six significant digits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


def measure_steps(run: Run, *, steps: int, warmup: int, told: Callable[[int], None] = lambda done: None) -> StepFigures:
    """Take ``warmup`` steps and then ``steps`` measured ones, over as many epochs as that takes.

    Args:
        run: composed for training; it is not closed, evaluated or saved.
        steps: 1 or more.
        warmup: 1 or more, as the first step compiles and allocates.
        told: called with the number of steps taken.

    Raises:
        RunFailed: as training does.
    """
    device, works = run.world.device, works_of(run)
    run.ledger.begin(0)
    for number in range(warmup):
        take(run, *next(works))
        told(number + 1)
    finish(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run.ledger.close_window()
    run.learner.stream.read(run.world, close_window=True)
    seconds, done = [], []
    begun = mark = time.perf_counter()
    for number in range(steps):
        work = take(run, *next(works))
        if number == steps - 1:
            finish(device)
        now = time.perf_counter()
        seconds.append(now - mark)
        mark = now
        done.append(work)
        told(warmup + number + 1)
    return _figures(run, done, np.array(seconds), mark - begun)


def works_of(run: Run) -> Iterator[tuple[Feed, Work]]:
    """The steps of a run over epoch after epoch, each with its feed."""
    for epoch in count():
        feed = epoch_feed(run, epoch)
        for work in feed:
            yield feed, work
        run.progress.close_epoch(feed.dropped)


def take(run: Run, feed: Feed, work: Work) -> Work:
    """Take one step, and count it."""
    take_step(run, feed, work)
    run.progress.step += 1
    run.progress.next_batch += len(work.batches)
    run.ledger.end_step(run.progress.step, work.batches)
    return work


def _figures(run: Run, done: list[Work], seconds: Any, whole: float) -> StepFigures:
    device = run.world.device
    flops = sum((run_flops(run, batch) for work in done for batch in work.batches), StepFlops())
    tokens = sum(load_of(work.batches)[0] for work in done)
    time_of = run.ledger.close_window()
    middle, late = np.percentile(1e3 * seconds, (50, 99)).tolist()
    peak = unit_peak("bf16", device).flops_per_second
    (first, *_), window = run.schema.tasks, run.learner.stream.read(run.world, close_window=True)["window"]
    return StepFigures(
        samples_per_s=sum(work.rows for work in done) / whole,
        tokens_per_s=tokens / whole,
        ms=middle,
        model_tflops=flops.model / whole / 1e12,
        mfu_bf16=flops.model / whole / peak,
        mfu_weighted=peak_seconds(flops.by_format, device) / whole,
        hfu=flops.hardware / whole / peak,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
        ne=window[first.name]["ne"],
        steps=len(done),
        ms_p99=late,
        data_share=time_of["parts"].get(DATA, 0.0) / time_of["step"] if time_of else 0.0,
        first_step_s=run.first_step_seconds,
        compile_s=float(run.compiled.seconds),
    )
