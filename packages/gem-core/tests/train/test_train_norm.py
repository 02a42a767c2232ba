"""Gradients that lie in shards on several meshes: their norm and the update, as one of four ranks sees them; no other rank exists."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gem_core.spec import RunFailed
from gem_core.train.optim import adamw, clip_gradients, global_norm

WORLD = 4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """What this rank adds to the sum of squares over ranks; three more ranks add 1 each."""
    added: list[float] = []

    def all_reduce(value: Tensor) -> None:
        added.append(float(value))
        value += 3

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    yield added
    dist.destroy_process_group()


def part(values: list[float], ranks: list[int], placements: list[Placement], shape: tuple[int, ...] | None = None) -> DTensor:
    """A tensor of which this rank holds ``values``, on a mesh of these ranks."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks).view(shape or (len(ranks),)), _init_backend=False)
    whole = torch.Size([8])
    made: DTensor = DTensor.from_local(torch.tensor(values), mesh, placements, run_check=False, shape=whole, stride=(1,))
    return made


def test_each_element_counts_once_wherever_it_lies(told: list[float]) -> None:
    gradients = [
        part([1.0, 2.0], [0, 1, 2, 3], [Shard(0)]),  # 5
        part([3.0], [0, 1, 2, 3], [Replicate(), Shard(0)], (2, 2)),  # 9, held by two
        part([4.0], [0, 2], [Shard(0)]),  # 16: an expert of ranks 0 and 2
        part([], [1, 3], [Shard(0)]),  # an expert of others
        torch.tensor([2.0, 2.0]),  # 8, held by all
    ]
    assert float(global_norm(gradients)) == pytest.approx((5 + 9 / 2 + 16 + 8 / 4 + 3) ** 0.5)
    assert told == [pytest.approx(5 + 9 / 2 + 16 + 8 / 4)]


def test_gradients_that_all_ranks_hold_need_no_other_rank(told: list[float]) -> None:
    assert float(global_norm([torch.tensor([3.0]), torch.tensor([4.0])])) == 5.0
    assert told == []


def test_shards_are_scaled_in_place(told: list[float]) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(part([3.0, 2.0], [0, 1, 2, 3], [Shard(0)]))
    module.elsewhere = nn.Parameter(part([], [1, 3], [Shard(0)]))
    module.weight.grad = part([3.0, 2.0], [0, 1, 2, 3], [Shard(0)])
    module.elsewhere.grad = part([], [1, 3], [Shard(0)])
    assert clip_gradients(module, 2.0) == pytest.approx(4.0)
    assert torch.allclose(module.weight.grad.to_local(), torch.tensor([1.5, 1.0]))  # type: ignore[union-attr]


def test_a_bad_shard_of_another_rank_is_named_here_too(told: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(into: list[list[str]], own: list[str]) -> None:
        into[0], into[3] = own, ["experts.3.weight"]

    def all_reduce(value: Tensor) -> None:
        value += torch.nan

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    module = nn.Module()
    module.weight = nn.Parameter(part([3.0], [0, 1, 2, 3], [Shard(0)]))
    module.weight.grad = part([3.0], [0, 1, 2, 3], [Shard(0)])
    with pytest.raises(RunFailed, match=r"not finite in 1 parameters: experts\.3\.weight"):
        clip_gradients(module, 0.0)


def test_a_tensor_of_other_ranks_keeps_no_other_from_its_update(told: list[float]) -> None:
    """torch updates a list of tensors by the mesh of its first; here the first lies elsewhere."""
    module = nn.Module()
    module.elsewhere = nn.Parameter(part([], [1, 3], [Shard(0)]))
    module.here = nn.Parameter(part([3.0], [0, 2], [Shard(0)]))
    module.plain = nn.Parameter(torch.tensor([3.0]))
    optimizer = adamw(module, lr=0.5, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    module.elsewhere.grad, module.here.grad = part([], [1, 3], [Shard(0)]), part([2.0], [0, 2], [Shard(0)])
    module.plain.grad = torch.tensor([2.0])
    optimizer.step()
    here: DTensor = module.here.detach()  # type: ignore[assignment]
    assert torch.allclose(here.to_local(), torch.tensor([2.5]))
    assert torch.equal(module.plain.detach(), here.to_local())
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}
    assert len(optimizer.state) == 3, "the first rank saves the count of steps for all"
