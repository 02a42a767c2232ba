"""Low-precision layers inside compiled blocks: the same numbers, and no more graphs for it, however sites and sizes of batches change."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.recipes.low_precision import LowPrecision
from gem_precision.switches import SwitchedForward

SIZES = (12, 20, 7, 31, 16, 25, 9)
"""Rows of the batches: each another number."""

LAYERS, PIECES, KINDS = 2, 5, 2
"""Layers of the model; what its three sites leave of one; and kinds of batches: of the first one's rows, and of any number."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is installed beside this package, high means the reference here; a compilation over the bound fails, where torch says nothing."""
    monkeypatch.setenv("GEM_KERNELS_PREFER", "reference")
    torch._dynamo.reset()
    bound: Any = torch._dynamo.config.patch(recompile_limit=16, fail_on_recompile_limit_hit=True)
    with bound:
        yield
    torch._dynamo.reset()


class Fused(nn.Module):
    """A matmul fused with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.slot = KernelSlot("norm_linear", features=("rms", "before"))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.slot(torch.sin(x), self.weight * 2.0, None, norm="rms", where="before")
        return torch.tanh(out)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.fused = nn.Linear(32, 64), nn.Linear(64, 32), Fused()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fused(self.two(torch.relu(self.one(x.exp())) * 2).sigmoid())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Counted:
    """A backend that runs graphs as they were traced, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return module.forward


def made(preset: str, **options: Any) -> tuple[Model, LowPrecision]:
    torch.manual_seed(0)
    model, recipe = Model(), LowPrecision(preset, small=0, **options)
    recipe.prepare(model, "cpu")
    bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
    return model, recipe


Act = Callable[[LowPrecision, int], None]


def trained(preset: str, compiled: bool, after: Act | None = None, **options: Any) -> tuple[list[float], int]:
    """Losses of a few steps on batches of different sizes, and how many graphs they took. A paired step's high pass comes first."""
    model, recipe = made(preset, **options)
    counted, optimizer = Counted(), torch.optim.SGD(model.parameters(), lr=0.05)
    for layer in model.layers if compiled else ():
        layer.compile(backend=counted)
    losses = []
    for step, size in enumerate(SIZES, start=1):
        x = torch.randn(size, 32, generator=torch.Generator().manual_seed(step))
        if recipe.begin_step(step):
            with torch.no_grad(), recipe.high():
                losses.append(float(model(x).square().mean()))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        recipe.weights_changed()
        losses.append(float(loss.detach()))
        if after is not None:
            after(recipe, step)
    return losses, counted.graphs


def fall(recipe: LowPrecision, step: int) -> None:
    """A site more is high after each step, as when a guard finds its format too costly."""
    recipe._fallen[list(recipe._switches)[step % len(recipe._switches)]] = "too costly"


CASES = [("fp8_block", {"telemetry": True}), ("mxfp8", {"ramp": RampOptions(start=4)})]


@pytest.mark.parametrize(("preset", "options"), CASES, ids=["fp8_block", "mxfp8-ramp"])
def test_losses_are_those_of_a_run_without_compiling_and_graphs_are_bounded(preset: str, options: dict[str, Any]) -> None:
    want, none = trained(preset, False, **options)
    got, graphs = trained(preset, True, **options)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert none == 0
    assert LAYERS * PIECES <= graphs <= LAYERS * PIECES * KINDS


def test_sites_that_fall_back_take_no_graph() -> None:
    """Every step is paired, and the first six leave a site less in low precision."""
    options: dict[str, Any] = {"guard": GuardOptions(every=1)}
    (low, _), (want, _) = trained("mxfp8", False, **options), trained("mxfp8", False, fall, **options)
    got, graphs = trained("mxfp8", True, fall, **options)
    assert len(got) > len(SIZES)
    assert want[1] == low[1]  # the first step's own pass
    assert want[-1] != low[-1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert graphs <= 2 * LAYERS * PIECES * KINDS  # with gradients and without


def test_every_flip_of_a_switch_is_heeded_by_what_is_compiled() -> None:
    model, recipe = made("mxfp8", guard=GuardOptions(every=1))
    plain, x = Model(), torch.randn(6, 32)
    plain.load_state_dict(model.state_dict())
    counted = Counted()
    for layer in model.layers:
        layer.compile(backend=counted)
    with torch.no_grad():
        low = model(x)
        once = counted.graphs
        for name in recipe._switches:
            recipe._switches[name].low = False
            assert not torch.equal(model(x), low), name
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-6)
        for switch in recipe._switches.values():
            switch.low = True
        assert torch.equal(model(x), low)
    assert counted.graphs == once, "flips took graphs"


def test_weights_are_held_although_blocks_are_compiled() -> None:
    """Rounded once for each value: the second of two passes finds what the first has made, and a step lets it go."""
    model, recipe = made("fp8_block")
    for layer in model.layers:
        layer.compile(backend="eager")
    recipe.weights_changed()
    held = vars(model.layers[0].one)["forward"].held
    with torch.no_grad():
        model(torch.ones(3, 32))
        first = held._made[False]
        model(torch.ones(3, 32))
        assert held._made[False] is first
        model.layers[0].one.weight.mul_(2.0)
        recipe.weights_changed()
        assert not held._made


def test_planted_fault_a_switch_that_the_compiler_sees_is_compiled_for_at_each_flip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwitchedForward, "__call__", vars(SwitchedForward)["__call__"]._torchdynamo_orig_callable)
    with pytest.raises(AssertionError, match="graphs"):
        test_every_flip_of_a_switch_is_heeded_by_what_is_compiled()
