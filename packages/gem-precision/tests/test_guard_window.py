"""What a window of pairs says: figures against plain sums, verdicts, and what is left out."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import PairedSums
from gem_precision.guard.records import append, read_lines
from gem_precision.guard.window import LEAST, Window, interval


def pair(high: float, low: float, *, weight: float = 100.0, positive: float = 30.0) -> PairedSums:
    return PairedSums(weight=weight, positive=positive, predicted=(positive, positive), loss=(high, low))


def filled(rises: list[float], *, keep: int = 32, bound: float = 2e-4) -> Window:
    window = Window(keep, bound)
    for rise in rises:
        window.add({"ctr": pair(60.0, 60.0 * (1 + rise))})
    return window


def test_case_G03_figures_equal_plain_sums() -> None:
    window = Window(32, 1e-3)
    sums = [(100.0, 30.0, 61.0, 61.2), (50.0, 10.0, 29.0, 28.9), (80.0, 40.0, 55.0, 55.5)]
    for weight, positive, high, low in sums:
        window.add({"ctr": pair(high, low, weight=weight, positive=positive)})
    got = window.judge()["ctr"]
    rate = 80 / 230
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))
    assert got.ne == pytest.approx((145.0 / 230 / entropy, 145.6 / 230 / entropy), rel=1e-12)
    assert got.difference == pytest.approx(145.6 / 145.0 - 1, rel=1e-9)
    assert got.ne is not None
    assert got.ne[1] / got.ne[0] - 1 == pytest.approx(got.difference, rel=1e-9)  # of losses and of entropies alike
    assert (got.pairs, got.verdict) == (3, "waiting")


def test_case_G03_a_steady_rise_is_a_breach_and_a_wavering_one_is_not() -> None:
    assert filled([4e-4] * 10).judge()["ctr"].verdict == "breach"
    assert filled([1e-4] * 10).judge()["ctr"].verdict == "holds"
    wavering = filled([5e-3, -4e-3] * 8).judge()["ctr"]  # its mean is above the bound, its interval is not
    assert wavering.difference > 2e-4
    assert wavering.low < 0 < wavering.high
    assert wavering.verdict == "holds"


def test_better_in_low_precision_is_no_breach() -> None:
    assert filled([-5e-2] * 10).judge()["ctr"].verdict == "holds"


def test_few_pairs_wait() -> None:
    assert filled([1e-2] * (LEAST - 1)).judge()["ctr"].verdict == "waiting"
    assert filled([1e-2] * LEAST).judge()["ctr"].verdict == "breach"


def test_old_pairs_leave_and_a_cleared_window_is_empty() -> None:
    window = filled([1e-2] * 20 + [0.0] * 8, keep=8)
    assert (window.judge()["ctr"].pairs, window.judge()["ctr"].verdict) == (8, "holds")
    window.clear()
    assert window.judge() == {}


@pytest.mark.parametrize("bad", [pair(0.0, 0.0, weight=0.0, positive=0.0), pair(math.nan, 1.0), pair(1.0, math.inf)])
def test_a_pair_without_rows_or_a_finite_loss_counts_for_nothing(bad: PairedSums) -> None:
    window = filled([0.0] * 3)
    window.add({"ctr": bad, "cvr": bad})
    assert {task: judged.pairs for task, judged in window.judge().items()} == {"ctr": 3}


def test_labels_of_one_class_have_no_entropy_but_a_difference() -> None:
    window = Window(8, 1e-3)
    window.add({"ctr": pair(1.0, 1.1, positive=0.0)})
    got = window.judge()["ctr"]
    assert got.ne is None
    assert got.difference == pytest.approx(0.1)
    json.dumps(got.as_dict(), allow_nan=False)


def test_tasks_are_judged_apart_and_the_state_goes_on() -> None:
    window = filled([0.0] * 9)
    for _ in range(9):
        window.add({"cvr": pair(10.0, 11.0)})
    again = Window(32, 2e-4)
    again.load_state_dict(json.loads(json.dumps(window.state_dict())))
    assert {task: j.verdict for task, j in again.judge().items()} == {"ctr": "holds", "cvr": "breach"}
    assert again.judge() == window.judge()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-0.1, 0.1), min_size=1, max_size=40))
def test_the_interval_holds_the_difference_of_equal_pairs_and_lies_within_their_range(rises: list[float]) -> None:
    high = np.full(len(rises), 5.0)
    low = high * (1 + np.array(rises))
    lower, upper = interval(high, low)
    assert min(rises) - 1e-9 <= lower <= upper <= max(rises) + 1e-9
    assert interval(high, low) == (lower, upper)  # the same on every rank
    assert interval(high, high) == (0.0, 0.0)


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    """Long waves: a bootstrap over single pairs would take them for as many independent ones."""
    high = np.full(64, 1.0)
    waves, shuffled = np.repeat([0.01, -0.01], 32), np.tile([0.01, -0.01], 32)
    (a, b), (c, d) = interval(high, high + waves), interval(high, high + shuffled)
    assert b - a > 1.5 * (d - c)


def test_records_of_steps_that_were_done_again_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "precision-guard.jsonl"
    for step in (2, 4, 6, 4, 6, 8):
        append(tmp_path, {"step": step, "n": path.stat().st_size if path.exists() else 0})
    with path.open("a") as file:
        file.write('{"step": 10')  # cut short
    records = read_lines(path)
    assert [r["step"] for r in records] == [2, 4, 6, 8]
    assert [r["n"] for r in records] == sorted(r["n"] for r in records)
    assert records[1]["n"] > 2 * records[0]["n"]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_lines_of_one_step_stay_together(tmp_path: Path) -> None:
    for step in (1, 1, 2, 2, 1, 1):
        append(tmp_path, {"step": step})
    assert [r["step"] for r in read_lines(tmp_path / "precision-guard.jsonl")] == [1, 1]


def test_what_is_not_finite_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(tmp_path, {"step": 1, "x": math.nan})
