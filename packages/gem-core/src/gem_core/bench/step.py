"""Steps of a composed run, measured whole: waiting for data, look-ups, forward, backward and all updates.

Model FLOPs are those of the measured batches, exactly by mask (``gem_core.bench.flops``), over wall time. Nothing is left out of the time but the
warm-up steps before it, which go on until nothing is compiled any more.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import count
from typing import Any, Self

import torch

from gem_core.bench.flops import StepFlops, peak_seconds, run_flops, unit_peak
from gem_core.bench.roofline import finish
from gem_core.train.composed import Run
from gem_core.train.feed import Feed, Work
from gem_core.train.ledger.clock import COPY, DATA, IDS
from gem_core.train.ledger.load import load_of
from gem_core.train.loop import epoch_feed, take_step
from gem_core.train.step import settle

COLUMNS = (
    "date", "gpu", "torch", "recipe", "rung",
    "samples_per_s", "tokens_per_s", "ms", "model_tflops", "mfu_bf16", "mfu_weighted", "hfu", "peak_gib", "ne", "steps",
    "ms_p99", "data_share", "first_step_s", "compile_s", "note",
)  # fmt: skip
"""Columns of a file of results, in order."""
SETTLED = 4
"""Steps without a compilation after which none is expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """What the measured steps of one run say.

    Args:
        samples_per_s: rows a second.
        tokens_per_s: events of all sequences a second.
        ms: milliseconds of a step, the median; on a GPU as the computing stream takes them, however far ahead of it the host is.
        model_tflops: model TFLOP/s, forward and backward, over the time of all measured steps.
        mfu_bf16: that over the device's peak in bf16.
        mfu_weighted: seconds that the model FLOPs would take at the peak of the format each is in, over the time.
        hfu: FLOP/s with padding and recomputation over the peak in bf16.
        peak_gib: most memory that torch held on the GPU, or, with graphs, had set apart; None on a CPU.
        ne: normalised entropy of the first task, each batch scored before it is learnt, over the ``steps`` steps after the warm-up asked for: one
            and the same batches however long the warm-up became. None where it is not defined.
        steps: how many were measured.
        ms_p99: 99th percentile of steps.
        data_share: share of the time in which the device waited for a batch to be read, its ids admitted, and copied; what a GPU computes
            meanwhile does not count.
        first_step_s: seconds from the start of composing to the end of the first step.
        compile_s: seconds of compiling, over all steps.
        note: what compiling did to the warm-up; empty if nothing.
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
    note: str

    def row(self) -> dict[str, Any]:
        """By column, rounded to six significant digits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


def measure_steps(run: Run, *, steps: int, warmup: int, told: Callable[[int], None] = lambda done: None) -> StepFigures:
    """Take ``warmup`` steps and then ``steps`` measured ones, over as many epochs as that takes.

    A step that compiles is none to be measured: the warm-up goes on until ``SETTLED`` steps have compiled nothing, and begins again when a measured
    one does. After ``warmup + steps`` steps whatever comes is measured. The note says so. Where graphs are asked for, they are recorded first.

    Args:
        run: composed for training; it is not closed, evaluated or saved.
        steps: 1 or more.
        warmup: 1 or more, as the first step compiles and allocates.
        told: called with the number of steps taken.

    Raises:
        RunFailed: as training does.
    """
    walk, most = _Walk(run, told, scored=range(warmup, warmup + steps)), warmup + steps
    run.ledger.begin(0)
    while walk.taken < warmup or walk.surveys:
        walk.step()
    window = None
    while window is None:
        while walk.unsettled and walk.taken < most:
            walk.step()
        window = _Window.measured(walk, steps, most)
    settle(run.learner)
    return _figures(run, window, ne=walk.ne, note=_note(walk, window, warmup))


