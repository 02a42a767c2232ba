"""The order and the sharing of rows that every source takes from ``gem_core.batch``, and the gather of jagged rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import epoch_batches, range_index
from gem_core.spec import RequestError, Shard

SEEDS = st.one_of(st.none(), st.integers(0, 5))


def steps(rows: int, **how: object) -> list[tuple[list[int], int]]:
    return [(index.tolist(), together) for index, together in epoch_batches(rows, **how)]  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), size=st.integers(1, 15), world=st.integers(1, 6), seed=SEEDS, epoch=st.integers(0, 2))
def test_ranks_read_contiguous_shares_of_the_same_global_batches(rows: int, size: int, world: int, seed: int | None, epoch: int) -> None:
    whole = steps(rows, batch_size=size, seed=seed, epoch=epoch)
    parts = [steps(rows, batch_size=size, seed=seed, epoch=epoch, shard=Shard(rank=r, world=world)) for r in range(world)]
    assert sorted(row for index, _ in whole for row in index) == list(range(rows))
    assert [together for _, together in whole] == [min(size, rows - first) for first in range(0, rows, size)]
    for step, (index, together) in enumerate(whole):
        shares = [part[step] for part in parts]
        assert [row for share, _ in shares for row in share] == index
        assert {share[1] for share in shares} == {together}
        assert max(len(share) for share, _ in shares) - min(len(share) for share, _ in shares) <= 1
    assert {len(part) for part in parts} == {len(whole)}


@settings(max_examples=30, deadline=None, derandomize=True)
@given(rows=st.integers(0, 40), size=st.integers(1, 15), start=st.integers(0, 9), seed=SEEDS)
def test_start_skips_whole_steps(rows: int, size: int, start: int, seed: int | None) -> None:
    assert steps(rows, batch_size=size, seed=seed, start=start) == steps(rows, batch_size=size, seed=seed)[start:]


def test_seed_and_epoch_change_the_order_and_none_keeps_it() -> None:
    orders = {(seed, epoch): steps(50, batch_size=50, seed=seed, epoch=epoch)[0][0] for seed in (0, 1) for epoch in (0, 1)}
    assert len({tuple(order) for order in orders.values()}) == 4
    assert steps(50, batch_size=50, seed=None, epoch=3)[0][0] == list(range(50))


def test_a_short_last_batch_may_leave_a_rank_without_rows() -> None:
    last = [steps(5, batch_size=4, shard=Shard(rank=r, world=3))[-1] for r in range(3)]
    assert sorted(len(index) for index, _ in last) == [0, 0, 1]
    assert {together for _, together in last} == {1}


@pytest.mark.parametrize(
    "bad", [{"batch_size": 0}, {"shard": Shard(rank=2, world=2)}, {"shard": Shard(rank=-1, world=2)}, {"seed": -1}, {"epoch": -1}, {"start": -1}]
)
def test_bad_requests_fail_at_the_call(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError):
        epoch_batches(9, **({"batch_size": 4} | bad))  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(spans=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=8))
def test_positions_of_jagged_rows_are_those_of_a_loop(spans: list[tuple[int, int]]) -> None:
    begin, lengths = (torch.tensor([span[i] for span in spans], dtype=torch.int64) for i in (0, 1))
    positions, offsets = range_index(begin, lengths)
    assert positions.tolist() == [b + k for b, n in spans for k in range(n)]
    assert offsets.tolist() == [sum(n for _, n in spans[:r]) for r in range(len(spans) + 1)]
    assert positions.dtype == offsets.dtype == torch.int64


def test_case_B10_a_negative_length_is_named() -> None:
    with pytest.raises(RequestError, match="length -1 at index 1"):
        range_index(torch.tensor([0, 3]), torch.tensor([3, -1]))
