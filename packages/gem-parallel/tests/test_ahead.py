"""Ids that are sent ahead change no bit, on 2 and 4 gloo ranks, for every engine and layout. The ranks' work is in ranks_ahead.py."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_batches import STEPS, TABLES, pack, share
from ranks_ahead import ENGINES

from gem_core.spec import PrefetchesIds, RequestError, SparseOptimizer
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings

WORLDS = (2, 4)
Ranks = dict[int, list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def ranks(sharded_ranks: Callable[[int], list[dict[str, Any]]]) -> Ranks:
    return {world: [rank["ahead"] for rank in sharded_ranks(world)] for world in WORLDS}


def differing(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> list[tuple[int, str]]:
    """Steps and features whose vectors differ in a bit."""
    assert len(got) == len(want)
    return [(step, key) for step, (a, b) in enumerate(zip(got, want, strict=True)) for key in b if not torch.equal(a[key], b[key])]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ENGINES)
def test_outputs_tables_updates_and_bytes_are_those_without(ranks: Ranks, world: int, name: str) -> None:
    """Two epochs with an evaluation after each, shares that leave ranks without rows or ids."""
    for rank in ranks[world]:
        ahead, plain = rank[name, True], rank[name, False]
        assert len(plain["outputs"]) == 2 * (STEPS + 1)
        assert differing(ahead["outputs"], plain["outputs"]) == []
        assert {at: torch.equal(tensor, plain["slices"][at]) for at, tensor in ahead["slices"].items()} == dict.fromkeys(plain["slices"], True)
        assert ahead["updates"] == plain["updates"] == 2 * STEPS
        assert ahead["sent"] == plain["sent"]


def test_planted_fault_the_comparison_sees_another_batch(ranks: Ranks) -> None:
    outputs = ranks[2][0]["auto", True]["outputs"]
    assert differing(outputs[1:2] + outputs[:1], outputs[:2])


@pytest.mark.parametrize("world", WORLDS)
def test_case_F13_engines_share_a_batch_that_one_lets_go_early(ranks: Ranks, world: int) -> None:
    for rank in ranks[world]:
        ahead, plain = rank["shared"]
        assert len(plain) == 2 * STEPS
        assert differing(ahead, plain) == []


@pytest.mark.parametrize("engine", [TorchRecEmbeddings, Sharded2DEmbeddings])
def test_one_process_and_a_bad_id(engine: Any) -> None:
    """In one process nothing travels; an id without a row is named when it is sent."""
    tables = engine(TABLES, SparseOptimizer(name="sgd", lr=0.2), device="cpu", seed=3)
    assert isinstance(tables, PrefetchesIds)
    batch = pack(share(0, 0, 1))
    sent = tables.prefetch(batch)
    assert differing([tables(sent)], [tables(batch)]) == []
    batch.values[-1] = 99
    with pytest.raises(RequestError, match="id 99 is not a row of table 'tags'"):
        tables.prefetch(batch)


def test_which_engines_change_their_tables_in_step_alone() -> None:
    assert Sharded2DEmbeddings.updates_in_step
    assert not getattr(TorchRecEmbeddings, "updates_in_step", False)
