"""Strategy ``activations`` on a CUDA device: the bits of the plain model, and memory that is really given back."""

from typing import Any

import pytest
import torch
from test_memory_activations import DIM, Model, rules
from torch import Tensor

from gem_core.spec import ParallelContext, Topology
from gem_parallel.memory.activations import Activations

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = 4096


def rows(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step)).cuda()


def train(**options: Any) -> tuple[list[float], list[Tensor], int]:
    """Losses, weights, and bytes allocated after the last forward beyond those before it."""
    torch.manual_seed(1)
    model = Model().cuda()
    if options:
        Activations(**options).apply(model, ParallelContext(rank=0, world=1, device="cuda:0", topology=Topology(world=1, device="cuda")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    losses, held = [], 0
    for step in range(4):
        optimizer.zero_grad()
        batch = rows(step)
        before = torch.cuda.memory_allocated()
        loss = model(batch).square().mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, [p.detach().cpu() for p in model.parameters()], held


@pytest.mark.parametrize(("policy", "share"), [("recompute", 0.1), ("offload", 0.35), ("fp8", 0.6)])
def test_policies_give_the_bits_of_the_plain_model_and_memory_back(policy: str, share: float) -> None:
    """The copies run beside computing: bits would differ if a buffer were given out or read too early. Masks of dropout stay where they are."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    losses, weights, held = train()
    assert held > 4 * 4 * ROWS * ROWS  # a softmax a layer, and more
    got = train(policies=rules(("*", policy)))
    torch.use_deterministic_algorithms(mode=False)
    assert got[2] < share * held
    if policy != "fp8":
        assert got[0] == losses
        assert all(torch.equal(a, b) for a, b in zip(got[1], weights, strict=True))


def test_a_plan_on_the_gpu_keeps_its_budget() -> None:
    _, _, held = train()
    _, _, planned = train(budget=0.5 * held / 1e9)
    assert planned < 0.55 * held


def test_the_report_stands_beside_the_allocator() -> None:
    torch.manual_seed(1)
    model, strategy = Model().cuda(), Activations(policies=rules(("layers.[12]", "offload")))
    strategy.apply(model, ParallelContext(rank=0, world=1, device="cuda:0", topology=Topology(world=1, device="cuda")))
    batch = rows(0)
    told = strategy.memory_report(model, lambda: model(batch).square().mean())
    for block in told.blocks:
        assert block.measured == pytest.approx(block.held, rel=0.05, abs=8 * ROWS * DIM)
    assert told.measured_peak is not None
    assert told.peak <= told.measured_peak * 1.05
