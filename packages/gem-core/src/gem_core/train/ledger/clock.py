"""The clock of a step: which phase this rank is in, from mark to mark, so that the phases of a step add up to its time.

On the CPU a mark is the host's time. On CUDA it is an event on the stream that computes: a phase's time is what it took of that stream, idle time
while the host was late included. Nothing is read back before a window is closed.
"""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from gem_core.spec.collectives import Collective, CollectiveRecorder

DATA, IDS, COPY, FORWARD, BACKWARD = "data", "ids", "copy", "forward", "backward"
OPTIMISER, TABLES, AGREE, LOG, OTHER = "optimiser", "tables", "agree", "log", "other"
PAUSED = "paused"
"""Evaluation and saving: no part of a step."""

Mark = Any
"""Seconds of ``time.perf_counter``, or a CUDA event."""


@dataclass(slots=True)
class Exchanged:
    """One collective's calls in one step: bytes sent, seconds from issue to end, seconds exposed."""

    calls: int = 0
    sent: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    ranks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """One step of one rank.

    Args:
        step: its number.
        parts: seconds by phase; exposed collectives are not in them. Phases and exposed seconds add up to the step's time.
        collectives: by name, in the order of their first call.
    """

    step: int
    parts: dict[str, float]
    collectives: dict[str, Exchanged] = field(default_factory=dict)

    @property
    def blocked(self) -> float:
        """Seconds spent on other ranks: waiting for them, or for what they send."""
        return self.parts.get(AGREE, 0.0) + sum(c.exposed for c in self.collectives.values())

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self.parts.values()) + sum(c.exposed for c in self.collectives.values())


class _Phase:
    """A phase as a context; afterwards the phase before it goes on."""

    __slots__ = ("_before", "_clock", "_label", "_range")

    def __init__(self, clock: "Clock", label: str) -> None:
        self._clock, self._label = clock, label

    def __enter__(self) -> None:
        self._before = self._clock.switch(self._label)
        self._range = None
        if self._clock.tracing:
            self._range = torch.profiler.record_function(self._label)
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._clock.switch(self._before)


_NOTHING = nullcontext()


class Clock:
    """The phases of this process. It stands still until ``start``; a phase then costs one test of a flag."""

    def __init__(self) -> None:
        self._open, self.tracing = False, False
        self._on_cuda = False
        self._recorders: Sequence[CollectiveRecorder] = ()
        self._label, self._step = OTHER, 0
        self._marks: list[tuple[str, Mark]] = []
        self._done: list[tuple[int, list[tuple[str, Mark]]]] = []
        self._waiting: dict[int, list[Collective]] = {}

    def start(self, device: torch.device, recorders: Sequence[CollectiveRecorder], step: int) -> None:
        """Begin step number ``step``; what was measured before is dropped."""
        self._on_cuda, self._recorders, self._step = device.type == "cuda", recorders, step
        self._open, self._label = True, OTHER
        self._done, self._waiting = [], {}
        for recorder in recorders:
            recorder.start()
        self.restart()

    def restart(self) -> None:
        """Begin the present step again: the time since the last one is dropped."""
        self._marks = [(self._label, self._mark())]
        self._tell_recorders()

    @property
    def open(self) -> bool:
        """Whether it runs."""
        return self._open

    def stop(self) -> None:
        """Stand still."""
        if self._open:
            for recorder in self._recorders:
                recorder.stop()
        self._open = False

    def phase(self, label: str) -> Any:
        """A context in which this rank's time counts for ``label``."""
        return _Phase(self, label) if self._open and self._label != PAUSED else _NOTHING

    def switch(self, label: str) -> str:
        """What follows counts for ``label``; returns what counted so far."""
        before, self._label = self._label, label
        self._marks.append((label, self._mark()))
        self._tell_recorders()
        return before

    def end_step(self) -> None:
        """The step is over and the next one begins."""
        if not self._open:
            return
        self._marks.append((OTHER, self._mark()))
        self._done.append((self._step, self._marks))
        self._step += 1
        self._marks = [(self._label, self._marks[-1][1])]
        self._tell_recorders()

    def take(self, *, over: bool = False) -> list[StepTimes]:
        """The steps that have ended since the last call.

        Args:
            over: whether the device has come to the end of the last one. Else, on CUDA, that step stays for the next call, so that no queue runs
                empty for its sake.
        """
        taken, self._done = self._done, []
        if self._on_cuda and taken and not over:
            self._done.append(taken.pop())
        if self._on_cuda and taken:
            taken[-1][1][-1][1].synchronize()
        for recorder in self._recorders:
            for entry in recorder.stop():
                self._waiting.setdefault(entry.phase[0], []).append(entry)
            recorder.start()
        return [self._times(step, marks) for step, marks in taken]

    def _mark(self) -> Mark:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _tell_recorders(self) -> None:
        for recorder in self._recorders:
            recorder.phase = (self._step, self._label)

    def _times(self, step: int, marks: list[tuple[str, Mark]]) -> StepTimes:
        parts: dict[str, float] = {}
        for (label, begun), (_, ended) in pairwise(marks):
            seconds = begun.elapsed_time(ended) / 1000 if self._on_cuda else ended - begun
            parts[label] = parts.get(label, 0.0) + seconds
        parts.pop(PAUSED, None)
        times = StepTimes(step=step, parts=parts)
        for entry in self._waiting.pop(step, []):
            label = entry.phase[1]
            if label == PAUSED:
                continue
            exposed = min(entry.exposed, parts.get(label, 0.0))  # clocks of the recorder and of the phase may differ in the last digit
            if label in parts:
                parts[label] -= exposed
            sums = times.collectives.setdefault(entry.name, Exchanged(ranks=entry.ranks))
            sums.calls += entry.kind != "wait"
            sums.sent, sums.seconds, sums.exposed = sums.sent + entry.sent, sums.seconds + entry.seconds, sums.exposed + exposed
        return times
