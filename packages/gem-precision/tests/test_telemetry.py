"""Telemetry of low-precision operands: figures against the formula, and the file of a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gem_precision import telemetry
from gem_precision.formats import fake_quantize, find_format
from gem_precision.plugin import gem_step_finished
from gem_precision.recipes.low_precision import LowPrecision
from gem_precision.telemetry import FILE, Telemetry


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "latest", [])


def watched(recipe: str = "fp8_rowwise") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    LowPrecision(recipe, small=0, telemetry=True).prepare(model, "cpu")
    return model


def rows() -> dict[tuple[str, str], dict[str, float]]:
    return {(row["site"], row["role"]): row for row in telemetry.latest[0].close()}


def test_figures_are_those_of_the_operands() -> None:
    model = watched()
    x = torch.randn(40, 64) * torch.logspace(-8, 0, 64)  # small columns are lost beside the large ones of their row
    model(x).sum().backward()
    found = rows()
    # nobody asks for the gradient of x, so the first layer's output gradient is rounded for the weights alone, along the other axis
    assert set(found) == {(site, role) for site in "01" for role in ("inputs", "weights", "grads")} - {("0", "grads")}
    low = fake_quantize(x, find_format("fp8_e4m3_row"))
    row = found["0", "inputs"]
    noise, signal = ((low - x).double().square().sum(), x.double().square().sum())
    assert row["sqnr"] == pytest.approx(float(10 * torch.log10(signal / noise)), abs=1e-6)
    assert row["amax"] == float(x.abs().max())
    assert row["underflow"] == pytest.approx(float(((low == 0) & (x != 0)).double().mean()))
    assert row["underflow"] > 0.1
    assert 1 / 64 <= row["saturated"] < 1 / 32  # the largest of each row is the largest element, and what rounds to it
    assert found["1", "grads"]["underflow"] == 0


def test_windows_add_up_and_end_and_evaluation_is_not_seen() -> None:
    model = watched()
    small, large = torch.ones(4, 64), torch.full((4, 64), 8.0)
    for x in (small, large):
        model(x).sum().backward()
    assert rows()["0", "inputs"]["amax"] == 8.0
    model.eval()
    with torch.no_grad():
        model(torch.full((4, 64), 100.0))
    assert rows() == {}
    model.train()
    model(small).sum().backward()
    assert rows()["0", "inputs"]["amax"] == 1.0


def test_what_is_not_finite_is_no_error_of_its_own() -> None:
    seen = Telemetry()
    from gem_precision.formats import quantize

    x = torch.tensor([[1.0, float("inf")], [2.0, 3.0]])
    seen.watcher("a")("inputs", x, quantize(x, find_format("fp8_e4m3_row")))
    (row,) = seen.close()
    assert row["sqnr"] == -999.0
    assert json.loads(json.dumps(row))["amax"] == float("inf")


def test_rank_0_writes_a_line_an_operand_at_logging_steps(tmp_path: Path) -> None:
    model = watched()

    def finished(step: int, rank: int = 0, *, on: bool = True) -> None:
        run = SimpleNamespace(folder=tmp_path, rank=rank, config={"precision": {"options": {"telemetry": on}}})
        gem_step_finished(run=run, step=SimpleNamespace(step=step))  # type: ignore[arg-type]

    finished(1)  # nothing was seen yet
    for step in (2, 3):
        model(torch.randn(4, 64)).sum().backward()
        finished(step, rank=1)
        finished(step, on=False)
        finished(step)
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2] * 5 + [3] * 5
    assert {line["role"] for line in lines} == {"inputs", "weights", "grads"}
