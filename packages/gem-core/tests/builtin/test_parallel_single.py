"""The strategy ``single``."""

import pytest
from torch import nn

from gem_core.builtin.parallel import SingleDevice
from gem_core.spec import ParallelContext, RequestError, Topology


def context(world: int) -> ParallelContext:
    return ParallelContext(rank=0, world=world, device="cpu", topology=Topology(world=world, device="cpu"))


def test_one_process_keeps_its_module() -> None:
    module = nn.Linear(2, 2)
    assert SingleDevice().apply(module, context(1)) is module


def test_several_processes_are_refused_with_the_way_out() -> None:
    with pytest.raises(RequestError, match="2 processes") as caught:
        SingleDevice().apply(nn.Linear(2, 2), context(2))
    assert "ddp" in caught.value.do


def test_describe_names_itself() -> None:
    assert SingleDevice().describe() == {"strategy": "single"}
