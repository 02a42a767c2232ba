"""The line of rows and its slices, against a plain dealing of rows one by one."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import Shard
from gem_data.feed.cursor import Trained
from gem_data.feed.order import shuffle_keys, slices, unit_order
from gem_data.feed.units import Unit, list_units


def plain(units: list[Unit], order: list[int], done: set[int], batch_size: int, world: int, window: int) -> list[list[list[int]]]:
    """``[rank][window]``: rows by their number in the split, dealt by a loop."""
    line = [units[u].first + r for u in order for r in range(units[u].rows) if units[u].first + r not in done]
    stripe = max(1, window * world // batch_size) * batch_size
    out: list[list[list[int]]] = [[] for _ in range(world)]
    for begin in range(0, len(line), stripe):
        rows, taken = line[begin : begin + stripe], 0
        shares = [0] * world
        for at in range(0, len(rows), batch_size):
            count = min(batch_size, len(rows) - at)
            for rank in range(world):
                shares[rank] += count * (rank + 1) // world - count * rank // world
        for rank in range(world):
            out[rank].append(rows[taken : taken + shares[rank]])
            taken += shares[rank]
    return out


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=0, max_size=6),
    batch_size=st.integers(1, 9),
    world=st.integers(1, 5),
    window=st.integers(1, 20),
    seed=st.none() | st.integers(0, 9),
    data=st.data(),
)
def test_slices_are_those_of_a_plain_dealing(
    sizes: list[int], batch_size: int, world: int, window: int, seed: int | None, data: st.DataObject
) -> None:
    units = list_units([(Path("a"), sizes[:3]), (Path("b"), sizes[3:])])
    assert [u.rows for u in units] == [size for size in sizes if size]
    gone = data.draw(st.sets(st.integers(0, max(sum(sizes) - 1, 0)))) if units else set()
    done = Trained(units)
    done.add(np.array(sorted(gone), dtype=np.int64))
    order = unit_order(len(units), seed, 1)
    want = plain(units, order.tolist(), gone, batch_size, world, window)
    for rank in range(world):
        got = list(slices(units, order, done, batch_size=batch_size, shard=Shard(rank=rank, world=world), window=window))
        assert [[units[p.unit].first + r for p in s.pieces for r in p.rows.tolist()] for s in got] == want[rank]
        assert [sum(s.sizes) for s in got] == [len(rows) for rows in want[rank]]
        assert all(len(s.sizes) == len(s.globals) for s in got)


def test_a_rank_reads_few_units_that_others_read_too() -> None:
    units = list_units([(Path("a"), [100] * 80)])
    order, nothing = unit_order(80, 3, 0), Trained(units)

    def read(rank: int) -> set[int]:
        asked = slices(units, order, nothing, batch_size=64, shard=Shard(rank=rank, world=4), window=500)
        return {piece.unit for one in asked for piece in one.pieces}

    assert sum(len(read(rank)) for rank in range(4)) <= 80 + 4 * 5, "one shared unit for each end of a slice"


def test_unit_order_follows_seed_and_epoch() -> None:
    assert unit_order(9, None, 3).tolist() == list(range(9))
    assert unit_order(9, 1, 0).tolist() == unit_order(9, 1, 0).tolist()
    assert unit_order(9, 1, 0).tolist() != unit_order(9, 1, 1).tolist()


def test_shuffle_keys_do_not_repeat_and_do_not_depend_on_company() -> None:
    keys = shuffle_keys(np.arange(100_000), 5, 0)
    assert np.unique(keys).size == keys.size
    assert np.array_equal(shuffle_keys(np.array([7, 99]), 5, 0), keys[[7, 99]])
    assert not np.array_equal(shuffle_keys(np.arange(9), 5, 1), keys[:9])
    ranks = np.argsort(np.argsort(keys)) / keys.size
    assert abs(np.corrcoef(ranks, np.arange(keys.size))[0, 1]) < 0.02
    assert abs(np.corrcoef(ranks[1:], ranks[:-1])[0, 1]) < 0.02
