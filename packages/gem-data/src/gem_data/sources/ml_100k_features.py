"""Numbers about a rating's user, film and moment that were known before it."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gem_data.history import Floats, Ints, PastIndex, RunningSum

FOLDS = 10


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """Ratings in stable time order; every array is ``[rows]`` and lines up.

    Args:
        user: user codes, 0 or more.
        item: film codes, 0 or more.
        rating: stars, 1 to 5.
        time: seconds.
        release: bucket of the film's year, 0 where unknown.
        year: the film's year, NaN where unknown.
        genres: ``[rows, genres]``, each row sums to 1, or to 0 where no genre is known.
        train: True for training rows.
    """

    user: Ints
    item: Ints
    rating: Floats
    time: Ints
    release: Ints
    year: Floats
    genres: Floats
    train: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Past:
    """Each row's earlier events with the same key, as a part of ``index.order``."""

    index: PastIndex
    begin: Ints
    end: Ints
    rule: str

    @property
    def count(self) -> Ints:
        """Number of earlier events ``[rows]``."""
        return self.end - self.begin

    def last(self, count: int) -> Ints:
        """Where the last ``count`` events begin."""
        return np.maximum(self.begin, self.end - count)

    def sum(self, values: Floats) -> Floats:
        """Sum over the earlier events."""
        return RunningSum(self.index, values).over(self.begin, self.end)

    def mean(self, values: Floats, strength: float, count: int | None = None) -> Floats:
        """Mean over the earlier events, or over the last ``count`` of them, pulled towards 0 by ``strength`` events."""
        return RunningSum(self.index, values).shrunk_mean(self.begin if count is None else self.last(count), self.end, strength)


def earlier_events(key: Ints, time: Ints, rule: str) -> Past:
    """Earlier events of one key: ``strict`` by timestamp, ``order`` by place in the stable time order."""
    index = PastIndex(key, time)
    begin, end = index.before(key, time)
    return Past(index=index, begin=begin, end=end if rule == "strict" else index.positions(), rule=rule)


class ItemStatistics(Protocol):
    """What other ratings of the film say. ``count`` ``[rows]``."""

    count: Floats

    def mean(self, values: Floats) -> Floats:
        """Mean of ``values`` over those ratings, pulled towards 0 by five more; ``[rows]``."""
        ...


class PastItems:
    """Ratings with a strictly earlier timestamp: training rows for a training row, so that no test label reaches training; all for a test row."""

    def __init__(self, data: Ratings) -> None:
        self._train = data.train
        self._some, self._all = PastIndex(data.item[data.train], data.time[data.train]), PastIndex(data.item, data.time)
        self._seen, self._seen_all = self._some.before(data.item, data.time), self._all.before(data.item, data.time)
        counts = (end - begin for begin, end in (self._seen, self._seen_all))
        self.count: Floats = np.where(data.train, *counts).astype(np.float64)

    def mean(self, values: Floats) -> Floats:
        some = RunningSum(self._some, values[self._train]).shrunk_mean(*self._seen, 5.0)
        return np.where(self._train, some, RunningSum(self._all, values).shrunk_mean(*self._seen_all, 5.0))


class CrossFittedItems:
    """Training rows of any time: all for a test row; for a training row those of users outside its own tenth of the users."""

    def __init__(self, data: Ratings) -> None:
        self._data = data
        self.count: Floats = self._sums(np.ones(data.item.size))

    def mean(self, values: Floats) -> Floats:
        return self._sums(values) / (self.count + 5.0)

    def _sums(self, values: Floats) -> Floats:
        data, films = self._data, int(self._data.item.max()) + 1
        sums: Floats = np.bincount(data.item[data.train], values[data.train], films)[data.item].astype(np.float64)
        for fold in range(FOLDS):
            own = data.train & (data.user % FOLDS == fold)
            sums[own] -= np.bincount(data.item[own], values[own], films)[data.item[own]]
        return sums


@dataclass(frozen=True, kw_only=True)
class PastFeatures:
    """What a row knows about its past.

    Args:
        dense: ``{name: [rows]}``, mean 0 and deviation 1 over the training rows, cut at 4 deviations.
        surprise: ``[rows]``, the rating less what the film's and the user's past let expect; a column of later rows' histories.
    """

    dense: dict[str, Floats]
    surprise: Floats


def past_features(data: Ratings, past: Past, items: ItemStatistics) -> PastFeatures:
    """Running statistics, each pulled towards the training mean where little is known."""
    centred = data.rating - data.rating[data.train].mean()
    liked = data.rating >= 4
    user_mean = past.mean(centred, 3.0)
    item_mean, item_quality = items.mean(centred), items.mean(centred - user_mean)
    lenience = centred - item_mean
    surprise = centred - user_mean - item_quality
    dense = {
        "user_mean": user_mean,
        "user_like_rate": past.mean(liked - liked[data.train].mean(), 3.0),
        "user_lenience": past.mean(lenience, 3.0),
        "user_lenience_5": past.mean(lenience, 2.0, 5),
        "user_lenience_20": past.mean(lenience, 3.0, 20),
        "user_spread": np.sqrt(np.maximum(0.0, past.mean(centred**2, 3.0))),
        "user_count": np.log1p(past.count),
        "item_mean": item_mean,
        "item_quality": item_quality,
        "item_count": np.log1p(items.count),
        "item_year": data.year,
        **_affinities(data, past, items, lenience),
        **_moments(data, past),
    }
    return PastFeatures(dense={name: _standardised(x, data.train) for name, x in dense.items()}, surprise=surprise)


def _affinities(data: Ratings, past: Past, items: ItemStatistics, lenience: Floats) -> dict[str, Floats]:
    """How far the user's earlier ratings of like films lie from the user's mean lenience, and how many there were: by genre, year, popularity."""
    usual = past.mean(lenience, 3.0)
    shares = past.sum(data.genres)
    excess = past.sum(data.genres * lenience[:, None]) - usual[:, None] * shares
    out = {"genre_affinity": (excess / (shares + 2.0) * data.genres).sum(1), "genre_count": np.log1p((shares * data.genres).sum(1))}
    popularity = np.log1p(items.count).astype(np.int64)
    for name, kind in (("year", data.release), ("popularity", popularity)):
        alike = earlier_events(data.user * (int(kind.max()) + 1) + kind, data.time, past.rule)
        out[f"{name}_affinity"] = (alike.sum(lenience) - usual * alike.count) / (alike.count + 2.0)
        out[f"{name}_count"] = np.log1p(alike.count)
    return out


def _moments(data: Ratings, past: Past) -> dict[str, Floats]:
    """The date, and the time since the user's last and first earlier events: 0 where there is none."""
    now = data.time.astype(np.float64)
    ordered, any_past = now[past.index.order], past.count > 0
    newest = np.where(any_past, ordered[np.maximum(past.end - 1, 0)], now)
    oldest = np.where(any_past, ordered[past.begin], now)
    return {"since_last": np.log1p(now - newest), "since_first": np.log1p(now - oldest), "date": now}


def _standardised(x: Floats, train: NDArray[np.bool_]) -> Floats:
    """NaN, a missing value, becomes the training mean."""
    known = x[train & ~np.isnan(x)]
    mean, deviation = (known.mean(), known.std()) if known.size else (0.0, 0.0)
    return np.nan_to_num(np.clip((x - mean) / (deviation + 1e-6), -4.0, 4.0))
