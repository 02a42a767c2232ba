"""The source ``generated``: each row alone, histories from one log, and bounds that hold with and without histories."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from gem_core.spec import RequestError, Shard
from gem_data.generate import bounds as bounds_module
from gem_data.generate.bounds import bounds, chunks
from gem_data.generate.world import DAY, START, Rows, World, interest_posterior
from gem_data.options import GeneratedOptions
from gem_data.score import scores, sigmoid
from gem_data.sources.generated import Generated, load

WITH, WITHOUT = "bayes expected", "bayes expected without history"

SMALL: dict[str, Any] = {"rows": 6000, "test_rows": 6000, "users": 900, "items": 200, "categories": 5, "history_length": 30, "candidates": 3}


@pytest.fixture(scope="module")
def source() -> Generated:
    return load(**SMALL)


@pytest.fixture(scope="module")
def train(source: Generated) -> Rows:
    return source.world.rows("train", np.arange(SMALL["rows"]))


@pytest.fixture(scope="module")
def test(source: Generated) -> Rows:
    return source.world.rows("test", np.arange(SMALL["test_rows"]))


def history(rows: Rows, r: int) -> list[tuple[int, int, int]]:
    part = slice(*rows.histories.offsets[rows.request[r] : rows.request[r] + 2])
    return list(zip(*(column[part].tolist() for column in (rows.histories.item, rows.histories.category, rows.histories.time)), strict=True))


def test_a_row_is_the_same_wherever_it_is_read(source: Generated, train: Rows) -> None:
    picked = np.array([17, 5999, 3, 4, 17, 0, 2500])
    alone = source.world.rows("train", picked)
    for name in ("item", "category", "group", "hour", "numbers", "click", "blind", "conversion", "clicked", "converted", "closed", "delay"):
        assert np.array_equal(getattr(alone, name), getattr(train, name)[picked]), name
    for place, r in enumerate(picked):
        assert history(alone, place) == history(train, int(r))
    assert source.world.rows("train", np.empty(0, np.int64)).click.size == 0


def test_a_history_is_the_newest_part_of_the_users_log_before_the_row(source: Generated, train: Rows) -> None:
    """Against the whole log of a user, event after event; the log's events are put together from all histories that show them."""
    world = source.world
    users = train.requests.user[train.request]
    lengths = world.lengths(np.arange(SMALL["users"]))
    checked = empty = 0
    for user in np.unique(users)[:150]:
        step = world.horizon / max(int(lengths[user]), 1)
        place = np.arange(lengths[user])
        log = world._event_time(np.full(place.size, user), place, np.full(place.size, step))
        assert (np.diff(log) >= 0).all()
        for r in np.flatnonzero(users == user):
            times = [event[2] for event in history(train, int(r))]
            earlier = log[log < train.requests.time[train.request[r]]]
            assert times == earlier[-SMALL["history_length"] :].tolist()
            checked += len(times)
            empty += not times
    assert checked > 500
    assert empty > 10


def test_histories_of_one_user_agree(train: Rows) -> None:
    seen: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for r in range(0, SMALL["rows"], SMALL["candidates"]):
        for item, category, time in history(train, r):
            seen.setdefault((int(train.requests.user[train.request[r]]), time), set()).add((item, category))
    assert max(len(found) for found in seen.values()) == 1
    assert all(item % SMALL["categories"] == category for found in seen.values() for item, category in found)


def test_candidates_share_user_time_and_history(source: Generated) -> None:
    batch = next(iter(source.batches("train", batch_size=9)))
    offsets, times = batch.event_offsets["history"].offsets.tolist(), batch.event_time["history"].tolist()
    histories = [times[a:b] for a, b in pairwise(offsets)]
    assert batch.time is not None
    assert batch.groups is not None
    for first in (0, 3, 6):
        assert histories[first] == histories[first + 1] == histories[first + 2]
        assert batch.time[first] == batch.time[first + 2]
        assert batch.groups[first] == batch.groups[first + 2]
    assert len(set(batch.ids["item"].values.tolist())) > 5


