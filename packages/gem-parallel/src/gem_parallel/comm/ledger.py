"""A record of the collectives of this process: name, bytes, group, stream, how long each ran, and how long computing waited for it.

Everything in this package that talks to other ranks passes through ``LEDGER``. While it is closed, a collective pays for one test of a flag.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

COMPUTE = "compute"
"""The stream that computes. What runs there is waited for from its beginning to its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One collective, or one wait for collectives that ran on a stream of their own (``kind = "wait"``).

    Args:
        name: what it was for, ``experts: activations``.
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``wait``.
        sent: bytes that this rank sent to others, by the ring algorithm for those that have one.
        group: the process group's description.
        ranks: ranks in the group.
        stream: ``compute``, or the name of the stream it ran on.
        seconds: from issue to end, with the wait for the slowest rank; 0 where only counts are kept.
        exposed: seconds in which nothing else ran on the stream that computes (on the CPU: in the calling thread).
        phase: what ``Ledger.phase`` was when it ended.
    """

    name: str
    kind: str
    sent: int
    group: str
    ranks: int
    stream: str
    seconds: float
    exposed: float
    phase: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Sums over entries of one name."""

    calls: int
    sent: int
    seconds: float
    exposed: float


Mark = float | torch.cuda.Event


class Span:
    """A collective under way; ``Ledger`` makes it. ``done`` closes it and ``waits`` adds up what computing waited."""

    def __init__(self, ledger: "Ledger", facts: tuple[str, str, int, str, int, str], device: torch.device) -> None:
        self._ledger, self.facts, self._device, self.record = ledger, facts, device, ledger.record
        self._begun, self._waits = ledger.mark(device), list[tuple[Mark, Mark]]()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a call that blocks the stream that computes."""
        begun = self._ledger.mark(self._device)
        yield
        self._waits.append((begun, self._ledger.mark(self._device)))

    def done(self, *, exposed: bool = False) -> None:
        """The collective has ended, or its end has been put on the current stream.

        Args:
            exposed: the stream that computes stood still from the beginning to now.
        """
        ended = self._ledger.mark(self._device)
        self._ledger.add(self, self._begun, ended, [(self._begun, ended)] if exposed else self._waits)


class Ledger:
    """The entries of this process between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._open, self._timed = False, False
        self.record = 0
        self._spans: list[tuple[tuple[str, str, int, str, int, str], Mark, Mark, list[tuple[Mark, Mark]], Any]] = []
        self.phase: Any = None
        """Set by whoever reads the record: what the process is doing now."""

    @property
    def open(self) -> bool:
        return self._open

    def start(self, *, timed: bool = True) -> None:
        """Begin a record; an earlier one is dropped.

        Args:
            timed: False keeps names and bytes only. On CUDA a timed record puts two events around every collective.
        """
        self._open, self._timed = True, timed
        self.record += 1
        self._spans.clear()

    def stop(self) -> list[Entry]:
        """The entries in the order in which they ended; waits for the GPU."""
        if any(isinstance(begun, torch.cuda.Event) for _, begun, *_ in self._spans):
            torch.cuda.synchronize()
        entries = [self._entry(*span) for span in self._spans]
        self._open = False
        self._spans.clear()
        return entries

    def span(self, name: str, kind: str, sent: int, group: str, ranks: int, device: torch.device, stream: str = COMPUTE) -> Span | None:
        """Open a collective, None while the ledger is closed."""
        return Span(self, (name, kind, sent, group, ranks, stream), device) if self._open else None

    @contextmanager
    def blocking(self, name: str, kind: str, sent: int, group: str, ranks: int, device: torch.device, stream: str = COMPUTE) -> Iterator[None]:
        """Around a collective that the current stream waits for. Exposed if that stream computes; on the CPU every stream is the calling thread."""
        span = self.span(name, kind, sent, group, ranks, device, stream)
        yield
        if span is not None:
            span.done(exposed=stream == COMPUTE or device.type == "cpu")

    def mark(self, device: torch.device) -> Mark:
        """Now: on the host's clock, or on the current stream."""
        if not self._timed:
            return 0.0
        if device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event  # type: ignore[no-any-return]

    def add(self, span: Span, begun: Mark, ended: Mark, waits: Sequence[tuple[Mark, Mark]]) -> None:
        """Close a span; one that was opened in an earlier record is dropped."""
        if self._open and span.record == self.record:
            self._spans.append((span.facts, begun, ended, list(waits), self.phase))

    @staticmethod
    def _entry(facts: tuple[str, str, int, str, int, str], begun: Mark, ended: Mark, waits: Sequence[tuple[Mark, Mark]], phase: Any) -> Entry:
        name, kind, sent, group, ranks, stream = facts
        return Entry(
            name=name,
            kind=kind,
            sent=sent,
            group=group,
            ranks=ranks,
            stream=stream,
            seconds=_seconds(begun, ended),
            exposed=sum(_seconds(a, b) for a, b in waits),
            phase=phase,
        )


def _seconds(begun: Mark, ended: Mark) -> float:
    if isinstance(begun, float):
        assert isinstance(ended, float)
        return ended - begun
    assert isinstance(ended, torch.cuda.Event)
    return float(begun.elapsed_time(ended)) / 1000


def totals(entries: Sequence[Entry]) -> dict[str, Total]:
    """Sums by name, the most exposed first."""
    out: dict[str, Total] = {}
    for entry in entries:
        so_far = out.get(entry.name, Total(calls=0, sent=0, seconds=0.0, exposed=0.0))
        out[entry.name] = Total(
            calls=so_far.calls + 1,
            sent=so_far.sent + entry.sent,
            seconds=so_far.seconds + entry.seconds,
            exposed=so_far.exposed + entry.exposed,
        )
    return dict(sorted(out.items(), key=lambda item: -item[1].exposed))


LEDGER = Ledger()
"""The record of this process."""
