"""Steps that all ranks agree on, played through without processes: each rank's thread meets the others at a barrier."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from gem_train_fakes import FakeSource
from torch import Tensor

from gem_core.batch import Batch
from gem_core.spec import RequestError, Shard
from gem_core.train.feed import Feed, Work, empty_batch
from gem_core.train.world import World


@dataclass
class Meeting:
    """Where the threads of a test exchange values, as processes do through gloo."""

    size: int
    slots: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots, self.barrier = [None] * self.size, threading.Barrier(self.size, timeout=20)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        out = list(self.slots)
        self.barrier.wait()
        return out


@dataclass(frozen=True, slots=True)
class ThreadWorld(World):
    """A rank that lives in a thread."""

    meeting: Any = None

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.rank, values.clone()))

    def gather_objects(self, value: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, value)  # type: ignore[no-any-return]


def on_ranks(size: int, do: Callable[[World], Any]) -> list[Any]:
    """Run ``do`` once for each rank at the same time; its results or exceptions by rank."""
    meeting = Meeting(size)

    def call(rank: int) -> Any:
        try:
            return do(ThreadWorld(rank=rank, size=size, meeting=meeting))
        except RequestError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def play(shares: list[int], *, uneven: str, accumulate: int = 1, rows: int = 4) -> list[tuple[list[Work], Feed]]:
    """All steps of an epoch where rank r has ``shares[r]`` batches of ``rows`` rows."""
    source = FakeSource(rows=rows * sum(shares), shares={str(rank): count for rank, count in enumerate(shares)})

    def rank(world: World) -> tuple[list[Work], Feed]:
        own = source.batches("train", batch_size=rows, shard=Shard(rank=world.rank, world=world.size))
        feed = Feed(own, world, source.schema(), flops=lambda batch: 10 * batch.rows, accumulate=accumulate, uneven=uneven)
        return list(feed), feed

    return on_ranks(len(shares), rank)


@pytest.mark.parametrize("uneven", ["stop", "drop"])
def test_case_F01_ends_at_the_last_step_all_ranks_can_take(uneven: str) -> None:
    for works, feed in play([5, 3], uneven=uneven):
        assert [work.rows for work in works] == [8, 8, 8]
        assert feed.ran_out == 1
        assert feed.dropped == 4  # the batch that rank 0 had read when rank 1 had none; its fifth was never read


def test_case_F01_pad_trains_every_row() -> None:
    (long, _), (short, feed) = play([5, 3], uneven="pad")
    assert [work.rows for work in short] == [8, 8, 8, 4, 4]
    assert [work.batches[0].rows for work in short] == [4, 4, 4, 0, 0]
    assert [work.batches[0].rows for work in long] == [4] * 5
    assert (feed.ran_out, feed.dropped) == (None, 0)


@pytest.mark.parametrize("uneven", ["stop", "pad", "drop"])
def test_even_ranks_are_never_uneven(uneven: str) -> None:
    for works, feed in play([3, 3], uneven=uneven):
        assert [work.rows for work in works] == [8, 8, 8]
        assert (feed.ran_out, feed.dropped) == (None, 0)


@pytest.mark.parametrize(("uneven", "steps", "dropped"), [("stop", [16, 8], 4), ("drop", [16, 8], 4), ("pad", [16, 12, 4], 0)])
def test_uneven_in_the_middle_of_an_accumulated_step(uneven: str, steps: list[int], dropped: int) -> None:
    """Two micro-batches a step, 5 and 3 batches: the second step has one micro-batch that both ranks can take."""
    for works, feed in play([5, 3], uneven=uneven, accumulate=2):
        assert [work.rows for work in works] == steps
        assert feed.dropped == dropped
        assert len({len(work.batches) for work in works[:1]}) == 1


def test_a_rank_without_any_batch() -> None:
    assert [[w.rows for w in works] for works, _ in play([2, 0], uneven="pad")] == [[4, 4], [4, 4]]
    for works, feed in play([2, 0], uneven="stop"):
        assert (works, feed.ran_out, feed.dropped) == ([], 1, 4)


def test_ranks_know_the_global_sums() -> None:
    source = FakeSource(rows=24)

    def rank(world: World) -> list[Work]:
        own = source.batches("train", batch_size=8, shard=Shard(rank=world.rank, world=world.size))
        return list(Feed(own, world, source.schema(), flops=lambda batch: 10 * batch.rows))

    alone = list(Feed(source.batches("train", batch_size=8), World(), source.schema(), flops=lambda batch: 10 * batch.rows))
    for works in on_ranks(3, rank):
        assert [w.rows for w in works] == [w.rows for w in alone] == [8, 8, 8]
        assert [w.flops for w in works] == [w.flops for w in alone] == [80, 80, 80]
        assert torch.equal(torch.stack([w.weights for w in works]), torch.stack([w.weights for w in alone]))


def test_one_ranks_bad_label_stops_all_before_the_step() -> None:
    source = FakeSource(rows=16, bad_label=13)

    def rank(world: World) -> list[Work]:
        own = source.batches("train", batch_size=8, shard=Shard(rank=world.rank, world=world.size))
        return list(Feed(own, world, source.schema(), flops=lambda batch: 0))

    errors = on_ranks(2, rank)
    assert [type(error) for error in errors] == [RequestError, RequestError]
    assert str(errors[0]) == str(errors[1])
    assert "label 'ctr': it holds 2.0" in str(errors[0])


def test_accumulation_ends_an_epoch_with_what_is_left(source: FakeSource) -> None:
    works = list(Feed(source.batches("train", batch_size=20), World(), source.schema(), flops=lambda batch: 0, accumulate=3))
    assert [(len(w.batches), w.rows) for w in works] == [(3, 60), (2, 36)]


def test_an_empty_batch_has_every_column_of_a_full_one() -> None:
    from gem_core.builtin.toy import ToySource

    toy = ToySource()
    full, empty = next(toy.batches("train", batch_size=8)), empty_batch(toy.schema())
    assert empty.rows == 0
    assert empty.ids.keys == full.ids.keys
    for name in ("labels", "dense", "event_dense", "event_time", "event_offsets"):
        assert getattr(empty, name).keys() == getattr(full, name).keys(), name
    for name in ("labels", "dense", "event_dense", "event_time"):
        for key, tensor in getattr(empty, name).items():
            assert (tensor.dtype, tensor.shape[1:], tensor.shape[0]) == (getattr(full, name)[key].dtype, getattr(full, name)[key].shape[1:], 0)
    assert (empty.time is None) == (full.time is None)
    assert (empty.groups is None) == (full.groups is None)
    assert isinstance(empty.to("cpu"), Batch)