def test_times_rise_and_test_rows_are_later(train: Rows, test: Rows) -> None:
    for rows in (train, test):
        assert (np.diff(rows.requests.time) >= 0).all()
        assert (rows.histories.time < np.repeat(rows.requests.time, np.diff(rows.histories.offsets))).all()
    assert train.requests.time.max() < test.requests.time.min()
    assert train.requests.number.max() < test.requests.number.min()


@pytest.mark.parametrize(("categories", "interest", "events"), [(4, 0.5, 4), (5, 0.0, 3), (4, 0.9, 5)])
def test_the_posterior_is_bayes_rule_and_averages_to_the_prior_exactly(categories: int, interest: float, events: int) -> None:
    """Over every possible history, weighed by its probability: the reason why the bound without histories is exact."""
    other = (1 - interest) / categories
    total, mean = 0.0, np.zeros(categories)
    for seen in product(range(categories), repeat=events):
        likelihood = np.array([np.prod([other + interest * (event == wanted) for event in seen]) for wanted in range(categories)])
        posterior = interest_posterior(np.bincount(seen, minlength=categories)[None], interest)[0]
        np.testing.assert_allclose(posterior, likelihood / likelihood.sum(), rtol=1e-12)
        chance = likelihood.mean()
        total += chance
        mean += chance * posterior
    assert total == pytest.approx(1)
    np.testing.assert_allclose(mean, 1 / categories, rtol=1e-12)


def test_the_posterior_of_200000_events_is_finite() -> None:
    found = interest_posterior(np.array([[200_000, 0, 1, 0], [0, 0, 0, 0]]), 0.99)
    np.testing.assert_allclose(found, [[1, 0, 0, 0], [0.25] * 4])


def asked(o: GeneratedOptions, time: int, category: int, events: list[tuple[int, int, int]]) -> float:
    """``m`` by a loop over one row's history."""
    if not events:
        return 1 / o.categories
    period = (time - START) // (o.interest_days * DAY)
    likelihood = np.ones(o.categories)
    for _, seen, at in events:
        if (at - START) // (o.interest_days * DAY) == period:
            likelihood *= (1 - o.interest) / o.categories + o.interest * (np.arange(o.categories) == seen)
    age = time - events[-1][2]
    shift = 1 if age < 3600 else 2 if age < DAY else 3
    follows = float((events[-1][1] + shift) % o.categories == category)
    return float((1 - o.follow_up) * likelihood[category] / likelihood.sum() + o.follow_up * follows)


def test_case_J02_the_click_probability_follows_from_features_and_history(source: Generated, train: Rows) -> None:
    o = source.options
    rows = range(1200)
    time = train.requests.time[train.request]
    m = np.array([asked(o, int(time[r]), int(train.category[r]), history(train, r)) for r in rows])
    # click = plain + m (helped - plain) and blind = plain + (helped - plain) / C, so both are sigmoids of one number apart by `match`.
    lift = (train.click[:1200] - train.blind[:1200]) / np.where(m == 1 / o.categories, 1, m - 1 / o.categories)
    plain = train.blind[:1200] - lift / o.categories
    known = np.abs(m - 1 / o.categories) > 1e-6
    assert known.sum() > 900
    odds = np.log(plain) - np.log1p(-plain)
    np.testing.assert_allclose(sigmoid(odds[known] + o.match) - plain[known], lift[known], rtol=1e-6)
    np.testing.assert_allclose(train.click[:1200][~known], train.blind[:1200][~known])


