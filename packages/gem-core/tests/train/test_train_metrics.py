"""NE, calibration and the account of rows: every undefined result has a reason, no bad row poisons a metric."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gem_train_fakes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch
from gem_core.spec import RequestError, Task
from gem_core.train.metrics import Predictions, StreamMetrics, TaskMetrics, metrics_of_sums, stream_sums, task_metrics
from gem_core.train.world import World

NAN = float("nan")


def metrics(logits: Sequence[float], labels: Sequence[float], **columns: Any) -> TaskMetrics:
    return task_metrics(torch.tensor(logits), torch.tensor(labels), **{key: torch.tensor(value) for key, value in columns.items()})


def test_ne_and_calibration_of_a_worked_example() -> None:
    """Three rows with p = 0.5, 0.8, 0.2 and labels 1, 1, 0: loss (ln 2 - 2 ln 0.8) / 3, base rate 2/3."""
    logits = [0.0, math.log(4), -math.log(4)]
    got = metrics(logits, [1.0, 1.0, 0.0])
    loss = (math.log(2) - 2 * math.log(0.8)) / 3
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert got.log_loss == pytest.approx(loss, rel=1e-6)
    assert got.ne == pytest.approx(loss / entropy, rel=1e-6)
    assert got.calibration == pytest.approx(1.5 / 2, rel=1e-6)
    assert (got.rows, got.positives, got.reasons) == (3, 2, {})


def test_a_model_that_knows_the_base_rate_has_ne_and_calibration_one() -> None:
    labels = [1.0] + [0.0] * 3
    got = metrics([math.log(1 / 3)] * 4, labels)
    assert got.ne == pytest.approx(1.0, rel=1e-6)
    assert got.calibration == pytest.approx(1.0, rel=1e-6)
    assert got.auc == 0.5


def test_weights_count_as_repeated_rows() -> None:
    logits, labels, weights = [0.3, -1.0, 2.0, 0.1], [1.0, 0.0, 1.0, 0.0], [1, 3, 2, 1]
    at = torch.arange(4).repeat_interleave(torch.tensor(weights))
    weighted = metrics(logits, labels, weights=[float(w) for w in weights])
    repeated = task_metrics(torch.tensor(logits)[at], torch.tensor(labels)[at])
    for name in ("auc", "ne", "calibration", "log_loss"):
        assert getattr(weighted, name) == pytest.approx(getattr(repeated, name), rel=1e-12)
    assert (weighted.rows, repeated.rows) == (4, 7)


def test_case_D03_all_negative_is_undefined_not_huge() -> None:
    got = metrics([0.1, 0.2], [0.0, 0.0])
    assert (got.ne, got.auc) == (None, None)
    assert got.reasons["ne"] == got.reasons["auc"] == "one class: no positive row"
    assert got.log_loss is not None
    assert got.rows == 2


def test_all_positive_is_undefined_but_calibrated() -> None:
    got = metrics([0.0, 0.0], [1.0, 1.0])
    assert (got.ne, got.auc, got.calibration) == (None, None, 0.5)
    assert got.reasons == {"ne": "one class: no negative row", "auc": "one class: no negative row"}


def test_case_D04_an_unknown_label_is_refused_or_masked() -> None:
    with pytest.raises(RequestError, match="label is -1"):
        metrics([0.1, 0.2, 0.3], [-1.0, 0.0, 1.0])
    got = metrics([0.1, 0.2, 0.3], [-1.0, 0.0, 1.0], mask=[False, True, True])
    assert (got.rows, got.unobserved, got.auc) == (2, 1, 1.0)
    assert 0.9 < (got.ne or 0) < 1.1


def test_case_D06_no_weight_is_undefined_and_a_nan_prediction_is_counted() -> None:
    nothing = metrics([0.1, 0.2], [0.0, 1.0], weights=[0.0, 0.0])
    assert (nothing.auc, nothing.ne, nothing.calibration) == (None, None, None)
    assert nothing.reasons["ne"] == "no rows with weight"
    assert (nothing.rows, nothing.zero_weight) == (0, 2)
    poisoned = metrics([NAN, 0.2, -0.5, float("inf")], [1.0, 1.0, 0.0, 0.0])
    clean = metrics([0.2, -0.5], [1.0, 0.0])
    assert (poisoned.bad_predictions, poisoned.rows) == (2, 2)
    assert (poisoned.auc, poisoned.ne, poisoned.calibration) == (clean.auc, clean.ne, clean.calibration)


def test_case_D09_float64_predictions_and_labels() -> None:
    double = task_metrics(
        torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64), groups=torch.zeros(3).long()
    )
    assert double.auc == 0.5
    assert double.group_auc is not None
    assert double.group_auc.unweighted == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_float_dtype_is_computed_in_float64(dtype: torch.dtype) -> None:
    got = task_metrics(torch.tensor([0.5, -0.25, 2.0]).to(dtype), torch.tensor([1, 0, 1]))
    expected = metrics([0.5, -0.25, 2.0], [1.0, 0.0, 1.0])
    assert (got.ne, got.calibration) == (expected.ne, expected.calibration)


def test_case_D12_no_group_with_both_classes_is_undefined_with_counts() -> None:
    got = metrics([0.1, 0.2, 0.3], [0.0, 0.0, 0.0], groups=[1, 1, 2])
    assert got.group_auc is not None
    assert (got.group_auc.unweighted, got.group_auc.groups_used, got.group_auc.groups_skipped) == (None, 0, 2)
    assert got.reasons["group_auc"] == "none of 2 groups holds both classes"


def test_case_D13_no_rows_at_all() -> None:
    got = task_metrics(torch.zeros(0), torch.zeros(0), groups=torch.zeros(0).long())
    assert (got.auc, got.ne, got.calibration, got.rows) == (None, None, None, 0)
    assert set(got.reasons) == {"auc", "ne", "calibration", "log_loss", "group_auc"}


def test_case_D21_calibration_without_positives_is_undefined_not_zero() -> None:
    got = metrics([math.log(1 / 9), math.log(1 / 4)], [0.0, 0.0])
    assert got.calibration is None
    assert got.reasons["calibration"] == "no positive row"


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(RequestError, match="negative or not finite"):
        metrics([0.1, 0.2], [0.0, 1.0], weights=[1.0, -1.0])


def test_large_logits_stay_finite() -> None:
    got = metrics([1e4, -1e4, 1e4], [1.0, 0.0, 0.0])
    assert got.log_loss == pytest.approx(1e4 / 3)
    assert got.bad_predictions == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.floats(-20, 20, width=32), st.booleans(), st.booleans(), st.integers(0, 3)), max_size=30))
def test_every_row_is_accounted_for_and_results_are_finite(drawn: list[tuple[float, bool, bool, int]]) -> None:
    x, y, seen, w = ([row[i] for row in drawn] for i in range(4))
    got = task_metrics(
        torch.tensor(x, dtype=torch.float32), torch.tensor(y).float(), mask=torch.tensor(seen, dtype=torch.bool), weights=torch.tensor(w).float()
    )
    assert got.rows + got.unobserved + got.zero_weight + got.bad_predictions == len(drawn)
    for name in ("auc", "ne", "calibration", "log_loss"):
        value = getattr(got, name)
        assert (value is None) == (name in got.reasons)
        assert value is None or math.isfinite(value)


# ---- collecting over a split -----------------------------------------------------------------------------------------------------------

TASKS = (Task(name="ctr"), Task(name="cvr", condition="ctr"))


def collect(source: gem_train_fakes.FakeSource, size: int) -> dict[str, TaskMetrics]:
    got = Predictions(TASKS)
    for batch in source.batches("test", batch_size=size):
        got.add({"ctr": batch.dense["x"].sum(1), "cvr": batch.dense["x"][:, 0]}, batch)
    done = got.compute(World())
    assert done is not None
    return done[0]


@pytest.mark.parametrize("size", [1, 7, 100])
def test_case_D14_metrics_cover_the_whole_split_whatever_the_batches(source: gem_train_fakes.FakeSource, size: int) -> None:
    assert collect(source, size) == collect(source, 32)


def test_conversions_count_only_under_a_click(source: gem_train_fakes.FakeSource) -> None:
    got = collect(source, 8)
    clicks = int(source.ctr[source.split["test"]].sum())
    assert (got["cvr"].rows, got["cvr"].unobserved) == (clicks, 32 - clicks)
    assert (got["ctr"].rows, got["ctr"].positives) == (32, clicks)


def test_case_D07_a_task_without_weight_leaves_the_other_alone(source: gem_train_fakes.FakeSource) -> None:
    batch = source.batch(source.split["test"])
    logits = {"ctr": batch.dense["x"].sum(1), "cvr": batch.dense["x"][:, 0]}

    def compute(batch: Batch) -> dict[str, TaskMetrics]:
        got = Predictions(TASKS)
        got.add(logits, batch)
        done = got.compute(World())
        assert done is not None
        return done[0]

    both, one = compute(batch), compute(replace(batch, weights={**batch.weights, "cvr": torch.zeros(batch.rows)}))
    assert one["ctr"] == both["ctr"]
    assert one["cvr"].ne is None
    assert one["cvr"].reasons["ne"] == "no rows with weight"


def test_groups_in_some_batches_only_are_refused(source: gem_train_fakes.FakeSource) -> None:
    got = Predictions(TASKS)
    for groups in (None, torch.arange(4)):
        batch = replace(source.batch(torch.arange(4)), groups=groups)
        got.add({"ctr": torch.zeros(4), "cvr": torch.zeros(4)}, batch)
    with pytest.raises(RequestError, match="4 of 8 rows carry a group"):
        got.compute(World())


# ---- training stream -------------------------------------------------------------------------------------------------------------------


def feed(stream: StreamMetrics, steps: range) -> None:
    for step in steps:
        made = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, generator=made), torch.randint(0, 2, (6,), generator=made).float()
        stream.add(torch.stack([stream_sums(x, y, torch.ones(6)), stream_sums(2 * x, y, torch.full((6,), 0.5))]))


def test_stream_metrics_agree_with_the_exact_ones() -> None:
    x, y, w = torch.randn(50), torch.randint(0, 2, (50,)).float(), torch.rand(50)
    values, reasons = metrics_of_sums(stream_sums(x, y, w))
    exact = task_metrics(x, y, weights=w)
    assert reasons == {}
    assert values == pytest.approx({"ne": exact.ne, "calibration": exact.calibration, "log_loss": exact.log_loss})


def test_windows_add_up_to_the_run() -> None:
    stream, world = StreamMetrics(TASKS, torch.device("cpu")), World()
    feed(stream, range(3))
    first = stream.read(world, close_window=True)
    assert first["window"] == first["run"]
    feed(stream, range(3, 5))
    second = stream.read(world, close_window=True)
    whole = StreamMetrics(TASKS, torch.device("cpu"))
    feed(whole, range(5))
    assert second["window"] != second["run"]
    assert second["run"]["ctr"]["ne"] == pytest.approx(whole.read(world, close_window=False)["window"]["ctr"]["ne"])


def test_case_D16_saved_in_mid_window_and_continued_to_the_bit() -> None:
    world = World()
    straight, before, after = (StreamMetrics(TASKS, torch.device("cpu")) for _ in range(3))
    for stream in (straight, before):
        feed(stream, range(3))
        stream.read(world, close_window=True)
        feed(stream, range(3, 5))
    assert after.load_state_dict(before.state_dict(world), world) == []
    for stream in (straight, after):
        feed(stream, range(5, 9))
    assert after.read(world, close_window=True) == straight.read(world, close_window=True)


def test_case_D17_other_tasks_in_the_state_are_told_not_fatal() -> None:
    world = World()
    saved = StreamMetrics((Task(name="ctr"), Task(name="gone")), torch.device("cpu"))
    saved.add(torch.ones(2, 4, dtype=torch.float64))
    stream = StreamMetrics(TASKS, torch.device("cpu"))
    assert stream.load_state_dict(saved.state_dict(world), world) == ["cvr", "gone"]
    assert stream.read(world, close_window=False)["run"]["ctr"]["log_loss"] == 1.0
    assert stream.read(world, close_window=False)["run"]["cvr"]["log_loss"] is None


def test_an_empty_window_is_undefined() -> None:
    assert StreamMetrics(TASKS, torch.device("cpu")).read(World(), close_window=True)["window"]["ctr"] == {
        "ne": None,
        "calibration": None,
        "log_loss": None,
    }
