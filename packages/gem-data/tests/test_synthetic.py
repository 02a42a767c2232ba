"""The generated source: repeatable, calibrated, and with a known optimum."""

import numpy as np
import pytest
import torch

from gem_data.score import auc, entropy, expected_scores, logit, ne, sigmoid
from gem_data.sources.synthetic import FADE, Synthetic, load

ROWS, TEST_ROWS = 6000, 4000


@pytest.fixture(scope="module")
def source() -> Synthetic:
    return load(rows=ROWS, test_rows=TEST_ROWS, users=400, conversion=True, items=200, groups=8, categories=10, history_length=16, mean_events=12.0)


def test_one_seed_gives_one_data_set_and_another_seed_another() -> None:
    small = {"rows": 200, "test_rows": 50, "users": 30}
    first, again, other = load(**small), load(**small), load(**small, seed=2)
    one, two, three = (next(iter(s.batches("train", batch_size=200))) for s in (first, again, other))
    assert torch.equal(one.ids.values, two.ids.values)
    assert torch.equal(one.labels["ctr"], two.labels["ctr"])
    assert np.array_equal(first.click, again.click)
    assert not torch.equal(one.labels["ctr"], three.labels["ctr"])


def test_rows_splits_and_ids(source: Synthetic) -> None:
    assert source.ledger() == {"read": ROWS + TEST_ROWS, "train": ROWS, "test": TEST_ROWS}
    assert source.table.time is not None
    assert source.table.time[source.index("train")].max() < source.table.time[source.index("test")].min()
    assert source.unknown_ids("train") == {}
    assert [task.condition for task in source.schema().tasks] == [None, "ctr"]


def log_loss(labels: np.ndarray, p: np.ndarray) -> float:
    return float(-np.mean(np.where(labels > 0, np.log(p), np.log(1 - p))))


def test_bayes_is_the_log_loss_of_the_true_probabilities(source: Synthetic) -> None:
    test = source.index("test").numpy()
    click = source.table.labels["ctr"].numpy()[test]
    found = source.baselines()["bayes"]
    rate = click.mean(dtype=np.float64)
    base = log_loss(click, np.full(test.size, rate))
    assert found["ctr"]["ne"] == pytest.approx(log_loss(click, source.click[test]) / base)
    clicked = test[click > 0]
    bought = source.table.labels["cvr"].numpy()[clicked]
    base = log_loss(bought, np.full(bought.size, bought.mean(dtype=np.float64)))
    assert found["cvr"]["ne"] == pytest.approx(log_loss(bought, source.conversion[clicked]) / base)


def test_bayes_beats_the_base_rate_and_any_bent_probability(source: Synthetic) -> None:
    test = source.index("test").numpy()
    labels = source.table.labels["ctr"].numpy()[test].astype(np.float64)
    best = source.baselines()["bayes"]["ctr"]
    constant = ne(labels, np.full(test.size, source.table.labels["ctr"][source.index("train")].mean().item()))
    assert best["ne"] < 0.95 < 1 <= constant
    assert best["auc"] > 0.6
    for bend in (0.6, 1.5):
        assert ne(labels, sigmoid(bend * logit(source.click[test]))) > best["ne"]
    assert ne(labels, sigmoid(logit(source.click[test]) + 0.4)) > best["ne"]


def deviations(labels: np.ndarray, p: np.ndarray, bins: int = 8) -> np.ndarray:
    """Observed less expected positives of each bin of equal size, in standard deviations."""
    groups = np.array_split(np.argsort(p), bins)
    return np.array([(labels[g] - p[g]).sum() / np.sqrt((p[g] * (1 - p[g])).sum()) for g in groups])


def test_true_probabilities_are_calibrated_on_the_test_labels(source: Synthetic) -> None:
    test = source.index("test").numpy()
    click = source.table.labels["ctr"].numpy()
    assert np.abs(deviations(click[test], source.click[test])).max() < 3.5
    clicked = test[click[test] > 0]
    assert np.abs(deviations(source.table.labels["cvr"].numpy()[clicked], source.conversion[clicked])).max() < 3.5


def test_the_calibration_check_sees_a_shift(source: Synthetic) -> None:
    test = source.index("test").numpy()
    shifted = sigmoid(logit(source.click[test]) + 0.5)
    assert np.abs(deviations(source.table.labels["ctr"].numpy()[test], shifted)).max() > 3.5


