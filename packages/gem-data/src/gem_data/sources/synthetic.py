"""Generated impressions whose true click probability is known for every row, so that the best possible AUC and NE are known too.

The log odds of a click add up a bias, effects of the item, of the user's group and of the hour, two numbers, and the share of recent events
that are in the item's category, where an event of age ``a`` counts ``1 / (1 + a / 10 days)``. Everything they depend on is in the features.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gem_core.spec import DataSchema, DenseFeature, IdFeature, SequenceFeature, Task
from gem_data.collate import Events, Spans, Table
from gem_data.history import Floats, Ints, PastIndex
from gem_data.ledger import Ledger
from gem_data.options import SyntheticOptions
from gem_data.score import expected_scores, scores, sigmoid
from gem_data.sources.base import TableSource

DAY = 86_400
START = 1_600_000_000
LOG_DAYS, TRAIN_FROM, TEST_FROM = 30, 10, 24
TAIL = 1.5
FADE = 10 * DAY


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """Items: ``popularity`` sums to 1, ``category`` from 0, ``effect`` on the log odds; each ``[items]``."""

    popularity: Floats
    category: Ints
    effect: Floats


@dataclass(frozen=True, kw_only=True)
class Log:
    """Events of all users sorted by (user, time): ``user``, ``item`` and ``time`` ``[events]``."""

    index: PastIndex
    item: Ints
    time: Ints


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """Rows; every array is ``[rows]``, ``numbers`` ``[rows, 2]``; ``begin`` and ``end`` are the history as a part of the log."""

    user: Ints
    group: Ints
    item: Ints
    time: Ints
    numbers: Floats
    begin: Ints
    end: Ints


class Synthetic(TableSource):
    """The source ``synthetic``. ``click`` and ``conversion`` hold the true probabilities ``[rows]``, training rows first."""

    def __init__(self, options: SyntheticOptions) -> None:
        rng = np.random.default_rng(options.seed)
        catalogue = _catalogue(rng, options)
        user_group = rng.integers(0, options.groups, options.users)
        log = _log(rng, catalogue, options)
        rows = _impressions(rng, catalogue, log, user_group, options)
        self.click, self.conversion = _probabilities(rng, catalogue, log, rows, options)
        clicked = rng.random(rows.user.size) < self.click
        labels = {"ctr": clicked}
        if options.conversion:
            labels["cvr"] = clicked & (rng.random(rows.user.size) < self.conversion)
        table = _table(catalogue, log, rows, labels, options)
        numbers = torch.arange(rows.user.size)
        super().__init__("synthetic", table, {"train": numbers[: options.rows], "test": numbers[options.rows :]}, Ledger(rows.user.size))

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """``bayes``: the true probabilities scored on the test labels; ``bayes expected``: their scores averaged over all labels they could draw."""
        test = self.index("test").numpy()
        out: dict[str, dict[str, dict[str, float]]] = {"bayes": {}, "bayes expected": {}}
        chance = {"ctr": np.ones(test.size), "cvr": self.click[test]}
        truth = {"ctr": self.click[test], "cvr": self.conversion[test]}
        for task, label in self.table.labels.items():
            seen = self.observed(task).numpy()[test]
            out["bayes"][task] = scores(label.numpy()[test][seen].astype(np.float64), truth[task][seen])
            out["bayes expected"][task] = expected_scores(truth[task], chance[task])
        return out


def load(**options: Any) -> Synthetic:
    """The source for these options (``SyntheticOptions``)."""
    return Synthetic(SyntheticOptions(**options))


def _catalogue(rng: np.random.Generator, options: SyntheticOptions) -> Catalogue:
    weights = np.arange(1, options.items + 1, dtype=np.float64) ** -options.zipf
    return Catalogue(
        popularity=weights / weights.sum(),
        category=np.arange(options.items) % options.categories,
        effect=rng.normal(0.0, 0.6, options.items),
    )


def _log(rng: np.random.Generator, catalogue: Catalogue, options: SyntheticOptions) -> Log:
    """Lengths follow a Pareto law with exponent 1.5 (infinite variance); every user prefers one category, half of the time."""
    lengths = np.floor(rng.pareto(TAIL, options.users) * options.mean_events * (TAIL - 1)).astype(np.int64)
    user = np.repeat(np.arange(options.users), lengths)
    favourite = rng.integers(0, options.categories, options.users)[user]
    item = rng.choice(options.items, user.size, p=catalogue.popularity)
    nearby = np.minimum(item - item % options.categories + favourite, options.items - 1)
    item = np.where(rng.random(user.size) < 0.5, nearby, item)
    time = START + rng.integers(0, LOG_DAYS * DAY, user.size)
    index = PastIndex(user, time)
    return Log(index=index, item=item[index.order], time=time[index.order])


def _impressions(rng: np.random.Generator, catalogue: Catalogue, log: Log, user_group: Ints, options: SyntheticOptions) -> Impressions:
    """Training rows of days 10 to 24 and test rows of days 24 to 30, each part in time order."""
    train = np.sort(rng.integers(TRAIN_FROM * DAY, TEST_FROM * DAY, options.rows))
    test = np.sort(rng.integers(TEST_FROM * DAY, LOG_DAYS * DAY, options.test_rows))
    time = START + np.concatenate([train, test])
    user = rng.integers(0, options.users, time.size)
    begin, end = log.index.before(user, time)
    return Impressions(
        user=user,
        group=user_group[user],
        item=rng.choice(options.items, time.size, p=catalogue.popularity),
        time=time,
        numbers=rng.normal(size=(time.size, 2)).astype(np.float32).astype(np.float64),
        begin=np.maximum(begin, end - options.history_length),
        end=end,
    )


def _probabilities(rng: np.random.Generator, catalogue: Catalogue, log: Log, rows: Impressions, options: SyntheticOptions) -> tuple[Floats, Floats]:
    """True probabilities ``[rows]`` of a click, and of a conversion after a click."""
    category = catalogue.category[rows.item]
    group = rng.normal(0.0, 0.5, options.groups)
    hour = 0.4 * np.sin(2 * np.pi * _hour(rows.time) / 24)
    match = recent_share(catalogue.category[log.item], log.time, category, rows)
    signal = catalogue.effect[rows.item] + group[rows.group] + hour + rows.numbers @ np.array([0.5, -0.3]) + 3.0 * match
    later = rng.normal(0.0, 0.7, options.categories)[category] + 0.5 * rows.numbers[:, 1]
    return sigmoid(options.base_logit + signal / options.temperature), sigmoid(-1.0 + later / options.temperature)


def recent_share(event_category: Ints, event_time: Ints, category: Ints, rows: Impressions) -> Floats:
    """``[rows]``: share of the history's weight in the row's category, an event of age ``a`` weighing ``1 / (1 + a / FADE)``; 0 without a history."""
    lengths = rows.end - rows.begin
    owner = np.repeat(np.arange(lengths.size), lengths)
    at = np.arange(owner.size) - np.repeat(np.cumsum(lengths) - lengths, lengths) + rows.begin[owner]
    weight = 1.0 / (1.0 + (rows.time[owner] - event_time[at]) / FADE)
    total = np.bincount(owner, weight, minlength=lengths.size)
    matching = np.bincount(owner, weight * (event_category[at] == category[owner]), minlength=lengths.size)
    return np.asarray(matching / np.where(total > 0, total, 1.0))


def _hour(time: Ints) -> Ints:
    return time // 3600 % 24


def _table(catalogue: Catalogue, log: Log, rows: Impressions, labels: dict[str, NDArray[np.bool_]], options: SyntheticOptions) -> Table:
    """Ids start at 1: row 0 of each table stays for unknown values."""
    item = IdFeature(name="item", cardinality=options.items + 1)
    category = IdFeature(name="category", cardinality=options.categories + 1)
    features = (item, category, IdFeature(name="user_group", cardinality=options.groups + 1), IdFeature(name="hour", cardinality=25))
    values = (rows.item, catalogue.category[rows.item], rows.group, _hour(rows.time))
    events = Events(
        spans=Spans(begin=torch.from_numpy(rows.begin), end=torch.from_numpy(rows.end)),
        ids={"item": torch.from_numpy(log.item) + 1, "category": torch.from_numpy(catalogue.category[log.item]) + 1},
        time=torch.from_numpy(log.time),
    )
    tasks = {"ctr": Task(name="ctr"), "cvr": Task(name="cvr", condition="ctr")}
    numbers = torch.from_numpy(rows.numbers.astype(np.float32))
    return Table(
        schema=DataSchema(
            ids=features,
            dense=(DenseFeature(name="number_1"), DenseFeature(name="number_2")),
            sequences=(SequenceFeature(name="history", ids=(item, category), time=True, max_length=options.history_length),),
            tasks=tuple(tasks[name] for name in labels),
            group=True,
        ),
        rows=rows.user.size,
        labels={name: torch.from_numpy(label.astype(np.float32)) for name, label in labels.items()},
        ids={feature.name: torch.from_numpy(value) + 1 for feature, value in zip(features, values, strict=True)},
        dense={"number_1": numbers[:, :1], "number_2": numbers[:, 1:]},
        events={"history": events},
        time=torch.from_numpy(rows.time),
        groups=torch.from_numpy(rows.user),
    )
