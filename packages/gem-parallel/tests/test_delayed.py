"""One reduction over replicas for all micro-batches of a step gives what one in each gives. The ranks' work is in ranks_delayed.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_delayed import FSDP, MICRO, STEPS, Gated, extra_in_one, last_without, no_skips, one_process

from gem_core.spec import DelaysReduction
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.dense.fsdp import FullyShard

WORLD = 4


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(Path(__file__).with_name("ranks_delayed.py"), tmp_path_factory.mktemp("delayed"), WORLD)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for kind in ("gradients", "weights"):
        assert got[kind].keys() == want[kind].keys()
        for name, tensor in want[kind].items():
            assert torch.allclose(got[kind][name], tensor, rtol=1e-5, atol=1e-6), f"{kind} of {name}"


@pytest.mark.parametrize("name", [*FSDP, "ddp"])
def test_gradients_and_weights_equal_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    want = one_process(no_skips, WORLD)
    for rank in ranks:
        assert_same(rank[name], want)


def test_the_comparison_sees_a_micro_batch_that_is_left_out(ranks: list[dict[str, Any]]) -> None:
    other = one_process(last_without("layers.1"), WORLD)
    with pytest.raises(AssertionError):
        assert_same(ranks[0]["last"], other)


def test_bytes_between_replicas_are_divided_by_the_micro_batches(ranks: list[dict[str, Any]]) -> None:
    """Weights and scattered gradients travel in each micro-batch as before."""
    between = "dense: gradients between replicas"
    for rank in ranks:
        last, each = dict(rank["last"]["sent"]), dict(rank["each"]["sent"])
        assert last[between] * MICRO == each[between] > 0
        del last[between], each[between]
        assert last == each
        assert rank["kept"]["sent"][between] == rank["last"]["sent"][between]
        assert between not in rank["no replicas"]["sent"]


def test_a_shard_of_its_own_is_reduced_in_each_micro_batch(ranks: list[dict[str, Any]]) -> None:
    numbers = sum(p.numel() for p in Gated().parameters())
    sent = ranks[0]["one shard"]["sent"]["dense: gradients between replicas"]
    assert sent >= STEPS * MICRO * 2 * 3 / 4 * 4 * numbers


def test_ddp_reduces_once_a_step(ranks: list[dict[str, Any]]) -> None:
    """All parameters fit into one bucket."""
    assert [rank["ddp"]["reduced"] for rank in ranks] == [STEPS] * WORLD


def test_ddp_keeps_gradients_of_parameters_that_the_last_micro_batch_does_not_use(ranks: list[dict[str, Any]]) -> None:
    want = one_process(extra_in_one, WORLD)
    assert want["gradients"]["extra"].abs().max() > 0
    for rank in ranks:
        assert_same(rank["ddp, unused"], want)


def test_a_block_may_come_late_but_not_leave(ranks: list[dict[str, Any]]) -> None:
    want = one_process(lambda micro, _: frozenset({"layers.1"} if micro == 0 else ()), WORLD)
    late = one_process(last_without("layers.1"), WORLD)
    for rank in ranks:
        assert_same(rank["without a block at first"], want)
        assert_same(rank["each, without a block at last"], late)
        assert "layers.1 left parameters without a gradient" in rank["refused block"]
        assert "layers.0 left parameters without a gradient" in rank["refused parameter"]
        assert "--set parallel.options.fsdp.reduce=each" in rank["refused parameter"]


def test_both_strategies_are_told_of_micro_batches() -> None:
    for strategy in (FullyShard(), DataParallel()):
        assert isinstance(strategy, DelaysReduction)
        with strategy.micro_batch(last=False):  # in one process there is nothing to put off
            pass