def deviations(labels: np.ndarray, p: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Observed less expected positives of eight groups of rows by ``by``, in standard deviations."""
    groups = np.array_split(np.argsort(by, kind="stable"), 8)
    return np.array([(labels[g] - p[g]).sum() / np.sqrt((p[g] * (1 - p[g])).sum()) for g in groups])


def independent() -> Generated:
    """One row a user, nearly: rows share no history, so that counts scatter as if drawn apart."""
    return load(**{**SMALL, "rows": 40_000, "test_rows": 40_000, "users": 10**9, "candidates": 1, "history_length": 10})


def test_both_probabilities_are_calibrated_in_every_part_of_the_data() -> None:
    rows = independent().world.rows("test", np.arange(40_000))
    for p in (rows.click, rows.blind):
        for by in (p, rows.hour, rows.category, rows.numbers[:, 0]):
            assert np.abs(deviations(rows.clicked, p, by)).max() < 4
    lengths = np.diff(rows.histories.offsets)[rows.request]
    assert np.abs(deviations(rows.clicked, rows.click, lengths)).max() < 4
    assert np.abs(deviations(rows.converted[rows.clicked], rows.conversion[rows.clicked], rows.conversion[rows.clicked])).max() < 4
    assert np.abs(deviations(rows.clicked, rows.blind, rows.click)).max() > 10, "the check sees what the history adds"


def test_the_bound_without_histories_is_worse_and_equal_where_histories_say_nothing() -> None:
    found = bounds(independent().world, "test")
    best, blind = found[WITH]["ctr"], found[WITHOUT]["ctr"]
    assert best["auc"] > blind["auc"] + 0.02
    assert best["ne"] < blind["ne"] - 0.02
    assert blind["ne"] < 1
    assert found[WITH]["cvr"] == found[WITHOUT]["cvr"]
    mute = bounds(load(**SMALL, match=0.0).world, "test")
    assert mute[WITH]["ctr"] == pytest.approx(mute[WITHOUT]["ctr"])


def test_the_bounds_are_what_scores_tend_to() -> None:
    rows = independent().world.rows("test", np.arange(40_000))
    found = independent().baselines()
    labels = rows.clicked.astype(np.float64)
    for name, p in (("bayes", rows.click), ("bayes without history", rows.blind)):
        assert found[name]["ctr"] == pytest.approx(scores(labels, p))
        expected = found[name.replace("bayes", "bayes expected")]["ctr"]
        assert expected["ne"] == pytest.approx(found[name]["ctr"]["ne"], abs=0.008)
        assert expected["auc"] == pytest.approx(found[name]["ctr"]["auc"], abs=0.008)
    bought = scores(rows.converted[rows.clicked].astype(np.float64), rows.conversion[rows.clicked])
    assert found["bayes"]["cvr"] == pytest.approx(bought)
    assert found["bayes expected"]["cvr"]["ne"] == pytest.approx(bought["ne"], abs=0.02)


def test_a_bound_that_the_labels_leave_undefined_is_left_out() -> None:
    found = load(rows=10, test_rows=10, base_logit=-30.0).baselines()
    assert found["bayes"] == found["bayes without history"] == {}
    assert set(found["bayes expected"]) == {"ctr", "cvr"}


def test_case_J02_lengths_from_0_to_200000() -> None:
    world = World(GeneratedOptions(users=10**7, mean_events=1000.0))
    lengths = world.lengths(np.arange(200_000))
    assert lengths.min() == 0
    assert lengths.max() == 200_000
    scale = 1000.0 * 0.2
    for at in (1, 100, 10_000, 100_000):
        law = (1 + at / scale) ** -1.2
        assert abs((lengths >= at).mean() - law) < 4 * np.sqrt(law / lengths.size)


def test_case_J02_a_history_of_200000_events_is_read_whole() -> None:
    source = load(rows=40, test_rows=40, users=40, mean_events=1e9, history_length=200_000)
    batch = next(iter(source.batches("test", batch_size=2)))
    assert batch.time is not None
    lengths = batch.event_offsets["history"].lengths()
    assert 160_000 < int(lengths.min()) <= int(lengths.max()) <= 200_000
    assert (batch.event_time["history"] < batch.time.repeat_interleave(lengths)).all()


def test_no_events_at_all() -> None:
    batch = next(iter(load(rows=50, test_rows=50, users=5, mean_events=0.0).batches("train", batch_size=50)))
    assert batch.event_offsets["history"].max_length == 0


def test_training_conversions_are_those_seen_when_the_test_days_begin(source: Generated, train: Rows) -> None:
    window = source.options.window_days * DAY
    age = source.world.test_start - train.requests.time[train.request]
    assert np.array_equal(train.closed, age >= window)
    assert 0.05 < 1 - train.closed.mean() < 0.5
    assert (train.delay[train.converted] < np.minimum(age, window)[train.converted]).all()
    assert (train.delay[~train.converted] == -1).all()
    assert train.clicked[train.converted].all()
    batch = next(iter(source.batches("train", batch_size=6000)))
    assert np.array_equal(batch.masks["cvr"].numpy(), train.closed)


def test_the_masked_rows_would_bias_a_model_that_took_them_for_negatives() -> None:
    """The rate of the closed rows is the true one, that of the open rows is below it."""
    rows = load(**{**SMALL, "rows": 60_000, "users": 10**9, "base_logit": 0.0}).world.rows("train", np.arange(60_000))
    for part, low, high in ((rows.closed, -4, 4), (~rows.closed, -100, -6)):
        part = part & rows.clicked
        p = rows.conversion[part]
        assert low < (rows.converted[part] - p).sum() / np.sqrt((p * (1 - p)).sum()) < high


def test_drift_turns_item_effects_and_none_keeps_them() -> None:
    def odds(drift: float, split: str) -> np.ndarray:
        world = World(GeneratedOptions(**{**SMALL, "drift": drift}))
        items = np.arange(200)
        zero = np.zeros(200, np.int64)
        time = np.full(200, START if split == "train" else START + world.horizon)
        plain, _ = world._click_odds(items, zero, zero, np.zeros((200, 2)), time)
        return np.log(plain / (1 - plain))

    assert np.allclose(odds(0.0, "train"), odds(0.0, "test"))
    assert np.corrcoef(odds(1.0, "train"), odds(1.0, "test"))[0, 1] == pytest.approx(np.cos(1.0), abs=0.15)


def test_ranks_share_each_global_batch_and_a_start_skips_batches(source: Generated) -> None:
    whole = list(source.batches("train", batch_size=701, seed=5, epoch=2))
    assert sum(batch.rows for batch in whole) == 6000
    shares = [list(source.batches("train", batch_size=701, seed=5, epoch=2, start=7, shard=Shard(rank=r, world=3))) for r in range(3)]
    for at, batch in enumerate(whole[7:]):
        for name in ("ctr", "cvr"):
            assert torch.equal(torch.cat([share[at].labels[name] for share in shares]), batch.labels[name])
        assert torch.equal(torch.cat([share[at].ids["history.item"].values for share in shares]), batch.ids["history.item"].values)
        assert {share[at].global_rows for share in shares} == {batch.rows}
    other = next(iter(source.batches("train", batch_size=701, seed=5, epoch=3)))
    assert not torch.equal(other.labels["ctr"], whole[0].labels["ctr"])


@pytest.mark.parametrize("wrong", [{"batch_size": 0}, {"batch_size": 5, "seed": -1}, {"batch_size": 5, "shard": Shard(rank=2, world=2)}])
def test_wrong_requests_are_refused_by_the_call(source: Generated, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="generated"):
        source.batches("train", **wrong)


def test_an_unknown_split_is_refused(source: Generated) -> None:
    with pytest.raises(RequestError, match="train, test"):
        source.rows("valid")


def test_pieces_hold_bounded_rows_and_events_and_cover_the_split(source: Generated, train: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds_module, "ROWS_AT_ONCE", 1000)
    monkeypatch.setattr(bounds_module, "EVENTS_AT_ONCE", 400)
    pieces = list(chunks(source.world, "train"))
    assert np.array_equal(np.concatenate([piece.index for piece in pieces]), np.arange(6000))
    assert np.array_equal(np.concatenate([piece.click for piece in pieces]), train.click)
    assert max(piece.index.size for piece in pieces) < 1000
    assert max(piece.histories.item.size for piece in pieces) <= 400 + SMALL["history_length"]


@pytest.mark.parametrize(
    "wrong", [{"items": 7, "categories": 5}, {"interest": 1.0}, {"tail": 1.0}, {"max_events": 200_001}, {"rows": 0}, {"window": 3}]
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GeneratedOptions(**wrong)
