"""A record of this process's own collectives, as ``gem_core.spec.collectives`` asks for it: blocking ones, on the stream that computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Call:
    """One collective (``gem_core.spec.collectives.Collective``)."""

    name: str
    kind: str
    sent: int
    group: str
    ranks: int
    phase: Any = None
    seconds: float = 0.0

    @property
    def exposed(self) -> float:
        return self.seconds


class Recorder:
    """Collectives between ``start`` and ``stop``; outside of that nothing is recorded."""

    def __init__(self) -> None:
        self.phase: Any = None
        self._open = False
        self._calls: list[tuple[Call, Any, Any]] = []

    def start(self, *, timed: bool = True) -> None:
        self._open, self._calls = True, []

    @contextmanager
    def recorded(self, name: str, kind: str, sent: int, group: str, ranks: int, device: torch.device) -> Iterator[None]:
        """Around a collective that the caller waits for."""
        if not self._open:
            yield
            return
        begun = _mark(device)
        yield
        self._calls.append((Call(name, kind, sent, group, ranks, self.phase), begun, _mark(device)))

    def stop(self) -> list[Call]:
        calls, self._calls, self._open = self._calls, [], False
        for call, begun, ended in calls:
            if isinstance(begun, float):
                call.seconds = ended - begun
            else:
                ended.synchronize()
                call.seconds = begun.elapsed_time(ended) / 1000
        return [call for call, _, _ in calls]


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
