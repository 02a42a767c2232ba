"""The largest batch that fits a GPU with and without strategy ``activations``, and what it costs in samples a second.

usage: python3 packages/gem-parallel/benchmarks/memory.py [--start ROWS] [--set PATH=VALUE ...] [--seconds N] [--csv FILE] [--write]

The recipe is gem-h200-1024 with smaller tables, composed once. A batch fits when whole steps on it (forward, backward, clipping, updates) end well; a
size is tried on one batch that lies in host memory, so that reading data is no part of a figure. The plain model's largest batch is found from the
peak of the first trial, then to a sixteenth. At twice that batch, and at half as much again, ways of planning get what is left for the blocks: the
device's memory, less what a run keeps between steps, less what the plain model's step takes at most outside of its blocks, in proportion to the rows;
where that does not fit, 0.9, 0.8 or 0.7 of it. Slowdown compares samples a second with the plain model's largest batch. ``--write`` adds to
results/memory.csv; lines come as they are measured, and ``--seconds`` begins no other way of planning once so many have passed.
"""

import argparse
import csv
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from gem_core.bench.roofline import finish
from gem_core.cli.bench_shared import measuring_in
from gem_core.config.load import load_config
from gem_core.spec import ParallelContext, RequestError, Shard, Topology
from gem_core.train.compose import compose
from gem_core.train.composed import Run
from gem_core.train.feed import Work
from gem_core.train.labels import weight_sums
from gem_core.train.step import settle, train_step
from gem_parallel.memory.activations import Activations

RESULTS = Path(__file__).parent / "results" / "memory.csv"
COLUMNS = ("date", "device", "torch", "recipe", "side", "rows", "budget_gb", "peak_gib", "samples_per_s", "slowdown", "policies", "note")
RECIPE = "gem-h200-1024"
SETTINGS = ("data.options.items=2000000", "data.options.users=200000", "data.options.workers=0", 'parallel.strategies=["single"]')
PLANS = (
    (2.0, ("recompute", "offload")),
    (2.0, ("recompute", "offload", "fp8")),
    (1.5, ("recompute", "offload")),
    (2.0, ("recompute",)),
)
"""Times the plain model's largest batch, and what a plan may choose."""
BLOCKS = ("events.*", "layers.*.weight_gen", "layers.*.pffn", "layers.*.attention", "layers.*.pool", "layers.*.ensemble")
"""A layer of gem in its parts: a whole one of three would, computed again, need as much at once as is to be saved."""
WARMUP, STEPS = 1, 2
SHARES = (1.0, 0.9, 0.8, 0.7)
USABLE = 0.96
"""Of the device's memory, for what torch allocates."""
GRAIN = 16
"""Rows by which batches are made larger or smaller; the largest batch is known to a sixteenth."""
BEGUN = time.monotonic()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Steps of one size that ended well: rows, seconds of a step, most bytes that torch held (0 on a CPU)."""

    rows: int
    seconds: float
    peak: int

    @property
    def speed(self) -> float:
        """Samples a second."""
        return self.rows / self.seconds

    def figures(self) -> dict[str, Any]:
        return {"rows": self.rows, "samples_per_s": f"{self.speed:.1f}", "peak_gib": f"{self.peak / 2**30:.1f}" if self.peak else ""}


def tell(text: str) -> None:
    """Print a line, with the seconds since the beginning."""
    print(f"{time.monotonic() - BEGUN:6.1f} s  {text}", flush=True)


def work_of(run: Run, rows: int) -> Work:
    """A step's work on the first training batch of so many rows."""
    batch = next(run.source.batches("train", batch_size=rows, shard=Shard(rank=0, world=1), seed=run.config.run.seed))
    if batch.rows != rows:
        raise SystemExit(f"the source has no batch of {rows} rows; set data.options.rows")
    batch = batch.pin_memory() if run.world.device.type == "cuda" else batch  # once, not in every step
    return Work(batches=[batch], rows=rows, flops=0, weights=weight_sums(batch, run.schema.tasks), data_seconds=0.0)


def step(run: Run, work: Work) -> None:
    """A whole training step, to the end of what it queued. It learns little, as all steps see one batch."""
    train_step(run.learner, work, step=1, lr_factor=0.01)
    settle(run.learner)
    finish(run.world.device)


def tried(run: Run, side: str, rows: int) -> Trial | str:
    """Steps of so many rows, or why there are none: memory or the budget does not suffice."""
    work, device = work_of(run, rows), run.world.device
    try:
        for _ in range(WARMUP):
            step(run, work)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        for _ in range(STEPS):
            step(run, work)
        seconds = (time.perf_counter() - begun) / STEPS
    except torch.OutOfMemoryError:
        run.learner.unread = None
        tell(f"{side}, {rows} rows: out of memory")
        return "out of memory"
    except RequestError as error:
        if not error.asked.startswith("a budget of"):
            raise
        tell(f"{side}, {rows} rows: {error.so}")
        return error.so
    found = Trial(rows=rows, seconds=seconds, peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0)
    tell(f"{side}, {rows} rows: {found.speed:.1f} samples/s, {1e3 * seconds:.1f} ms, peak {found.peak / 2**30:.1f} GiB")
    return found


