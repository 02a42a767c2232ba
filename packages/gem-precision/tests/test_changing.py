"""A recipe that goes on while a run trains: switches, the guard's actions, ramps, and what a checkpoint keeps."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import LOW_WEIGHTS, TOKEN_LINEAR, ChangingPrecision, PairedSums, PrecisionNews, Recordable, RequestError
from gem_precision import telemetry
from gem_precision.backends import LinearBackend
from gem_precision.formats import fake_quantize, find_format
from gem_precision.guard.records import FILE, read_lines
from gem_precision.guard.window import LEAST
from gem_precision.linear import rule_of
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.presets import PRESETS
from gem_precision.probe.record import FILE as PROBE
from gem_precision.recipes.low_precision import Lowering, LowPrecision
from gem_precision.switches import Switch

FORM = find_format("mxfp8_e4m3")


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside this package, high means the reference here."""
    monkeypatch.setenv("GEM_KERNELS_PREFER", "reference")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)
        self.slot = KernelSlot("jagged_attention", head_dim=16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two(torch.relu(self.one(x))).view(-1, 4, 16)
        offsets = torch.tensor([0, len(h)])
        out: Tensor = self.slot(h, h, h, offsets, offsets, max_q=len(h), max_k=len(h))
        return x + out.reshape(-1, 64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def made(**options: Any) -> tuple[Model, LowPrecision]:
    torch.manual_seed(0)
    model, recipe = Model(), LowPrecision("mxfp8", small=0, **options)
    recipe.prepare(model, "cpu")
    bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
    return model, recipe


def rows() -> Tensor:
    return torch.randn(6, 64, generator=torch.Generator().manual_seed(5))


SITES = [f"layers.{i}.{name}" for i in (0, 1) for name in ("slot", "one", "two")]


def feed(recipe: LowPrecision, step: int, rise: float, noise: Sequence[float] | None = None, folder: Path | None = None) -> PrecisionNews:
    """A pair with a relative rise of the loss; ``noise`` is the share that each site's low result adds to a row."""
    assert recipe.begin_step(step)
    pairs = {"ctr": PairedSums(weight=100.0, positive=30.0, predicted=(30.0, 30.0), loss=(60.0, 60.0 * (1 + rise)))}
    sums = [value for energy in noise or [0.1] * len(SITES) for value in (1.0, energy)]
    return recipe.observe(step, pairs, sums, folder)


def states(recipe: LowPrecision) -> dict[str, bool]:
    return {name: switch.low for name, switch in recipe._switches.items()}


def test_the_recipes_have_the_optional_methods() -> None:
    assert isinstance(LowPrecision("mxfp8"), ChangingPrecision)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"guard": GuardOptions(every=1)}, "its guard computes some steps twice"),
        ({"ramp": RampOptions(start=3)}, "its ramp turns sites low by the step"),
        ({"telemetry": True}, "its telemetry looks at the operands of each call"),
        ({}, "layers.0.slot is emulated, and emulations are not recorded"),
        ({"emulate": False}, None),
    ],
)
def test_what_a_recording_would_leave_out_is_told(options: dict[str, Any], why: str | None) -> None:
    _, recipe = made(**options)
    assert isinstance(recipe, Recordable)
    assert recipe.not_recordable() == why


def test_a_recipe_by_native_kernels_can_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    native = LinearBackend(name="native", recipe="mxfp8", load="gem_precision.linear:emulated_linear")
    for backend, why in ((native, None), (replace(native, emulated=True), "layers.0.one is emulated, and emulations are not recorded")):
        lowering = Lowering("mxfp8", PRESETS["mxfp8"].rule(), "mxfp8", backend)
        monkeypatch.setattr(LowPrecision, "choose", lambda recipe, site, how=lowering: how if site.name == "layers.0.one" else "not this one")
        _, recipe = made()
        assert recipe.not_recordable() == why


def test_without_guard_and_ramp_nothing_is_wrapped_or_paired() -> None:
    model, recipe = made()
    assert states(recipe) == {}
    assert not recipe.begin_step(1)
    assert "switch" not in vars(vars(model.layers[0].one)["forward"])


