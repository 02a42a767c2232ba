"""Weights that are rounded once for each of their values: how often, when again, and that no bit of a result changes."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import LOW_WEIGHTS
from gem_precision import weights
from gem_precision.formats import FORMATS, Format, Quantized, find_format, quantize
from gem_precision.linear import LinearRule, lower
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.presets import PRESETS
from gem_precision.recipes.low_precision import LowPrecision
from gem_precision.weights import HeldWeight

RULES = {
    **{name: preset.rule() for name, preset in PRESETS.items()},
    "square mx": LinearRule(**dict.fromkeys(("inputs", "weights", "grads"), find_format("mxfp8_e4m3_32x32"))),
    "turned": replace(PRESETS["mxfp8"].rule(), hadamard=1),
}
SIDES = {"fp8_block": 1, "fp8_square": 1, "fp8_naive": 1, "square mx": 1}
"""How often a weight is rounded for its forward product and its input gradient, where it is not twice: blocks of these are square."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the weights that were rounded."""
    seen: list[tuple[int, ...]] = []

    def count(x: Tensor, form: Format, **words: Any) -> Quantized:
        seen.append(tuple(x.shape))
        return quantize(x, form, **words)

    monkeypatch.setattr(weights, "quantize", count)
    return seen


def layer(rule: LinearRule, holds: bool = True) -> nn.Linear:
    torch.manual_seed(5)
    low = nn.Linear(96, 160)
    lower(low, rule)
    if not holds:
        vars(low)["forward"].held = Forgetful(rule.weights, rule.hadamard)
    return low


class Forgetful(HeldWeight):
    """Holds nothing: what a layer did before it held its weight."""

    def get(self, weight: Tensor, name: object, make):  # type: ignore[no-untyped-def]
        return make(weight)


def steps(low: nn.Linear, micro: int = 3, told: bool = False) -> list[Tensor]:
    """Two optimiser steps of several micro-batches, an evaluation between them, and activation checkpointing in some; everything that came out.

    Args:
        told: say when the weights change, as the trainer does.
    """
    generator, out = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(low.parameters(), lr=0.01)
    for _ in range(2):
        if told:
            vars(low)["forward"].held.changed()
        for batch in range(micro):
            x = torch.randn(9, 96, generator=generator).requires_grad_()
            y = checkpoint(low, x, use_reentrant=False) if batch % 2 else low(x)
            assert y is not None
            y.square().sum().backward()
            out += [y.detach(), x.grad]
        with torch.no_grad():
            out.append(low(torch.randn(4, 96, generator=generator)))
        optimizer.step()
        optimizer.zero_grad()
    return [*out, *(p.detach() for p in low.parameters())]


