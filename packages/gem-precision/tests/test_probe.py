"""The probe: what it records against the formula, what it leaves as it is, and what ``auto`` makes of it."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import RequestError, RunInfo
from gem_precision import backends, weights
from gem_precision.backends import BACKENDS, Device, LinearBackend, LinearShape
from gem_precision.cli import app
from gem_precision.formats import fake_quantize, find_format, quantize
from gem_precision.linear import rule_of
from gem_precision.plugin import gem_run_finished, gem_run_started
from gem_precision.presets import PRESETS
from gem_precision.probe import times
from gem_precision.probe.products import ProbedProducts
from gem_precision.probe.record import FILE, FORWARD, LEFT, RIGHT, Record, all_times, ratio, read_probe, worst
from gem_precision.probe.times import time_sites
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


def timed(tmp_path: Path, **ms: float | None) -> Path:
    """The measured probe, with times of ``wide`` and ``back`` here."""
    known = {backend.name: backend for backend in BACKENDS}
    rows = []
    for site, sizes in {"wide": (32, 64), "back": (64, 32)}.items():
        for name, value in ms.items():
            backend = known.get(name)
            about = {"recipe": backend and backend.recipe, "emulated": bool(backend and backend.emulated), "measured": True, "why_not": []}
            rows.append({"site": site, "rows": 37, "inputs": sizes[0], "outputs": sizes[1], "backend": name, "ms": value, **about})
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "device": asdict(Device.here("cpu")), "times": rows}))
    return tmp_path


def decided(model: nn.Module, probe: Path, **options: Any) -> dict[str, str]:
    return {d.module: f"{d.format}: {d.reason}" for d in Auto(probe=probe, order="time", small=0, **options).prepare(model, "cpu")}


def test_auto_by_time_takes_the_fastest_within_the_bound_and_says_so(model: Small, measured: Path) -> None:
    """``wide`` bears both formats, ``back`` mxfp8 alone."""
    probe = timed(measured, high=3.0, fp8_block_emulated=1.0, mxfp8_emulated=2.0, fp8_naive_emulated=0.1)
    got = decided(model, probe)
    assert got["wide"].startswith("fp8_e4m3_1x128: ")
    assert (
        "fastest: 1 ms fp8_block_emulated, 2 ms mxfp8_emulated, 3 ms high; 30.0 dB with fp8_block, 25 are asked, by 'fp8_block_emulated'"
        in got["wide"]
    )
    assert got["back"].startswith("mxfp8_e4m3: fastest: 2 ms mxfp8_emulated, 3 ms high; 27.0 dB with mxfp8")
    assert "are emulations" in got["model.slot"]
    assert model.slot.asked is None


def test_auto_by_time_leaves_a_layer_that_is_fastest_as_it_is(model: Small, measured: Path) -> None:
    got = decided(model, timed(measured, high=0.5, fp8_block_emulated=1.0, mxfp8_emulated=None))
    assert got["wide"] == "fp32: fastest as it is: 0.5 ms high, 1 ms fp8_block_emulated"
    assert rule_of(model.wide) is None


def test_auto_by_time_takes_nothing_that_is_not_checked_on_its_hardware(model: Small, measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = LinearBackend(name="raw", recipe="fp8_block", load="gem_precision.linear:emulated_linear")
    monkeypatch.setattr(backends, "BACKENDS", (*BACKENDS, raw))
    assert "raw" not in decided(model, timed(measured, high=3.0, raw=0.01))["wide"]
    monkeypatch.setattr(backends, "BACKENDS", (*BACKENDS, replace(raw, measured=True)))
    torch.manual_seed(0)
    assert "by 'raw'" in decided(Small(), timed(measured, high=3.0, raw=0.01))["wide"]


def test_times_that_do_not_fit_are_not_used(model: Small, measured: Path) -> None:
    probe = timed(measured, high=3.0, fp8_block_emulated=1.0)
    content = json.loads((probe / FILE).read_text())
    for row in content["times"]:
        row["outputs"] += 1
    (probe / FILE).write_text(json.dumps(content))
    assert "with other sizes than 32 x 64" in decided(model, probe)["wide"]
    (probe / FILE).write_text(json.dumps({**content, "times": []}))
    torch.manual_seed(0)
    assert "did not time it" in decided(Small(), probe)["wide"]
    (probe / FILE).write_text(json.dumps({**content, "device": {"type": "cuda", "name": "NVIDIA H200", "arch": 90}}))
    with pytest.raises(RequestError, match=r"measured on NVIDIA H200 \(cuda\), and this run computes on .*order = 'given'"):
        decided(Small(), probe)
    (probe / FILE).write_text(json.dumps({"format": 1, "rows": content["rows"]}))
    with pytest.raises(RequestError, match="it has none"):
        decided(Small(), probe)


def test_every_way_is_timed_at_the_shape_of_the_site_or_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = LinearBackend(name="broken", recipe="fp8_block", load="gem_precision.presets:PRESETS")
    monkeypatch.setattr(times, "BACKENDS", (*BACKENDS, broken))
    monkeypatch.setattr(times, "BUDGET", 0.0)
    shape = LinearShape(rows=5, inputs=128, outputs=256)
    told = time_sites({"a": shape, "b": shape, "empty": LinearShape(rows=0, inputs=3, outputs=1)}, torch.device("cpu"), torch.float32)
    assert told["device"] == asdict(Device.here("cpu"))
    assert (told["dtype"], told["versions"]["torch"]) == ("float32", torch.__version__)
    rows = {(row["site"], row["backend"]): row for row in told["times"]}
    assert {name for _, name in rows} == {"high", "broken", *(backend.name for backend in BACKENDS)}
    for (site, name), row in rows.items():
        assert (row["ms"] is None) == bool(row["why_not"]), (site, name)
        assert row["ms"] is None or row["ms"] > 0
    assert {key: rows["a", "high"][key] for key in ("rows", "inputs", "outputs")} == {"rows": 5, "inputs": 128, "outputs": 256}
    assert rows["a", "mxfp8_emulated"]["emulated"]
    assert rows["a", "broken"]["why_not"][0].startswith("it failed: ")
    assert all(rows["b", name]["ms"] == rows["a", name]["ms"] for _, name in rows), "the same shape is timed once"
    assert "sm90" in rows["a", "fp8_block_native"]["why_not"][0]


def test_the_weight_is_rounded_in_each_timed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step, in which it has just changed."""
    rounded: list[tuple[int, ...]] = []
    monkeypatch.setattr(times, "BUDGET", 0.0)
    monkeypatch.setattr(times, "BACKENDS", tuple(backend for backend in BACKENDS if backend.name == "fp8_block_emulated"))
    monkeypatch.setattr(weights, "quantize", lambda x, form: rounded.append(tuple(x.shape)) or quantize(x, form))
    time_sites({"a": LinearShape(rows=2, inputs=8, outputs=16)}, torch.device("cpu"), torch.float32)
    assert rounded == [(16, 8)] * 2, "once before the clock, once under it"


