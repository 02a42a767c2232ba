"""The record of collectives, in one process."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_parallel.comm.collectives import Collectives, Gathering, Traffic
from gem_parallel.comm.ledger import COMPUTE, Entry, Ledger, totals
from gem_parallel.comm.transport import all_reduce_bytes
from gem_parallel.comm.waits import Gap

CPU = torch.device("cpu")
NAP = 0.004


def opened(*, timed: bool = True) -> Ledger:
    ledger = Ledger()
    ledger.start(timed=timed)
    return ledger


def test_a_closed_ledger_records_nothing() -> None:
    ledger = Ledger()
    assert ledger.span("a", "all_gather", 8, "g", 2, CPU) is None
    with ledger.blocking("a", "all_gather", 8, "g", 2, CPU):
        pass
    ledger.start()
    assert ledger.stop() == []


@pytest.mark.parametrize("stream", [COMPUTE, "weights"])
def test_what_blocks_the_host_is_exposed(stream: str) -> None:
    """On the CPU a stream of its own hides nothing."""
    ledger = opened()
    with ledger.blocking("a", "all_gather", 8, "g", 2, CPU, stream):
        time.sleep(NAP)
    (entry,) = ledger.stop()
    assert (entry.name, entry.kind, entry.sent, entry.group, entry.ranks, entry.stream) == ("a", "all_gather", 8, "g", 2, stream)
    assert entry.seconds == entry.exposed >= NAP


def test_a_wait_is_exposed_from_its_beginning_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened()
    monkeypatch.setattr("gem_parallel.comm.waits.LEDGER", ledger)
    gap = Gap("wait for weights", CPU)
    gap.begin()
    time.sleep(NAP)
    gap.end()
    gap.end()  # nothing is open
    (entry,) = ledger.stop()
    assert (entry.name, entry.kind) == ("wait for weights", "wait")
    assert entry.seconds == entry.exposed >= NAP


def test_only_the_wait_for_something_under_way_is_exposed() -> None:
    ledger = opened()
    span = ledger.span("a", "all_gather", 8, "g", 2, CPU)
    assert span is not None
    time.sleep(NAP)
    with span.waiting():
        pass
    span.done()
    (entry,) = ledger.stop()
    assert entry.seconds >= NAP > entry.exposed


def test_without_times_there_are_names_and_bytes() -> None:
    ledger = opened(timed=False)
    with ledger.blocking("a", "all_to_all", 8, "g", 2, CPU):
        time.sleep(NAP)
    (entry,) = ledger.stop()
    assert (entry.sent, entry.seconds, entry.exposed) == (8, 0.0, 0.0)


def test_a_record_ends_with_stop_and_what_began_before_it_is_not_in_the_next() -> None:
    ledger = opened()
    late = ledger.span("late", "all_gather", 8, "g", 2, CPU)
    assert late is not None
    assert ledger.stop() == []
    assert not ledger.open
    ledger.start()
    late.done()
    assert ledger.stop() == []


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.floats(0, 1)), max_size=12))
def test_totals_add_up_and_begin_with_the_most_exposed(rows: list[tuple[str, int, float]]) -> None:
    entries = [Entry(name=n, kind="wait", sent=sent, group="g", ranks=2, stream=COMPUTE, seconds=2 * x, exposed=x) for n, sent, x in rows]
    got = totals(entries)
    assert {name: (t.calls, t.sent) for name, t in got.items()} == {
        name: (sum(n == name for n, _, _ in rows), sum(sent for n, sent, _ in rows if n == name)) for name, _, _ in rows
    }
    assert all(t.seconds == pytest.approx(2 * t.exposed) for t in got.values())
    exposed = [t.exposed for t in got.values()]
    assert exposed == sorted(exposed, reverse=True)


def test_a_gathering_under_way_is_waited_for_once() -> None:
    class Work:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    work: Any = Work()
    ledger = opened()
    gathering = Gathering(torch.ones(2), work, ledger.span("a", "all_gather", 8, "g", 2, CPU))
    assert torch.equal(gathering.wait(), gathering.wait())
    assert work.waited == 1
    assert len(ledger.stop()) == 1


def test_a_group_of_one_sends_nothing() -> None:
    traffic = Traffic()
    alone = Collectives(None, traffic)
    x = torch.arange(3.0)
    assert torch.equal(alone.reduce_scatter("a", x[None]), x)
    assert torch.equal(alone.all_gather("a", x).wait(), x[None])
    assert traffic.take() == {}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(0, 100))
def test_bytes_of_an_all_reduce_are_those_of_a_ring(ranks: int, size: int) -> None:
    """Counted step by step: in each of ``ranks - 1`` steps of both passes a rank sends one part."""
    part = -(-size // ranks)
    assert all_reduce_bytes(size, ranks) == sum(part for _ in ("reduce-scatter", "all-gather") for _ in range(ranks - 1))
