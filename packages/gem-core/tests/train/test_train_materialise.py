"""The weights of a model that was built on the meta device."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from gem_core.spec import PluginError
from gem_core.train.materialise import fill_weights

CPU = torch.device("cpu")
SEED = 3


class Model(nn.Module):
    """Two parts, and two buffers of which one is not saved."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, width), nn.Linear(4, 2)
        self.register_buffer("kept", torch.rand(2))
        self.register_buffer("unsaved", torch.rand(3), persistent=False)


def on_meta() -> Model:
    with torch.device("meta"):
        return Model()


def whole() -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    model = Model()
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def spread(module: nn.Module, mesh: DeviceMesh) -> None:
    """Put the parameters, still on the meta device, on every rank of a mesh, and on no other."""
    for name, p in list(module.named_parameters()):
        local = p.detach() if mesh.get_coordinate() is not None else torch.empty(0, device="meta")
        there = DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=p.shape, stride=p.stride())
        setattr(module, name, nn.Parameter(there))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process as the first of two whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_weights_and_buffers_depend_on_the_seed_alone() -> None:
    model, state = on_meta(), torch.random.get_rng_state()
    fill_weights(model, Model, CPU, SEED)
    assert torch.equal(torch.random.get_rng_state(), state)
    got = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert got.keys() == (want := whole()).keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.usefixtures("two_ranks")
def test_a_weight_on_ranks_that_are_not_this_one_stays_empty() -> None:
    model = on_meta()
    spread(model.first, DeviceMesh("cpu", [1], _init_backend=False))
    spread(model.second, DeviceMesh("cpu", [0]))
    fill_weights(model, Model, CPU, SEED)
    want = whole()
    assert {name: p.shape for name, p in model.named_parameters()} == {name: want[name].shape for name, _ in model.named_parameters()}
    assert all(p.to_local().numel() == 0 for p in model.first.parameters())
    assert all(torch.equal(p.to_local(), want[f"second.{name}"]) for name, p in model.second.named_parameters())


@pytest.mark.usefixtures("two_ranks")
def test_on_a_gpu_too_although_torch_puts_what_is_elsewhere_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is needed: fake tensors have devices and shapes, and no elements. Copying them would need CUDA, so what is copied is noted instead."""
    copied: list[tuple[torch.device, torch.Size, torch.Size]] = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, source: copied.append((to.device, to.shape, source.shape)))
    model = on_meta()
    spread(model.first, DeviceMesh("cuda", [1], _init_backend=False))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fill_weights(model, Model, torch.device("cuda", 0), SEED)
        assert {p.device.type for p in model.first.parameters()} == {"cpu"}, "torch has mended it: what stands in _laid_out is no longer so"
        filled = [*model.second.parameters(), *model.buffers()]
        assert all((torch.device("cuda", 0), tensor.shape, tensor.shape) in copied for tensor in filled)


def test_a_strategy_that_renames_is_refused() -> None:
    model = on_meta()
    model.third = model.second
    del model.second
    with pytest.raises(PluginError, match=r"different parameters or buffers: \['second\.bias', 'second\.weight', 'third\.bias'\]"):
        fill_weights(model, Model, CPU, SEED)


def test_a_strategy_that_adds_a_buffer_is_refused() -> None:
    model = on_meta()
    model.register_buffer("added", torch.ones(2, device="meta"))
    with pytest.raises(PluginError, match=r"buffers: \['added'\]"):
        fill_weights(model, Model, CPU, SEED)


def test_a_tensor_outside_of_parameters_and_buffers_is_refused() -> None:
    model = on_meta()
    model.first.scale = torch.ones(2, device="meta")
    with pytest.raises(PluginError, match="module 'first' keeps the tensor 'scale'"):
        fill_weights(model, Model, CPU, SEED)


def test_a_weight_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for first\.weight"):
        fill_weights(on_meta(), lambda: Model(width=6), CPU, SEED)
