"""The quality guard: what it computes from scored rows, and the pairs that it trains."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from gem_core.spec import GemError, RequestError, RunFailed
from gem_precision.cli import app
from gem_precision.guard.compare import BLOCKS, Scored, compare
from gem_precision.guard.runs import Plan, read_predictions, run_pairs


def scored(seed: int = 0, *, noise: float = 0.0, shift: float = 0.0, rows: int = 4000) -> Scored:
    """Labels drawn from known odds; ``noise`` blurs the predictions, ``shift`` moves them all."""
    draw = np.random.default_rng(7)
    truth = draw.normal(-1, 1.5, rows)
    label = (draw.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float64)
    own = np.random.default_rng(seed)
    return Scored(truth + noise * own.normal(size=rows) + shift, label, np.ones(rows))


def ne_by_hand(run: Scored) -> float:
    total = loss = positive = 0.0
    for x, y, w in zip(run.logit, run.label, run.weight, strict=True):
        p = 1 / (1 + math.exp(-x))
        loss -= w * (y * math.log(p) + (1 - y) * math.log(1 - p)) if w else 0.0
        total, positive = total + w, positive + w * y
    rate = positive / total
    return loss / total / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


def test_case_G07_figures_equal_plain_loops() -> None:
    weight = np.random.default_rng(3).integers(0, 3, 4000).astype(np.float64)
    base, other = (replace(scored(noise=n), weight=weight) for n in (0.0, 0.4))
    got = compare("ctr", [base], [other])
    want = [ne_by_hand(run) for run in (base, other)]
    assert got.ne == pytest.approx(want, rel=1e-12)
    assert got.difference == pytest.approx(100 * (want[1] / want[0] - 1), rel=1e-9)
    assert got.low < got.difference < got.high
    predicted = [(run.weight / (1 + np.exp(-run.logit))).sum() for run in (base, other)]
    assert got.calibration == pytest.approx(100 * (predicted[1] / predicted[0] - 1), rel=1e-9)


def test_the_same_predictions_differ_by_nothing() -> None:
    got = compare("ctr", [scored()], [scored()])
    assert (got.difference, got.low, got.high, got.calibration, got.band) == (0.0, 0.0, 0.0, 0.0, None)
    assert got.holds


def test_a_breach_is_seen_and_noise_of_seeds_widens_the_limit() -> None:
    worse = compare("ctr", [scored()], [scored(noise=0.3)])
    assert worse.difference > worse.limit == 0.02
    assert not worse.holds
    seeds = [scored(seed, noise=0.5) for seed in (1, 2, 3)]
    wide = compare("ctr", seeds, [replace(run, logit=run.logit * 1.001) for run in seeds])
    assert wide.band is not None
    assert wide.limit == wide.band > 0.02
    assert wide.holds


def test_calibration_alone_breaches() -> None:
    got = compare("ctr", [scored(), scored(noise=0.4)], [scored(shift=0.01), scored(noise=0.4, shift=0.01)])
    assert abs(got.difference) <= got.limit
    assert got.calibration > 0.2
    assert not got.holds


def test_intervals_come_from_blocks_of_neighbours() -> None:
    """All the loss lies in one stretch of rows: a bootstrap over single rows would give a much narrower interval."""
    base = scored()
    logit = base.logit.copy()
    logit[: len(logit) // BLOCKS] += 2.0
    got = compare("ctr", [base], [replace(base, logit=logit)])
    assert got.high - got.low > 2 * abs(got.difference)


def test_few_rows_and_rows_without_weight() -> None:
    small = scored(rows=40)
    assert math.isfinite(compare("ctr", [small], [small]).difference)
    logit, weight = small.logit.copy(), small.weight.copy()
    logit[3], weight[3] = math.nan, 0.0  # not observed
    run = Scored(logit, small.label, weight)
    assert compare("ctr", [run], [run]).difference == 0.0


@pytest.mark.parametrize(
    ("baseline", "candidate", "so"),
    [
        ([], [], "0 runs against 0"),
        ([scored()], [scored(), scored()], "1 runs against 2"),
        ([scored()], [scored(rows=10)], "different rows"),
        ([scored()], [replace(scored(), label=1 - scored().label)], "different rows"),
        ([scored()], [replace(scored(), logit=np.full(4000, math.nan))], "4000 predictions"),
        ([replace(scored(), label=np.zeros(4000))], [replace(scored(), label=np.zeros(4000))], "one class"),
    ],
)
def test_what_cannot_be_compared_is_refused(baseline: list[Scored], candidate: list[Scored], so: str) -> None:
    with pytest.raises(RequestError, match=so):
        compare("ctr", baseline, candidate)


def plan(folder: Path, **changes: object) -> Plan:
    words = {"config": "toy", "recipe": "mxfp8", "against": "fp32", "seeds": [1], "overrides": ["train.max_steps=3"], "options": [], "folder": folder}
    return Plan(**{**words, **changes})  # type: ignore[arg-type]


def test_pairs_are_trained_once_and_compared(tmp_path: Path) -> None:
    """The command, then the same again: nothing is trained; then another configuration: refused."""
    words = ["guard", "-c", "toy", "--recipe", "mxfp8", "--against", "fp32", "--seeds", "1", "--set", "train.max_steps=3", "--option", "small=8"]
    first = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert first.exit_code in (0, 1), first.output
    assert first.output.count("training") == 2
    assert "one seed" in first.output
    content = json.loads((tmp_path / "guard.json").read_text())
    assert (content["recipe"], content["against"], content["seeds"]) == ("mxfp8", "fp32", [1])
    assert (first.exit_code == 0) == all(task["holds"] for task in content["tasks"])
    sides = [read_predictions(tmp_path / name / "predictions.npz") for name in ("fp32-1", "mxfp8-1")]
    assert sides[0].keys() == sides[1].keys()
    assert all(not np.array_equal(sides[0][task].logit, sides[1][task].logit) for task in sides[0])  # the formats do differ

    again = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert "training" not in again.output
    with pytest.raises(RequestError, match="another configuration"):
        run_pairs(plan(tmp_path, overrides=["train.max_steps=4"]), lambda text: None)


def test_a_run_that_fails_stops_the_guard_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="exit code 2"):
        run_pairs(plan(tmp_path, overrides=["train.max_stepz=3"]), lambda text: None)


@pytest.mark.parametrize(
    ("change", "so"), [({"seeds": [1, 1]}, "different seeds"), ({"seeds": []}, "one or more"), ({"against": "mxfp8"}, "against itself")]
)
def test_bad_plans(tmp_path: Path, change: dict[str, object], so: str) -> None:
    with pytest.raises(GemError, match=so):
        run_pairs(plan(tmp_path, **change), lambda text: None)


def test_seeds_that_are_no_numbers(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["guard", "-c", "toy", "--recipe", "mxfp8", "--seeds", "1,x", "--out", str(tmp_path)])
    assert isinstance(done.exception, RequestError)
