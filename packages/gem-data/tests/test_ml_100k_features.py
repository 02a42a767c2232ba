"""The numbers of ml-100k against loops over all pairs of ratings."""

from collections.abc import Callable

import numpy as np
import pytest

from gem_data.sources.ml_100k_features import CrossFittedItems, PastItems, Ratings, earlier_events, past_features

Pair = Callable[[int, int], bool]


def ratings(seed: int, rows: int = 60) -> Ratings:
    """Random ratings in time order with many ties; a user rates a film once; each user's last fifth is the test split."""
    rng = np.random.default_rng(seed)
    pairs = rng.permutation(np.stack(np.meshgrid(np.arange(6), np.arange(15)), axis=-1).reshape(-1, 2))[:rows]
    user, item = pairs[:, 0].copy(), pairs[:, 1].copy()
    genres = rng.integers(0, 2, (15, 3)).astype(np.float64)
    genres /= np.maximum(genres.sum(1, keepdims=True), 1)
    place = np.array([(user[:row] == user[row]).sum() for row in range(rows)])
    count = np.bincount(user)[user]
    return Ratings(
        user=user,
        item=item,
        rating=rng.integers(1, 6, rows).astype(np.float64),
        time=np.sort(rng.integers(0, 12, rows)),
        release=item % 4,
        year=np.where(item % 5 == 0, np.nan, 1980.0 + item),
        genres=genres[item],
        train=place < np.ceil(0.8 * count),
    )


def shrunk(data: Ratings, values: np.ndarray, counts: Pair, strength: float) -> np.ndarray:
    """For each row the sum of ``values`` over the other rows that count, over their number and ``strength``."""
    rows = range(data.user.size)
    chosen = [[other for other in rows if counts(row, other)] for row in rows]
    return np.array([values[others].sum() / (len(others) + strength) for others in chosen])


def earlier(data: Ratings, rule: str) -> Pair:
    return lambda row, other: bool(data.user[other] == data.user[row] and (other < row if rule == "order" else data.time[other] < data.time[row]))


@pytest.mark.parametrize("seed", [0, 1])
def test_past_items_are_earlier_ratings_and_training_rows_see_training_rows_only(seed: int) -> None:
    data = ratings(seed)
    values = data.rating - 3

    def counts(row: int, other: int) -> bool:
        same = data.item[other] == data.item[row] and data.time[other] < data.time[row]
        return bool(same and (data.train[other] or not data.train[row]))

    items = PastItems(data)
    np.testing.assert_allclose(items.mean(values), shrunk(data, values, counts, 5.0), atol=1e-12)
    assert items.count.tolist() == [sum(counts(row, other) for other in range(data.user.size)) for row in range(data.user.size)]
    assert items.count.max() > 1


@pytest.mark.parametrize("seed", [0, 1])
def test_cross_fitted_items_are_training_rows_of_other_folds(seed: int) -> None:
    data = ratings(seed)
    values = data.rating - 3

    def counts(row: int, other: int) -> bool:
        same = data.item[other] == data.item[row] and data.train[other]
        return bool(same and (not data.train[row] or data.user[other] % 10 != data.user[row] % 10))

    np.testing.assert_allclose(CrossFittedItems(data).mean(values), shrunk(data, values, counts, 5.0), atol=1e-12)


def standard(x: np.ndarray, train: np.ndarray) -> np.ndarray:
    return np.clip((x - x[train].mean()) / (x[train].std() + 1e-6), -4, 4)


@pytest.mark.parametrize("rule", ["strict", "order"])
def test_each_number_is_what_a_loop_finds(rule: str) -> None:
    data = ratings(2)
    items, before = PastItems(data), earlier(data, rule)
    found = past_features(data, earlier_events(data.user, data.time, rule), items)
    centred = data.rating - data.rating[data.train].mean()
    lenience = centred - items.mean(centred)
    user_mean, usual = shrunk(data, centred, before, 3.0), shrunk(data, lenience, before, 3.0)
    expected = {"user_mean": user_mean, "item_quality": items.mean(centred - user_mean), "user_lenience": usual}
    rows, n = range(data.user.size), data.user.size
    genre, year, last = np.zeros(n), np.zeros(n), np.zeros(n)
    for row in rows:
        past = [other for other in rows if before(row, other)]
        for g in range(3):
            weight = sum(data.genres[other, g] for other in past)
            excess = sum(data.genres[other, g] * (lenience[other] - usual[row]) for other in past)
            genre[row] += data.genres[row, g] * excess / (weight + 2)
        alike = [lenience[other] - usual[row] for other in past if data.release[other] == data.release[row]]
        year[row] = sum(alike) / (len(alike) + 2)
        last[row] = np.log1p(data.time[row] - data.time[past[-1]]) if past else 0.0
    expected |= {"genre_affinity": genre, "year_affinity": year, "since_last": last}
    for name, values in expected.items():
        np.testing.assert_allclose(found.dense[name], standard(values, data.train), atol=1e-9, err_msg=name)
    np.testing.assert_allclose(found.surprise, centred - user_mean - items.mean(centred - user_mean), atol=1e-12)


def test_the_two_rules_differ_where_times_tie() -> None:
    data = ratings(3)
    strict, order = (earlier_events(data.user, data.time, rule) for rule in ("strict", "order"))
    assert (strict.count <= order.count).all()
    assert (strict.count < order.count).any()
    assert strict.last(2).tolist() == np.maximum(strict.begin, strict.end - 2).tolist()


def test_an_unknown_year_becomes_the_training_mean() -> None:
    data = ratings(4)
    year = past_features(data, earlier_events(data.user, data.time, "strict"), PastItems(data)).dense["item_year"]
    assert np.isfinite(year).all()
    assert set(year[np.isnan(data.year)]) == {0.0}
    assert abs(year[data.train & ~np.isnan(data.year)].mean()) < 1e-6