def test_high_is_the_model_without_the_recipe_and_low_with_it() -> None:
    x = rows()
    model, recipe = made(guard=GuardOptions(every=1))
    plain, _ = Model(), torch.manual_seed(0)
    plain.load_state_dict(model.state_dict())
    unguarded, _ = made()
    assert sorted(states(recipe)) == sorted(SITES)
    assert rule_of(model.layers[0].one) is not None
    with torch.no_grad():
        assert torch.equal(model(x), unguarded(x))
        with recipe.high():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), unguarded(x))  # low again
    assert not torch.equal(model(x), plain(x))


class Each(nn.Module):
    """A linear map of its own for each of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        setattr(type(self), TOKEN_LINEAR, True)
        self.weight, self.bias = nn.Parameter(torch.randn(2, 32, 64)), nn.Parameter(torch.randn(2, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,tio->bto", x, self.weight) + self.bias


def test_a_map_for_each_token_can_be_high_too() -> None:
    model, x = nn.Sequential(Each()), torch.randn(5, 2, 32)
    recipe = LowPrecision("mxfp8", small=0, guard=GuardOptions(every=1))
    recipe.prepare(model, "cpu")
    assert list(states(recipe)) == ["0"]
    exact = Each.forward(model[0], x)
    with torch.no_grad(), recipe.high():
        assert torch.equal(model(x), exact)
    rows, share = recipe.sums()
    assert rows == 10
    assert 1e-4 < share / rows < 1e-2
    assert not torch.equal(model(x), exact)


def test_high_measures_what_each_site_alone_would_add() -> None:
    """Inputs are those of the high pass, so that one site's noise is not another's."""
    x = rows()
    model, recipe = made(guard=GuardOptions(every=1))
    with torch.no_grad(), recipe.high():
        model(x)
    measured = dict(zip(recipe._switches, zip(*(iter(recipe.sums()),) * 2, strict=True), strict=True))
    layer = model.layers[0].one
    exact = (x @ layer.weight.T + layer.bias).detach().double()
    low = (fake_quantize(x, FORM) @ fake_quantize(layer.weight.detach(), FORM).T + layer.bias).detach().double()
    shares = (low - exact).square().sum(1) / exact.square().sum(1)
    assert measured["layers.0.one"] == pytest.approx((6, float(shares.sum())), rel=1e-3)
    assert {name: rows for name, (rows, _) in measured.items()} == {name: 24 if name.endswith("slot") else 6 for name in measured}
    assert all(0 < share < rows for rows, share in measured.values())
    assert set(recipe.sums()) == {0.0}  # taken


def test_small_rows_that_are_lost_show() -> None:
    """One scale a tensor beside a row a million times larger: the energies of all rows together would say 30 dB and more."""
    switch = Switch("a")
    switch.comparing = True
    exact = torch.cat([torch.full((1, 8), 1e6), torch.ones(7, 8), torch.zeros(2, 8)])
    low = exact.clone()
    low[1:] = 0.0
    low[0] *= 1.01
    assert switch(lambda: low, lambda: exact) is exact
    assert switch.take() == pytest.approx((8, 7 + 1e-4), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_taken_for_a_lost_row(bad: float) -> None:
    switch = Switch("a")
    switch.comparing = True
    switch(lambda: torch.full((2, 2), bad), lambda: torch.ones(2, 2))
    assert not math.isfinite(switch.take()[1])


def test_gradients_of_low_passes_are_those_of_an_unguarded_recipe() -> None:
    x = rows()
    guarded, recipe = made(guard=GuardOptions(every=1))
    unguarded, _ = made()
    with torch.no_grad(), recipe.high():
        guarded(x)
    for model in (guarded, unguarded):
        model(x).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(guarded.parameters(), unguarded.parameters(), strict=True))


def test_telemetry_does_not_see_the_first_pass_of_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "latest", [])
    model, recipe = made(guard=GuardOptions(every=1), telemetry=True)
    with torch.no_grad(), recipe.high():
        model(rows())
    assert telemetry.latest == []
    model(rows())
    assert len(telemetry.latest[0].close()) == 8  # inputs and weights of four layers


def test_steps_are_paired_every_so_often_and_only_if_a_site_is_low() -> None:
    _, recipe = made(guard=GuardOptions(every=3), ramp=RampOptions(start=7))
    assert [step for step in range(1, 13) if recipe.begin_step(step)] == [9, 12]


def test_case_G03_a_warning_is_given_once_a_breach(tmp_path: Path) -> None:
    _, recipe = made(guard=GuardOptions(every=2, pairs=8))
    said = [feed(recipe, 2 * i, 1e-2 if i < 10 or i >= 30 else -1e-2, folder=tmp_path).say for i in range(1, 40)]
    told = [i for i, text in enumerate(said, 1) if text]
    assert told[0] == LEAST
    assert len(told) == 2
    assert "1.000 %" in (said[LEAST - 1] or "")
    records = read_lines(tmp_path / FILE)
    assert [r["step"] for r in records] == [2 * i for i in range(1, 40)]
    assert [r["action"] for r in records].count("warn") == 2
    assert states(recipe) == dict.fromkeys(states(recipe), True)


def test_case_G03_the_worst_site_falls_back_one_at_a_time_until_it_holds(tmp_path: Path) -> None:
    model, recipe = made(guard=GuardOptions(every=1, on_breach="fallback"))
    names = list(recipe._switches)
    noise = [0.01] * 6
    noise[names.index("layers.1.two")], noise[names.index("layers.0.slot")] = 0.5, 0.4
    news = [feed(recipe, step, 1e-2, noise, tmp_path) for step in range(1, LEAST + 1)]
    assert [n.say is not None for n in news] == [False] * (LEAST - 1) + [True]
    assert [name for name, low in states(recipe).items() if not low] == ["layers.1.two"]
    decided = {d.module: d for d in recipe.decisions()}
    assert decided["layers.1.two"].format == "fp32"
    assert "3.0 dB" in decided["layers.1.two"].reason
    assert f"step {LEAST}" in decided["layers.1.two"].reason
    assert decided["layers.0.slot"].format == "mxfp8_e4m3"
    # earlier pairs are of other formats, so the next site needs as many again; a site that is high is not chosen twice
    for step in range(LEAST + 1, 2 * LEAST + 1):
        feed(recipe, step, 1e-2, noise, tmp_path)
    assert [name for name, low in states(recipe).items() if not low] == ["layers.0.slot", "layers.1.two"]
    for step in range(2 * LEAST + 1, 4 * LEAST):
        assert feed(recipe, step, 0.0, noise, tmp_path).say is None  # it holds
    assert [r["site"] for r in read_lines(tmp_path / FILE) if r["action"]] == ["layers.1.two", "layers.0.slot"]
    x = rows()
    with torch.no_grad():
        layer = model.layers[1].two
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_when_every_site_has_fallen_back_nothing_is_paired() -> None:
    model, recipe = made(guard=GuardOptions(every=1, on_breach="fallback"))
    step = 0
    while any(states(recipe).values()):
        step += 1
        feed(recipe, step, 1e-2)
        assert step <= LEAST * len(SITES)
    assert not recipe.begin_step(step + 1)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(rows()), plain(rows()))


def test_noise_that_is_not_finite_is_the_worst_and_none_the_least() -> None:
    _, recipe = made(guard=GuardOptions(every=1, on_breach="fallback"))
    for step in range(1, LEAST + 1):
        feed(recipe, step, 1e-2, [0.0, 0.0, 0.0, 0.0, float("nan"), 0.2])
    assert [name for name, low in states(recipe).items() if not low] == [list(states(recipe))[4]]


def test_stop_gives_the_reason() -> None:
    _, recipe = made(guard=GuardOptions(every=1, on_breach="stop"))
    news = [feed(recipe, step, 1e-2) for step in range(1, LEAST + 1)]
    assert news[-1].stop is not None
    assert "normalised entropy of 'ctr' is 1.000 % higher" in news[-1].stop
    assert all(n.stop is None for n in news[:-1])


def test_records_are_plain() -> None:
    _, recipe = made(guard=GuardOptions(every=1))
    json.dumps(dict(feed(recipe, 1, 1e-3, [0.0, 0.1, 0.1, 0.1, 0.1, float("inf")]).record), allow_nan=False)


def test_a_ramp_turns_sites_low_and_says_so() -> None:
    _, recipe = made(ramp=RampOptions(start=3))
    assert not any(states(recipe).values())  # before the first step, too
    low = {}
    for step in (1, 2, 3, 4):
        recipe.begin_step(step)
        low[step] = any(states(recipe).values())
    assert low == {1: False, 2: False, 3: True, 4: True}
    decided = {d.module: d for d in recipe.decisions()}
    assert decided["layers.0.one"].reason.endswith("fp32 before step 3")
    assert decided["layers.0.one"].format == "mxfp8_e4m3"


def test_pairs_of_fewer_low_sites_are_forgotten_when_a_ramp_goes_on(tmp_path: Path) -> None:
    (tmp_path / PROBE).write_text(json.dumps({"format": 1, "rows": []}))
    _, recipe = made(guard=GuardOptions(every=1), ramp=RampOptions(start=1, end=51, probe=tmp_path))
    counts = [feed(recipe, step, 0.0, [0.1] * 6).record["tasks"]["ctr"]["pairs"] for step in range(1, 23)]
    assert counts == [*range(1, 11), *range(1, 11), 1, 2]  # a site more at 11 and at 21


def test_a_resumed_recipe_goes_on_as_it_was(tmp_path: Path) -> None:
    """State after six pairs and one fallback, through JSON: verdicts, sites and ramp are those of the recipe that went on."""
    (tmp_path / PROBE).write_text(json.dumps({"format": 1, "rows": []}))
    options: dict[str, Any] = {
        "guard": GuardOptions(every=1, on_breach="fallback"),
        "ramp": RampOptions(start=1, end=151, probe=tmp_path),
    }
    (_, first), (_, second) = made(**options), made(**options)
    for step in range(31, 31 + LEAST):
        feed(first, step, 1e-2, [0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    state = json.loads(json.dumps(first.state_dict()))
    assert len(state["fallen"]) == 1
    (tmp_path / PROBE).unlink()  # the ramp was laid out when the run began
    second.load_state_dict(state)
    assert states(second) == states(first)
    assert second.decisions() == first.decisions()
    for step in range(31 + LEAST, 31 + 2 * LEAST - 1):
        assert feed(second, step, 1e-2).record == feed(first, step, 1e-2).record
    assert states(second) == states(first)
    assert second.state_dict() == first.state_dict()


def test_other_options_can_be_evaluated_on_a_state() -> None:
    _, first = made(guard=GuardOptions(every=1, on_breach="fallback"))
    for step in range(1, LEAST + 1):
        feed(first, step, 1e-2)
    _, other = made()
    other.load_state_dict(first.state_dict())
    assert states(other) == {}


def test_the_last_layers_stay_high() -> None:
    torch.manual_seed(0)
    decided = {d.module: d for d in LowPrecision("mxfp8", small=0, keep_last=1).prepare(Model(), "cpu")}
    assert {name: decided[name].format for name in SITES} == {name: "mxfp8_e4m3" if ".0." in name else "fp32" for name in SITES}
    assert "keep_last" in decided["layers.1.slot"].reason


@pytest.mark.parametrize("options", [{"guard": GuardOptions(every=5)}, {"ramp": RampOptions(start=5)}])
def test_a_guard_of_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="no site of this model is in low precision"):
        LowPrecision("mxfp8", small=4096, **options).prepare(Model(), "cpu")


def test_weights_of_layers_that_may_be_high_travel_as_they_are() -> None:
    (plain, _), (guarded, _), (ramped, _) = made(), made(guard=GuardOptions(every=1)), made(ramp=RampOptions(start=2))
    assert hasattr(plain.layers[0].one, LOW_WEIGHTS)
    assert not any(hasattr(model.layers[0].one, LOW_WEIGHTS) for model in (guarded, ramped))


def test_switches_change_no_parameter_and_no_name() -> None:
    guarded, _ = made(guard=GuardOptions(every=1))
    assert list(guarded.state_dict()) == list(Model().state_dict())