def cleared(run: Run) -> int:
    """Bytes that the run keeps between steps, once what a failed step left is gone."""
    run.learner.optimizer.zero_grad()
    run.learner.embeddings.zero_grad()
    gc.collect()
    if run.world.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(run.world.device)


class Blocks:
    """Gives a run's model one strategy after the other.

    Args:
        run: whose blocks have none yet.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._forwards = [(module, module.__dict__.get("forward")) for module in run.model.modules()]

    def hold(self, **options: Any) -> Activations:
        """A strategy with these options, in the place of the one before."""
        self.plain()
        strategy, device = Activations(blocks=BLOCKS, **options), str(self._run.world.device)
        strategy.apply(self._run.model, ParallelContext(rank=0, world=1, device=device, topology=Topology(world=1, device=device)))
        return strategy

    def plain(self) -> None:
        """The model as it was."""
        for module, forward in self._forwards:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.forward = forward


def saved_a_row(run: Run, held: Blocks, rows: int) -> float:
    """Bytes that the plain model's blocks save for backward, for each row."""
    strategy = held.hold(budget=1e6, allow=())
    if isinstance(found := tried(run, "plain, measured", rows), str):
        raise SystemExit(f"{rows} rows do not fit: {found}; use a smaller --start")
    held.plain()
    saved: int = sum(block["saved"] for block in strategy.describe()["plan"])
    return saved / found.rows


def largest(run: Run, first: Trial, memory: int) -> Trial:
    """The largest batch of the plain model. Sizes begin where the first trial's peak, in proportion, would fill the memory."""
    kept, best, too_many = cleared(run), first, 0
    rows = int(first.rows * (USABLE * memory - kept) / (first.peak - kept))
    while True:
        rows = rows // GRAIN * GRAIN
        if rows <= best.rows or (too_many and too_many - best.rows <= best.rows // 16):
            return best
        found = tried(run, "plain", rows)
        cleared(run)
        if isinstance(found, str):
            too_many = rows
        else:
            best = found
        rows = (best.rows + too_many) // 2 if too_many else best.rows + max(GRAIN, best.rows // 16)


def planned(run: Run, held: Blocks, allow: Sequence[str], plain: Trial, rows: int, budget: float) -> dict[str, Any]:
    """A line of results for one way of planning, with the largest share of the budget that fits."""
    side = ", ".join(allow)
    found: Trial | str = "nothing is left for the blocks"
    for share in SHARES if budget > 0 else ():
        strategy = held.hold(budget=share * budget, allow=allow)
        found = tried(run, f"{side} in {share * budget:.4g} GB", rows)
        cleared(run)
        if isinstance(found, Trial):
            policies = " ".join(f"{count} {policy}" for policy, count in sorted(Counter(strategy.describe()["policies"].values()).items()))
            tell(policies)
            slowdown = f"{plain.speed / found.speed - 1:+.1%}"
            return {"side": side, **found.figures(), "budget_gb": f"{share * budget:.3f}", "slowdown": slowdown, "policies": policies}
    return {"side": side, "rows": rows, "budget_gb": f"{budget:.3f}", "note": found}


def lines(run: Run, start: int, seconds: float) -> Iterator[dict[str, Any]]:
    """The lines of the results, one by one. On a CPU, whose memory is not measured, the first size stands for the largest."""
    blocks = Blocks(run)
    saved = saved_a_row(run, blocks, start)
    first = tried(run, "plain", start)
    assert isinstance(first, Trial), "it took more than with the strategy that keeps"
    on_cuda, kept = run.world.device.type == "cuda", cleared(run)
    memory = torch.cuda.get_device_properties(run.world.device).total_memory if on_cuda else 0
    plain = largest(run, first, memory) if on_cuda else first
    held = saved * plain.rows
    tell(f"blocks hold {held / 1e9:.2f} GB of {plain.rows} rows, {kept / 1e9:.2f} GB stay between steps")
    yield {"side": "plain", **plain.figures()}
    for times, allow in PLANS:
        if time.monotonic() - BEGUN < seconds:
            budget = USABLE * memory - kept - times * (plain.peak - kept - held) if on_cuda else held
            yield planned(run, blocks, allow, plain, int(times * plain.rows), budget / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=1024)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--csv", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    about = {"date": date.today().isoformat(), "device": device, "torch": torch.__version__, "recipe": " ".join([RECIPE, *asked.settings])}
    with tempfile.TemporaryDirectory() as folder:
        run = compose(load_config(RECIPE, [*SETTINGS, *asked.settings, *measuring_in(folder)]))
        tell("composed")
        try:
            for line in lines(run, asked.start, asked.seconds):
                for path in (asked.csv, RESULTS if asked.write else None):
                    if path is not None:
                        fresh = not path.exists()
                        with path.open("a", newline="", encoding="utf-8") as file:
                            writer = csv.DictWriter(file, COLUMNS)
                            if fresh:
                                writer.writeheader()
                            writer.writerow({**about, **line})
        finally:
            run.close()


if __name__ == "__main__":
    main()
