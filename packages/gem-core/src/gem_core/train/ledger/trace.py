"""Timelines of chosen steps, for chrome://tracing and Perfetto: what torch's profiler sees, with the ledger's phases as ranges."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from gem_core.train.ledger.clock import PAUSED
from gem_core.train.world import World


class Tracer:
    """Writes ``trace/step-N-rank-R.json`` in the run folder, on every rank.

    Args:
        folder: the run folder.
        steps: numbers of the steps; a traced step is slower than others.
    """

    def __init__(self, folder: Path, steps: Collection[int]) -> None:
        self._folder, self._steps = folder / "trace", frozenset(steps)
        self._profiler: Any = None

    def begin(self, step: int, world: World) -> None:
        """Step number ``step`` begins."""
        if step not in self._steps or self._profiler is not None:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=kinds)
        with world.clock.phase(PAUSED):
            self._profiler.start()
        world.clock.tracing = True

    def end(self, step: int, world: World) -> None:
        """Step number ``step`` is over: write it."""
        if self._profiler is None:
            return
        world.clock.tracing = False
        with world.clock.phase(PAUSED):
            self._profiler.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._folder / f"step-{step}-rank-{world.rank}.json"))
        self._profiler = None

    def drop(self) -> None:
        """The run is over: a step that has begun to be traced will not end."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
