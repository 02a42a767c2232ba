"""The probe: what it records against the formula, what it leaves as it is, and what ``auto`` makes of it."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import RequestError
from gem_precision.cli import app
from gem_precision.formats import fake_quantize, find_format
from gem_precision.linear import rule_of
from gem_precision.presets import PRESETS
from gem_precision.probe.products import ProbedProducts
from gem_precision.probe.record import FILE, FORWARD, LEFT, RIGHT, Record, ratio, read_probe, worst
from gem_precision.recipes.auto import Auto
from gem_precision.recipes.probe import Probe


class Small(nn.Module):
    """Two linear layers, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.heads = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 1)
        self.slot = KernelSlot("jagged_attention", head_dim=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.back(self.wide(x).relu())[:, None]
        offsets = torch.tensor([0, 5, x.shape[0]])
        out = self.slot(x, x, x, offsets, offsets, max_q=x.shape[0], max_k=x.shape[0])
        return self.heads(out[:, 0])[:, 0]  # type: ignore[no-any-return]


@pytest.fixture
def model() -> Small:
    torch.manual_seed(0)
    return Small()


def bind(model: nn.Module) -> None:
    bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)


def probed(model: nn.Module, steps: int = 1) -> list[dict[str, Any]]:
    recipe = Probe()
    recipe.prepare(model, "cpu")
    bind(model)
    for step in range(steps):
        model(torch.randn(37, 32, generator=torch.Generator().manual_seed(step))).square().sum().backward()
    return recipe.record.rows()


def test_the_recorded_ratio_of_a_linear_layer_is_the_formulas() -> None:
    torch.manual_seed(1)
    x, weight, bias = torch.randn(37, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(48)
    record = Record()
    with ProbedProducts("site", record):
        out = nn.functional.linear(x, weight, bias)
    given = torch.randn(37, 48)
    out.backward(given)
    assert torch.equal(out, x @ weight.T + bias)
    torch.testing.assert_close(x.grad, given @ weight)
    torch.testing.assert_close(weight.grad, given.T @ x)

    def low(t: torch.Tensor, form: str) -> torch.Tensor:
        return fake_quantize(t.detach().contiguous(), find_format(form))

    preset = PRESETS["fp8_block"]
    products = {
        FORWARD: (low(x, preset.inputs) @ low(weight, preset.weights).T, x @ weight.T),
        LEFT: (low(given, preset.grads) @ low(weight.T, preset.weights).T, given @ weight),
        RIGHT: (low(given.T, preset.grads) @ low(x.T, preset.inputs).T, given.T @ x),
    }
    found = {row["product"]: row["sqnr"] for row in record.rows() if row["recipe"] == "fp8_block"}
    for product, (rounded, exact) in products.items():
        noise = float((rounded - exact).detach().double().square().sum())
        assert found[product] == pytest.approx(10 * math.log10(float(exact.detach().double().square().sum()) / noise), abs=0.05)


def test_a_probed_model_computes_as_before_and_evaluation_is_not_recorded(model: Small) -> None:
    x = torch.randn(37, 32)
    bind(model)
    with torch.no_grad():
        before = model(x)
    recipe = Probe()
    recipe.prepare(model, "cpu")
    bind(model)
    with torch.no_grad():
        assert torch.equal(model(x), before)
    assert recipe.record.rows() == []
    model(x).sum().backward()
    assert recipe.record.rows()


def test_every_site_outside_of_islands_is_recorded_for_each_product_and_recipe(model: Small) -> None:
    rows = probed(model, steps=2)
    assert {row["site"] for row in rows} == {"wide", "back", "model.slot"}
    assert {(row["product"], row["recipe"]) for row in rows if row["site"] == "back"} == {(p, r) for p in (FORWARD, LEFT, RIGHT) for r in PRESETS}
    assert {row["calls"] for row in rows if row["site"] == "wide"} == {2}
    assert {row["calls"] for row in rows if row["site"] == "model.slot"} == {4}  # two products a step
    by_recipe = worst(rows)["wide"]
    assert by_recipe["mxfp4_mlp"] < by_recipe["mxfp8"] - 6
    assert all(10 < value < 45 for name, value in by_recipe.items() if name != "mxfp4_mlp")


def test_ratios_that_are_none() -> None:
    assert ratio(1.0, 0.0) is None
    assert ratio(0.0, 0.0) is None
    assert ratio(1.0, math.nan) == -999.0
    assert ratio(100.0, 1.0) == pytest.approx(20.0)
    row = {"site": "a", "product": FORWARD, "recipe": "mxfp8", "calls": 1}
    assert worst([row | {"sqnr": None}]) == {"a": {"mxfp8": math.inf}}
    assert worst([row | {"sqnr": None}, row | {"sqnr": 3.0}, row | {"sqnr": 30.0}]) == {"a": {"mxfp8": 3.0}}


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """``wide`` bears both formats, ``back`` mxfp8 alone, attention neither."""
    figures = {"wide": (30.0, 31.0), "back": (20.0, 27.0), "model.slot": (10.0, 12.0)}
    rows = [
        {"site": site, "product": FORWARD, "recipe": recipe, "sqnr": value, "calls": 1}
        for site, values in figures.items()
        for recipe, value in zip(("fp8_block", "mxfp8"), values, strict=True)
    ]
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "rows": rows}))
    return tmp_path


def test_auto_takes_the_first_format_within_the_bound_and_says_why(model: Small, measured: Path) -> None:
    decided = {d.module: d for d in Auto(probe=measured, small=0).prepare(model, "cpu")}
    assert decided["wide"].format.startswith("fp8_e4m3_1x128")
    assert decided["wide"].reason.startswith("30.0 dB with fp8_block, 25 are asked")
    assert decided["back"].format == "mxfp8_e4m3"
    assert decided["model.slot"].reason == "25 dB are asked: 10.0 dB with fp8_block, 12.0 dB with mxfp8"
    assert model.slot.asked is None
    assert rule_of(model.heads) is None


def test_auto_leaves_what_the_probe_did_not_meet_and_lowers_attention_within_the_bound(model: Small, measured: Path) -> None:
    model.late = nn.Linear(32, 32)
    decided = {d.module: d for d in Auto(probe=measured / FILE, small=0, bound=11, formats=["mxfp8"]).prepare(model, "cpu")}
    assert decided["late"].reason == "the probe did not meet it"
    assert model.slot.asked == "mxfp8_emulated"


def test_a_probe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="gem precision sweep"):
        read_probe(tmp_path)
    (tmp_path / FILE).write_text('{"format": 2}')
    with pytest.raises(RequestError, match="another format"):
        Auto(probe=tmp_path)


def test_a_sweep_ranks_the_sites_of_a_run_and_auto_trains_on_it(tmp_path: Path) -> None:
    out = tmp_path / "probe"
    done = CliRunner().invoke(app, ["sweep", "-c", "toy", "--steps", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "precision.svg").read_text().lstrip().startswith("<?xml")
    ranked = worst(read_probe(out))
    assert ranked
    assert all(site in done.output for site in ranked)