@pytest.mark.parametrize("name", RULES)
def test_a_weight_is_rounded_once_for_each_value_and_no_bit_changes(name: str, counted: list[tuple[int, ...]]) -> None:
    want = steps(layer(RULES[name], holds=False))
    every = len(counted)
    counted.clear()
    got = steps(layer(RULES[name]), told=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(counted) == 2 * SIDES.get(name, 2)
    assert every > 3 * len(counted), "the count sees a layer that holds nothing"


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_where_nobody_says_when_weights_change_each_forward_pass_rounds_anew(name: str, counted: list[tuple[int, ...]]) -> None:
    """Two steps of three micro-batches, one of them computed twice, and an evaluation; backward shares what its forward rounded."""
    want = steps(layer(RULES[name], holds=False))
    counted.clear()
    got = steps(layer(RULES[name]))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    forward, backward = 2 * (3 + 1 + 1), 2 * 3
    assert len(counted) == forward + (backward if name == "mxfp8" else 0)


def test_every_way_to_change_a_weight_is_seen(counted: list[tuple[int, ...]]) -> None:
    low, x = layer(RULES["fp8_block"]), torch.randn(3, 96)
    vars(low)["forward"].held.changed()

    def anew() -> bool:
        before = len(counted)
        low(x)
        return len(counted) > before

    assert anew()
    assert not anew()
    with torch.no_grad():
        low.weight.mul_(2.0)
    assert anew()
    low.load_state_dict({"weight": torch.zeros(160, 96), "bias": torch.zeros(160)})
    assert anew()
    low.weight.data = torch.ones(160, 96)
    assert anew()
    low.weight = nn.Parameter(torch.ones(160, 96))
    assert anew()
    vars(low)["forward"].held.drop()
    assert anew()
    with torch.inference_mode():
        low.weight = nn.Parameter(torch.ones(160, 96), requires_grad=False)
        assert anew()
        assert anew(), "a tensor of inference mode has no version: it is never held"


def test_copies_hold_nothing_of_the_original() -> None:
    low, x = layer(RULES["mxfp8"]), torch.randn(3, 96)
    low(x)
    for twin in (copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        assert vars(twin)["forward"].held._made == {}
        assert torch.equal(twin(x), low(x))


def test_a_recipe_drops_what_it_holds_when_it_is_told_of_new_weights(counted: list[tuple[int, ...]]) -> None:
    recipe, model = LowPrecision("fp8_block", small=0), nn.Sequential(nn.Linear(96, 160))
    recipe.prepare(model, "cpu")
    recipe.weights_changed()
    x = torch.randn(3, 96)
    model(x)
    model[0].weight.data.mul_(2.0)  # behind torch's back: no version is raised
    stale = model(x)
    recipe.weights_changed()
    assert not torch.equal(model(x), stale)
    assert len(counted) == 2


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(0, 140), st.integers(1, 140), st.integers(0, 99))
def test_a_symmetric_format_gives_both_sides_from_one(name: str, out: int, inputs: int, seed: int) -> None:
    """Any size, with a NaN and wide ranges: the transposed copy is what rounding the transposed weight gives."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, inputs, generator=generator) * 10 ** (3 * torch.randn(out, 1, generator=generator))
    if out > 3:
        weight[3, 0] = torch.nan
    form, held = FORMATS[name], HeldWeight(FORMATS[name])
    for transposed in (False, True):
        got = held.rounded(weight, transposed=transposed)
        want = quantize(weight.T if transposed else weight, form)
        assert torch.equal(got.dequantize().nan_to_num(nan=-7.0), want.dequantize().nan_to_num(nan=-7.0))
    assert len(held._made) == (1 if form.symmetric else 2)
    assert form.symmetric == name.endswith(("32x32", "128x128", "tensor"))


@pytest.mark.parametrize(("options", "travels"), [({}, True), ({"ramp": RampOptions(start=3)}, False), ({"guard": GuardOptions(every=2)}, False)])
def test_a_weight_that_may_be_read_high_does_not_travel_low(options: dict[str, Any], travels: bool) -> None:
    model = nn.Sequential(nn.Linear(96, 160))
    LowPrecision("fp8_block", small=0, **options).prepare(model, "cpu")
    assert (getattr(model[0], LOW_WEIGHTS, {}) == {"weight": vars(model[0])["forward"].held}) == travels


class Fused(nn.Module):
    """A matmul fused with a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = nn.Parameter(torch.randn(160, 96))
        self.slot = KernelSlot("norm_linear", features=("rms", "before"))

    def forward(self, x: Tensor) -> Tensor:
        return self.slot(x, self.weight.to(x.dtype), norm="rms", where="before")  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["fp8_block", "mxfp8"])
def test_a_matmul_fused_with_a_norm_holds_its_weight(name: str, counted: list[tuple[int, ...]]) -> None:
    """Two such layers; a weight that autocast would have copied is no parameter, and not held."""
    results = []
    for tell in (False, True):
        model, recipe = nn.ModuleList([Fused(), Fused()]), LowPrecision(name, small=0)
        recipe.prepare(model, "cpu")
        bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
        counted.clear()
        for step in range(2):
            if tell:
                recipe.weights_changed()
            for batch in range(3):
                for layer in model:
                    x = drawn(9, 96, seed=batch).requires_grad_()
                    layer(x).square().sum().backward()
                    results.append(x.grad)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5 + step)
        sides = SIDES.get(name, 2)
        assert len(counted) == 2 * 2 * sides * (1 if tell else 3)
    half = len(results) // 2
    assert all(torch.equal(a, b) for a, b in zip(results[:half], results[half:], strict=True))
    counted.clear()
    for _ in range(2):
        model[0](torch.ones(2, 96, dtype=torch.bfloat16))
    assert len(counted) == 2


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class OnGpu(Tensor):
    """Says that it is."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_graph_captures_is_made_of_the_weight_in_each_replay(monkeypatch: pytest.MonkeyPatch, capturing: bool) -> None:
    """What was held before would be read by every replay, whatever the weight is then."""
    weight, held, made = torch.ones(2, 2).as_subclass(OnGpu), HeldWeight(find_format("fp8_e4m3_128x128")), []
    for now in (False, capturing):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=now: now)
        held.get(weight, "cast", made.append)
    assert len(made) == (2 if capturing else 1)
