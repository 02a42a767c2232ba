"""Numbers about a rating's user, item and moment that were known before it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_data.history import Floats, Ints, PastIndex, RunningSum


@dataclass(frozen=True, kw_only=True)
class Ratings:
    """Ratings in stable time order; every array is ``[rows]`` and lines up.

    Args:
        user: user codes, 0 or more.
        item: item codes, 0 or more.
        rating: stars, 1 to 5.
        time: seconds.
        genres: ``[rows, genres]``, each row sums to 1, or to 0 where no genre is known.
        train: True for training rows.
    """

    user: Ints
    item: Ints
    rating: Floats
    time: Ints
    genres: Floats
    train: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class UserPast:
    """Each row's earlier events of the same user, as a part of ``index.order``."""

    index: PastIndex
    begin: Ints
    end: Ints

    def last(self, count: int) -> Ints:
        """Where the last ``count`` events begin."""
        return np.maximum(self.begin, self.end - count)


def user_past(user: Ints, time: Ints, rule: str) -> UserPast:
    """Earlier events: ``strict`` by timestamp, ``order`` by place in the stable time order."""
    index = PastIndex(user, time)
    begin, end = index.before(user, time)
    return UserPast(index=index, begin=begin, end=end if rule == "strict" else index.positions())


@dataclass(frozen=True, kw_only=True)
class PastFeatures:
    """Args:
    dense: ``{name: [rows]}``, mean 0 and deviation 1 over the training rows, cut at 4 deviations.
    surprise: ``[rows]``, the rating less what the item's and the user's past let expect; a column of later rows' histories.
    """

    dense: dict[str, Floats]
    surprise: Floats


def past_features(data: Ratings, past: UserPast) -> PastFeatures:
    """Running statistics, each pulled towards the training mean where little is known."""
    liked = data.rating >= 4
    centred = data.rating - data.rating[data.train].mean()
    items = PastIndex(data.item[data.train], data.time[data.train])
    seen = items.before(data.item, data.time)
    item_mean = RunningSum(items, centred[data.train]).shrunk_mean(*seen, 5.0)

    residual = centred - item_mean
    lenience = RunningSum(past.index, residual)
    user_lenience = lenience.shrunk_mean(past.begin, past.end, 3.0)
    affinity, genre_count = _genre_affinity(data.genres, residual, user_lenience, past)
    whole = (past.begin, past.end)
    now = data.time.astype(np.float64)
    count = past.end - past.begin
    in_order = now[past.index.order]
    newest = np.where(count > 0, in_order[np.maximum(past.end - 1, 0)], now)
    oldest = np.where(count > 0, in_order[np.minimum(past.begin, now.size - 1)], now)
    dense = {
        "user_mean": RunningSum(past.index, centred).shrunk_mean(*whole, 3.0),
        "user_like_rate": RunningSum(past.index, liked - liked[data.train].mean()).shrunk_mean(*whole, 3.0),
        "user_lenience": user_lenience,
        "user_lenience_5": lenience.shrunk_mean(past.last(5), past.end, 2.0),
        "user_lenience_20": lenience.shrunk_mean(past.last(20), past.end, 3.0),
        "user_spread": np.sqrt(np.maximum(0.0, RunningSum(past.index, centred**2).shrunk_mean(*whole, 3.0))),
        "user_count": np.log1p(count),
        "genre_affinity": affinity,
        "genre_count": np.log1p(genre_count),
        "item_mean": item_mean,
        "item_count": np.log1p(seen[1] - seen[0]),
        "since_last": np.log1p(now - newest),
        "since_first": np.log1p(now - oldest),
        "date": now,
    }
    return PastFeatures(dense={name: _standardised(x, data.train) for name, x in dense.items()}, surprise=residual - user_lenience)


def _genre_affinity(genres: Floats, residual: Floats, user_lenience: Floats, past: UserPast) -> tuple[Floats, Floats]:
    """How much more than usual the user liked earlier films of this film's genres, and how many there were."""
    shares = RunningSum(past.index, genres).over(past.begin, past.end)
    residuals = RunningSum(past.index, genres * residual[:, None]).over(past.begin, past.end)
    excess = (residuals - user_lenience[:, None] * shares) / (shares + 2.0)
    return (excess * genres).sum(1), (shares * genres).sum(1)


def _standardised(x: Floats, train: NDArray[np.bool_]) -> Floats:
    return np.asarray(np.clip((x - x[train].mean()) / (x[train].std() + 1e-6), -4.0, 4.0))