def test_the_first_rank_alone_leaves_its_record(tmp_path: Path) -> None:
    for rank in (1, 0):
        info = RunInfo(folder=tmp_path, seed=1, config={"precision": {"recipe": "probe", "options": {}}}, kernels={}, rank=rank, world=2)
        gem_run_finished(run=info)
        assert (tmp_path / FILE).exists() == (rank == 0)


def test_a_probe_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="gem precision sweep"):
        read_probe(tmp_path)
    (tmp_path / FILE).write_text('{"format": 2}')
    with pytest.raises(RequestError, match="another format"):
        Auto(probe=tmp_path)


def test_a_sweep_ranks_and_times_the_sites_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "probe"
    done = CliRunner().invoke(app, ["sweep", "-c", "toy", "--steps", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert (out / "precision.svg").read_text().lstrip().startswith("<?xml")
    ranked = worst(read_probe(out))
    assert ranked
    assert all(site in done.output for site in ranked)
    assert "casts included" in done.output
    assert {row["backend"] for row in all_times(out)} >= {"high", "mxfp8_emulated"}


def test_a_run_by_a_probe_tells_what_it_has_chosen_and_keeps_it_for_the_next(
    measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once more with the kept one, as a resumed run does; other recipes keep nothing. Modules that are no sites are not told of."""
    told = [{"module": name, "format": "mxfp8_e4m3", "reason": f"so it is with {name}"} for name in ("wide", "norm")]

    def start(recipe: str, options: dict[str, str], rank: int = 0) -> Path:
        folder = tmp_path / f"{recipe}{rank}"
        folder.mkdir(exist_ok=True)
        (folder / "manifest.json").write_text(json.dumps({"precision": told}))
        config = {"precision": {"recipe": recipe, "options": options}}
        gem_run_started(run=RunInfo(folder=folder, seed=1, config=config, kernels={}, rank=rank, world=2))
        return folder

    run = start("auto", {"probe": str(measured)})
    assert read_probe(run) == read_probe(measured)
    printed = capsys.readouterr().out
    assert re.search(r"wide +mxfp8_e4m3 +so it is with wide", printed)
    assert "norm" not in printed
    assert start("auto", {"probe": str(run)}) == run
    assert read_probe(run) == read_probe(measured)
    assert not (start("auto", {"probe": str(measured)}, rank=1) / FILE).exists()
    assert not (start("mxfp8", {}) / FILE).exists()
