"""The ``fsdp`` strategy on four gloo ranks gives what one process gives. The ranks' work is in ranks_fsdp.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks_fsdp import Blocks, train
from torch import nn

from gem_core.spec import ParallelContext, RequestError, Topology, load_object
from gem_parallel.dense.fsdp import FullyShard, blocks
from gem_parallel.plugin import gem_parallel_strategies

SCRIPT = Path(__file__).with_name("ranks_fsdp.py")
WORLD = 4


def context(world: int) -> ParallelContext:
    return ParallelContext(rank=0, world=world, device="cpu", topology=Topology(world=world, device="cpu"))


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(SCRIPT, tmp_path_factory.mktemp("fsdp"), WORLD)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_weights_equal_those_of_one_process(ranks: list[dict[str, Any]], replicas: int, reshard: bool) -> None:
    """Four steps; in one of them three ranks have no rows."""
    want = train(Blocks(), 0, 1)
    for rank in ranks:
        got = rank["weights"][replicas, reshard]
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-6), name


def test_the_comparison_sees_gradients_that_are_not_averaged(ranks: list[dict[str, Any]]) -> None:
    """The first rank's rows alone."""
    alone = Blocks()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05)
    alone(torch.randn(3, 5, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(ranks[0]["weights"][1, True]["head.weight"], alone.head.weight, rtol=1e-5, atol=1e-6)


def test_ranks_hold_their_share(ranks: list[dict[str, Any]]) -> None:
    size = sum(p.numel() for p in Blocks().parameters())
    for replicas in (1, 2, 4):
        held = [rank["held"][replicas] for rank in ranks]
        assert sum(held) == size * replicas
        assert max(held) < 1.6 * size * replicas / WORLD  # rows of small matrices do not divide evenly


def test_the_blocks_are_told(ranks: list[dict[str, Any]]) -> None:
    facts = ranks[0]["facts"][2]
    assert {key: facts[key] for key in ("strategy", "replicas", "reshard", "world")} == {
        "strategy": "fsdp",
        "replicas": 2,
        "reshard": False,
        "world": WORLD,
    }
    assert facts["blocks"] == ["layers.0", "layers.1"]


def test_blocks_are_entries_of_lists_under_the_root() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList([nn.Linear(2, 2), nn.Identity()])
            self.deep = nn.Sequential(nn.Linear(2, 2))

    assert [name for name, _ in blocks(Nested())] == ["first.0"]


def test_one_process_is_left_alone() -> None:
    module = Blocks()
    assert FullyShard().apply(module, context(1)) is module
    assert type(module) is Blocks


def test_what_cannot_be_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "Choose one of 1, 2, 4" in ranks[0]["refused"]
    with pytest.raises(RequestError, match="no process group"):
        FullyShard().apply(Blocks(), context(2))
    with pytest.raises(RequestError, match="replicas = 2"):
        FullyShard(replicas=2).apply(Blocks(), context(1))


def test_the_declaration_and_its_options() -> None:
    (declared,) = [strategy for strategy in gem_parallel_strategies() if strategy.name == "fsdp"]
    assert (declared.stage, declared.on_meta) == ("dense", True)
    assert declared.options is not None
    options = load_object(declared.options)
    built = load_object(declared.load)(**options(replicas=1, reshard=False).model_dump())
    assert built.describe()["reshard"] is False
    for wrong in ({"replicas": 0}, {"replicas": True}, {"shards": 2}):
        with pytest.raises(ValidationError):
            options(**wrong)