def test_histories_are_earlier_short_enough_and_sometimes_empty(source: Synthetic) -> None:
    for split in ("train", "test"):
        batch = next(iter(source.batches(split, batch_size=10_000)))
        lengths = batch.event_offsets["history"].lengths()
        assert batch.time is not None
        assert (lengths == 0).any()
        assert lengths.max() == 16
        assert (batch.event_time["history"] < batch.time.repeat_interleave(lengths)).all()


def test_no_events_at_all() -> None:
    batch = next(iter(load(rows=50, test_rows=50, users=5, mean_events=0.0).batches("train", batch_size=50)))
    assert batch.event_offsets["history"].max_length == 0
    assert batch.ids["history.item"].values.numel() == 0


def test_items_follow_zipf_and_0_is_uniform(source: Synthetic) -> None:
    counts = np.bincount(source.table.ids["item"].numpy(), minlength=201)[1:]
    weights = np.arange(1, 201) ** -1.05
    expected = weights / weights.sum() * counts.sum()
    np.testing.assert_allclose(counts[:10], expected[:10], atol=4.5 * np.sqrt(expected[0]))
    assert counts[:20].sum() > 0.5 * counts.sum()
    flat = np.bincount(load(rows=4000, test_rows=50, users=20, items=200, zipf=0.0).table.ids["item"].numpy(), minlength=201)[1:]
    assert flat.max() < 3 * flat.mean()


def test_the_click_probability_follows_from_the_features(source: Synthetic) -> None:
    """With bias, item, group and hour effects fitted, the stated coefficients of the numbers and of the history come out."""
    rows = slice(0, 1500)
    batch = source.table.batch(torch.arange(1500))
    assert batch.time is not None
    offsets = batch.event_offsets["history"].offsets.tolist()
    share = np.zeros(1500)
    for r in range(1500):
        here = slice(offsets[r], offsets[r + 1])
        weight = 1 / (1 + (batch.time[r] - batch.event_time["history"][here]).double().numpy() / FADE)
        same = (batch.ids["history.category"].values[here] == batch.ids["category"].values[r]).numpy()
        share[r] = (weight * same).sum() / weight.sum() if weight.size else 0.0
    one_hot = [np.eye(201)[batch.ids["item"].values], np.eye(9)[batch.ids["user_group"].values], np.eye(25)[batch.ids["hour"].values]]
    design = np.column_stack([*(batch.dense[f"number_{k}"].numpy().astype(np.float64) for k in (1, 2)), share, *one_hot])
    target = logit(source.click[rows])
    solution = np.linalg.lstsq(design, target, rcond=None)[0]
    np.testing.assert_allclose(solution[:3], [0.5, -0.3, 3.0], atol=1e-6)
    np.testing.assert_allclose(design @ solution, target, atol=1e-6)


def test_a_higher_temperature_is_noisier() -> None:
    figures = [load(rows=100, test_rows=2000, users=100, temperature=t).baselines()["bayes expected"]["ctr"] for t in (1.0, 4.0)]
    assert figures[0]["ne"] < figures[1]["ne"] < 1
    assert figures[0]["auc"] > figures[1]["auc"] > 0.5


def test_expected_scores_are_the_average_over_drawn_labels() -> None:
    rng = np.random.default_rng(3)
    p = np.round(rng.uniform(0.05, 0.9, 400), 2)
    draws = [(rng.random(400) < p).astype(np.float64) for _ in range(300)]
    found = expected_scores(p, np.ones(400))
    assert found["auc"] == pytest.approx(np.mean([auc(labels, p) for labels in draws]), abs=0.004)
    assert found["ne"] == pytest.approx(np.mean([ne(labels, p) for labels in draws]), abs=0.006)


@pytest.mark.parametrize("labels", [[0, 1, 0, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
def test_case_D01_ties_count_one_half_in_any_order(labels: list[int]) -> None:
    assert auc(np.array(labels, dtype=np.float64), np.full(4, 0.5)) == 0.5


def test_case_D03_one_class_is_undefined() -> None:
    for labels in (np.zeros(2), np.ones(2), np.empty(0)):
        assert np.isnan(auc(labels, np.full(labels.size, 0.3)))
        assert np.isnan(ne(labels, np.full(labels.size, 0.3)))


def test_auc_and_entropy_of_small_cases() -> None:
    labels, p = np.array([0.0, 1.0, 0.0, 1.0]), np.array([0.1, 0.4, 0.4, 0.8])
    assert auc(labels, p) == 3.5 / 4
    assert ne(labels, np.full(4, 0.5)) == pytest.approx(1)
    assert entropy(np.array([0.0, 0.5, 1.0])).tolist() == pytest.approx([0, np.log(2), 0], abs=1e-12)
