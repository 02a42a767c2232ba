"""The strategy ``ddp`` in one process; several ranks are in test_ranks.py."""

import pytest
import torch
from torch import nn

from gem_core.spec import STAGES, ParallelContext, RequestError, Topology, load_object
from gem_parallel import plugin
from gem_parallel.dense.ddp import DataParallel


def context(world: int) -> ParallelContext:
    return ParallelContext(rank=0, world=world, device="cpu", topology=Topology(world=world, device="cpu"))


def test_one_process_keeps_its_module() -> None:
    module = nn.Linear(2, 2)
    strategy = DataParallel()
    assert strategy.apply(module, context(1)) is module
    assert strategy.describe() == {"strategy": "ddp", "world": 1}


def test_several_ranks_without_a_process_group_are_refused() -> None:
    assert not torch.distributed.is_initialized()
    with pytest.raises(RequestError, match="no process group") as caught:
        DataParallel().apply(nn.Linear(2, 2), context(2))
    assert "torchrun" in caught.value.do


def test_declaration() -> None:
    (declared,) = (strategy for strategy in plugin.gem_parallel_strategies() if strategy.name == "ddp")
    assert declared.stage == "dense"
    assert declared.stage in STAGES
    assert load_object(declared.load) is DataParallel