class _Walk:
    """The steps of a run, one after the other.

    Args:
        scored: between which two numbers of steps the batches count for ``ne``.
    """

    def __init__(self, run: Run, told: Callable[[int], None], *, scored: range) -> None:
        self.run, self._told, self._scored, self._works = run, told, scored, works_of(run)
        self.taken = 0
        self.compiled = 0
        """The last step in which a graph was compiled; 0 for none."""
        self.ne: float | None = None

    @property
    def unsettled(self) -> bool:
        return self.compiled > 0 and self.taken - self.compiled < SETTLED

    @property
    def surveys(self) -> bool:
        """Whether graphs are still to be recorded."""
        graphs = self.run.learner.graphs
        return graphs is not None and not graphs.recorded

    def step(self) -> Work:
        graphs = self.run.compiled.graphs
        work = take(self.run, *next(self._works))
        self.taken += 1
        if self.run.compiled.graphs > graphs:
            self.compiled = self.taken
        if self.taken in (self._scored.start, self._scored.stop):
            self.ne = self.run.learner.stream.read(self.run.world, close_window=True)["window"][self.run.schema.tasks[0].name]["ne"]
        self._told(self.taken)
        return work


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """Measured steps: how many came before, rows, events and FLOPs of all together, their seconds, and what the ledger says of them.

    Their batches are not kept: while somebody holds them, each new one needs page-locked memory of its own, and asking for that stops the GPU.
    """

    before: int
    steps: int
    rows: int
    tokens: int
    flops: StepFlops
    seconds: float
    told: dict[str, Any]

    @classmethod
    def measured(cls, walk: _Walk, steps: int, most: int) -> Self | None:
        """The next ``steps``; None as soon as one compiles, unless ``most`` came before."""
        device, ledger, before = walk.run.world.device, walk.run.ledger, walk.taken
        finish(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        ledger.close_window(over=True)
        ledger.begin(before)
        rows, tokens, flops = 0, 0, StepFlops()
        begun = time.perf_counter()
        for _ in range(steps):
            work = walk.step()
            rows, tokens = rows + work.rows, tokens + load_of(work.batches)[0]
            flops = sum((run_flops(walk.run, batch) for batch in work.batches), flops)
            if walk.compiled > before and before < most:
                return None
        finish(device)
        seconds = time.perf_counter() - begun
        return cls(before=before, steps=steps, rows=rows, tokens=tokens, flops=flops, seconds=seconds, told=ledger.close_window(over=True))


def _note(walk: _Walk, window: _Window, warmup: int) -> str:
    said = []
    if walk.compiled > window.before:
        said.append(f"compiled up to measured step {walk.compiled - window.before}: no figure of a settled run")
    elif window.before > warmup and walk.compiled:
        said.append(f"warm-up of {window.before} steps, as step {walk.compiled} compiled")
    if walk.run.learner.graphs is not None:
        told = walk.run.learner.graphs.told()
        said.append(f"{told['graphs']} capacities recorded, {told['replayed']} of {walk.taken} steps replayed, warm-up of {window.before}")
    return "; ".join(said)


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


def _peak(run: Run) -> int:
    """Bytes that torch held at most. What graphs use it has set apart, and counts as free; so with graphs all that is set apart is told."""
    most = torch.cuda.max_memory_allocated if run.learner.graphs is None else torch.cuda.max_memory_reserved
    return most(run.world.device)


def _figures(run: Run, window: _Window, *, ne: float | None, note: str) -> StepFigures:
    device, flops, whole, told = run.world.device, window.flops, window.seconds, window.told
    peak = unit_peak("bf16", device).flops_per_second
    return StepFigures(
        samples_per_s=window.rows / whole,
        tokens_per_s=window.tokens / whole,
        ms=1e3 * told["p50"],
        model_tflops=flops.model / whole / 1e12,
        mfu_bf16=flops.model / whole / peak,
        mfu_weighted=peak_seconds(flops.by_format, device) / whole,
        hfu=flops.hardware / whole / peak,
        peak_gib=_peak(run) / 2**30 if device.type == "cuda" else None,
        ne=ne,
        steps=window.steps,
        ms_p99=1e3 * told["p99"],
        data_share=sum(told["parts"].get(part, 0.0) for part in (DATA, IDS, COPY)) / told["step"],
        first_step_s=run.first_step_seconds,
        compile_s=float(run.compiled.seconds),
        note=note,
    )
