"""The step ledger of a run: it closes windows of steps, exchanges them between ranks, and writes what was asked for."""

import csv
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gem_core.batch import Batch
from gem_core.train.ledger.load import CostFit, Floats, load_of
from gem_core.train.ledger.ranks import Together, Told
from gem_core.train.ledger.trace import Tracer
from gem_core.train.world import World

COLUMNS = ("step", "rank", "tokens", "pairs", "rows", "seconds")


class StepLedger:
    """What the trainer calls; ``world.clock`` is what the phases call.

    Args:
        world: the ranks.
        parts: whatever may hold a ``recorder`` of collectives: strategies and the embedding engine.
        steps_csv: file for tokens, pairs, rows and compute seconds of every step and rank, or None.
        tracer: writes timelines.
    """

    def __init__(self, world: World, parts: Iterable[Any], *, steps_csv: Path | None, tracer: Tracer) -> None:
        found = {id(r): r for r in (getattr(part, "recorder", None) for part in parts) if r is not None}
        self._world, self._recorders, self._tracer = world, list(found.values()), tracer
        self._steps_csv = steps_csv if world.leads else None
        self._loads: dict[int, tuple[int, int, int]] = {}
        self._fit = CostFit()
        self._sums, self._walls = dict[str, float](), array("d")
        self._named: dict[str, int] = {}

    def begin(self, step: int) -> None:
        """The run, or an epoch, goes on after ``step``; time since the last step is dropped."""
        if self._world.clock.open:
            self._world.clock.restart()
            return
        if self._steps_csv is not None:
            open_steps(self._steps_csv, step)
        self._world.clock.start(self._world.device, self._recorders, step + 1)
        self._tracer.begin(step + 1, self._world)

    def end_step(self, step: int, batches: Sequence[Batch]) -> None:
        """``step`` is over; the next one begins."""
        self._loads[step] = load_of(batches)
        self._world.clock.end_step()
        self._tracer.end(step, self._world)
        self._tracer.begin(step + 1, self._world)

    def close_window(self, *, over: bool = False) -> dict[str, Any]:
        """What the ranks' steps since the last call say, as plain values for the log; empty where no step has ended. Collective.

        Args:
            over: whether every device has come to the end of the last step, which else stays for the next call on CUDA.
        """
        steps = self._world.clock.take(over=over)
        told = Told.of(steps, self._loads)
        for times in steps:
            del self._loads[times.step]
        together = Together(self._world.gather_objects(told))
        if not together.count:
            return {}
        for tokens, pairs, seconds in zip(together.tokens, together.pairs, together.compute, strict=True):
            self._fit.add(tokens, pairs, seconds)
        if self._steps_csv is not None:
            append_steps(self._steps_csv, together)
        return self._figures(together)

    def summary(self) -> dict[str, Any]:
        """``steps`` seen by this process, ``parts`` (seconds of a mean step), ``p50`` and ``p99`` of all steps, how many windows named whom."""
        steps = len(self._walls)
        parts = {label: seconds / steps for label, seconds in sorted(self._sums.items(), key=lambda item: -item[1])}
        return {"steps": steps, "parts": parts, **(percentiles(np.array(self._walls)) if steps else {}), "named": self._named}

    def stop(self) -> None:
        """Stop the clock, the recorders and the profiler."""
        self._tracer.drop()
        self._world.clock.stop()

    def _figures(self, together: Together) -> dict[str, Any]:
        parts, cost = together.parts(), self._fit.fit()
        self._walls.extend(together.walls)
        for label, seconds in parts.items():
            self._sums[label] = self._sums.get(label, 0.0) + seconds * together.count
        values: dict[str, Any] = {"step": together.seconds, **percentiles(together.walls), "parts": parts, "bound": together.bound()}
        if cost is not None:
            values["cost"] = {name: getattr(cost, name) for name in ("token", "pair", "step", "explained")}
        if self._world.size > 1:
            values |= {"imbalance": together.imbalance(), "slowest": together.slowest()}
        if named := together.straggler(cost):
            values["straggler"] = named
            self._count(f"rank {named['rank']} is slow")
        if slow := together.slow_exchange():
            values["slow_exchange"] = slow
            self._count(f"{slow['name']} is slow between ranks {', '.join(map(str, slow['ranks']))}")
        return values

    def _count(self, text: str) -> None:
        self._named[text] = self._named.get(text, 0) + 1


def percentiles(seconds: Floats) -> dict[str, float]:
    """Median and 99th percentile of steps."""
    middle, late = np.percentile(seconds, (50, 99)).tolist()
    return {"p50": middle, "p99": late}


def in_words(values: Mapping[str, Any]) -> str:
    """The three largest parts of a step, and who is named."""
    if not values:
        return ""
    shares = [f"{label} {100 * seconds / values['step']:.0f} %" for label, seconds in list(values["parts"].items())[:3]]
    text = f"  {', '.join(shares)}"
    if named := values.get("straggler"):
        text += f"  rank {named['rank']} is slow: {1e3 * named['seconds']:.1f} ms a step"
    if slow := values.get("slow_exchange"):
        text += f"  {slow['name']} is slow between ranks {slow['ranks']}: {1e3 * slow['seconds']:.1f} ms, {1e3 * slow['expected']:.1f} expected"
    return text


def open_steps(path: Path, step: int) -> None:
    """Begin the file; on a resume keep what was written up to ``step``."""
    kept: list[list[str]] = []
    if step and path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            kept = [row for row in list(csv.reader(file))[1:] if len(row) == len(COLUMNS) and int(row[0]) <= step]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *kept])


def append_steps(path: Path, together: Together) -> None:
    """One line for each step and rank."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for at, step in enumerate(together.numbers):
            for rank in range(len(together.compute)):
                load = (int(column[rank, at]) for column in (together.tokens, together.pairs, together.rows))
                writer.writerow((step, rank, *load, f"{together.compute[rank, at]:.9f}"))
