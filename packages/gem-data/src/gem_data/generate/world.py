"""What the generated data is made of. Every function here computes the asked rows alone: nothing is kept between calls.

A click has the log odds ``e`` of the visible features (item, group, hour, numbers) and is helped by what the history asks for:

    ``P(click) = (1 - m) sigmoid(e) + m sigmoid(e + match)``,  ``m = (1 - follow_up) w + follow_up z``

``w`` is the posterior probability, given the events of the current interest period, that the user's interest is the candidate's category; ``z`` is 1
when the candidate's category is the one that the last event's category and *age* lead to, and ``1 / categories`` without an event. The categories
of interests, of events and of candidates are uniform, and those of candidates independent of everything else. So, given everything but the history,
both ``w`` (a posterior of a uniform prior) and ``z`` average exactly ``1 / categories``, and with them ``m``: the best prediction without histories
is the same formula with ``m = 1 / categories``, whatever the lengths of the histories. (Everything: the user's number is no feature.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_data.generate.draws import Draws, Floats, Ints, chain, floor, unit, zipf
from gem_data.options import GeneratedOptions
from gem_data.score import sigmoid

DAY = 86_400
START = 1_600_000_000
TRAIN_FROM, TEST_FROM = 0.3, 0.85
ITEM_SCALE = 0.6
AGES = (3600, DAY)
"""Where the age of the last event changes what follows from it: the category 1, 2 or 3 places on."""


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Each ``[requests]``: ``number`` (unique over both splits), ``user``, ``time`` (seconds), and the part ``begin:end`` of the user's log."""

    number: Ints
    user: Ints
    time: Ints
    begin: Ints
    end: Ints


@dataclass(frozen=True, kw_only=True)
class Histories:
    """Events of the requests, oldest first: ``offsets`` ``[requests + 1]``; ``item`` and ``category`` from 0 and ``time``, each ``[events]``."""

    offsets: Ints
    item: Ints
    category: Ints
    time: Ints


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of the split that ``World`` was asked for; every array is ``[rows]``, ``numbers`` is ``[rows, 2]``.

    Args:
        request: the row's place in ``requests`` and ``histories``.
        click: the true probability of a click.
        blind: the same given everything but the history.
        conversion: the true probability of a conversion within the window, after a click.
        converted: whether one was seen when the labels were read.
        closed: whether the window had closed by then.
        delay: seconds from click to conversion, -1 where none was seen.
    """

    index: Ints
    requests: Requests
    histories: Histories
    request: Ints
    item: Ints
    category: Ints
    group: Ints
    hour: Ints
    numbers: Floats
    click: Floats
    blind: Floats
    conversion: Floats
    clicked: NDArray[np.bool_]
    converted: NDArray[np.bool_]
    closed: NDArray[np.bool_]
    delay: Ints

    def visible_ids(self) -> dict[str, Ints]:
        """The id features outside the history, from 0."""
        return {"item": self.item, "category": self.category, "user_group": self.group, "hour": self.hour}


class World:
    """The data set of these options."""

    def __init__(self, options: GeneratedOptions) -> None:
        self.options = options
        self._draws = Draws(options.seed)
        self.horizon = options.days * DAY
        self.test_start = START + int(TEST_FROM * self.horizon)

    def split_rows(self, split: str) -> int:
        return {"train": self.options.rows, "test": self.options.test_rows}[split]

    def rows(self, split: str, index: Ints) -> Rows:
        """The rows ``index`` ``[rows]`` int64 of a split, in that order."""
        first = 0 if split == "train" else self.options.rows
        number, request = np.unique(index // self.options.candidates, return_inverse=True)
        requests = self._requests(split, number)
        histories, match = self._histories(requests)
        return self._rows(split, index, index + first, requests, histories, match, request)

    def history_lengths(self, split: str, number: Ints) -> Ints:
        """Events in the histories of the requests ``number`` of a split."""
        requests = self._requests(split, number)
        return requests.end - requests.begin

    def lengths(self, users: Ints) -> Ints:
        """Events of each user's whole log: a Lomax law, floored and capped."""
        o = self.options
        heavy = (1.0 - self._draws.uniform("length", users)) ** (-1.0 / o.tail) - 1.0
        return floor(np.minimum(heavy * o.mean_events * (o.tail - 1.0), o.max_events))

    def _requests(self, split: str, number: Ints) -> Requests:
        """Times rise with the number: request ``n`` of ``N`` falls into the ``n``-th of ``N`` equal parts of the split's days."""
        o = self.options
        total = -(-self.split_rows(split) // o.candidates)
        low, high = (START + int(TRAIN_FROM * self.horizon), self.test_start) if split == "train" else (self.test_start, START + self.horizon)
        time = low + floor((number + self._draws.uniform(f"time {split}", number)) / total * (high - low))
        user = self._draws.integers(f"user {split}", o.users, number)
        lengths = self.lengths(user)
        step = self.horizon / np.maximum(lengths, 1)
        end = np.minimum(floor((time - START) / step), lengths)
        due = end < lengths
        end += due & (self._event_time(user, end, step) < time)
        before = 0 if split == "train" else -(-o.rows // o.candidates)
        return Requests(number=number + before, user=user, time=time, begin=np.maximum(end - o.history_length, 0), end=end)

    def _event_time(self, user: Ints, place: Ints, step: Floats) -> Ints:
        """Event ``j`` falls into the ``j``-th of equal parts of the days; short of the part's end, so that rounding does not carry it over."""
        return START + floor((place + 0.999 * self._draws.uniform("event time", user, place)) * step)

    def _histories(self, requests: Requests) -> tuple[Histories, Floats]:
        """The events, and ``[requests, categories]``: how much the history asks for each category (``m``)."""
        o, draws = self.options, self._draws
        size = requests.end - requests.begin
        offsets = np.concatenate([[0], np.cumsum(size)])
        owner = np.repeat(np.arange(size.size), size)
        place = np.arange(owner.size) - (offsets[:-1] - requests.begin)[owner]
        user = requests.user[owner]
        time = self._event_time(user, place, (self.horizon / np.maximum(self.lengths(requests.user), 1))[owner])
        period = (time - START) // (o.interest_days * DAY)
        key = draws.words("event", user, place)
        drawn = unit(key)
        other = floor((drawn - o.interest) / (1.0 - o.interest) * o.categories)
        category = np.where(drawn < o.interest, draws.integers("interest", o.categories, user, period), np.minimum(other, o.categories - 1))
        rank = zipf(unit(chain(key, np.array([1]))), o.items // o.categories, o.zipf)
        histories = Histories(offsets=offsets, item=(rank - 1) * o.categories + category, category=category, time=time)
        current = period == ((requests.time - START) // (o.interest_days * DAY))[owner]
        counts = np.bincount(owner[current] * o.categories + category[current], minlength=size.size * o.categories)
        asked = (1.0 - o.follow_up) * interest_posterior(counts.reshape(-1, o.categories), o.interest)
        return histories, asked + o.follow_up * follow_up(histories, requests.time, o.categories)

    def _rows(self, split: str, index: Ints, key: Ints, requests: Requests, histories: Histories, match: Floats, request: Ints) -> Rows:
        o, draws = self.options, self._draws
        time = requests.time[request]
        category = draws.integers("candidate category", o.categories, key)
        item = (zipf(draws.uniform("candidate", key), o.items // o.categories, o.zipf) - 1) * o.categories + category
        group = draws.integers("group", o.groups, requests.user)[request]
        hour = time // 3600 % 24
        numbers = np.stack([draws.normal(f"number {k}", key) for k in (1, 2)], axis=1).astype(np.float32).astype(np.float64)
        plain, helped = self._click_odds(item, group, hour, numbers, time)
        click = plain + match[request, category] * (helped - plain)
        mean_delay = o.delay_days * DAY * np.exp(0.5 * draws.normal("delay of category", category))
        ever = sigmoid(-1.0 + 0.7 * draws.normal("conversion of category", category) + 0.5 * numbers[:, 1])
        window = o.window_days * DAY
        clicked = draws.uniform("click", key) < click
        delay = floor(-np.log1p(-draws.uniform("delay", key)) * mean_delay)
        # Training labels are read when the test days begin, test labels when every window has closed.
        age = np.minimum(self.test_start - time, window) if split == "train" else np.full(time.size, window)
        converted = clicked & (draws.uniform("conversion", key) < ever) & (delay < age)
        return Rows(
            index=index,
            requests=requests,
            histories=histories,
            request=request,
            item=item,
            category=category,
            group=group,
            hour=hour,
            numbers=numbers,
            click=click,
            blind=plain + (helped - plain) / o.categories,
            conversion=ever * -np.expm1(-np.ceil(window) / mean_delay),
            clicked=clicked,
            converted=converted,
            closed=age >= window,
            delay=np.where(converted, delay, -1),
        )

    def _click_odds(self, item: Ints, group: Ints, hour: Ints, numbers: Floats, time: Ints) -> tuple[Floats, Floats]:
        """``sigmoid(e)`` and ``sigmoid(e + match)``."""
        o, draws = self.options, self._draws
        turn = o.drift * (time - START) / self.horizon
        effect = ITEM_SCALE * (np.cos(turn) * draws.normal("item", item) + np.sin(turn) * draws.normal("item later", item))
        signal = effect + 0.5 * draws.normal("effect of group", group) + 0.4 * np.sin(2 * np.pi * hour / 24) + numbers @ np.array([0.5, -0.3])
        return sigmoid(o.base_logit + signal), sigmoid(o.base_logit + signal + o.match)


def interest_posterior(counts: Ints, interest: float) -> Floats:
    """``[requests, categories]``: probability that each category is the interest, given ``counts`` of this period's events, of the same shape.

    The prior is uniform; an event is of the interest's category with probability ``interest + (1 - interest) / categories`` and of any other
    with ``(1 - interest) / categories``.
    """
    odds = np.log1p(interest * counts.shape[1] / (1.0 - interest)) * counts
    odds -= odds.max(axis=1, keepdims=True)
    weight = np.exp(odds)
    return np.asarray(weight / weight.sum(axis=1, keepdims=True))


def follow_up(histories: Histories, time: Ints, categories: int) -> Floats:
    """``[requests, categories]``: 1 at the category that the last event leads to; ``1 / categories`` everywhere without an event."""
    out = np.full((time.size, categories), 1.0 / categories)
    have = np.flatnonzero(np.diff(histories.offsets))
    last = histories.offsets[1:][have] - 1
    shift = 1 + np.searchsorted(AGES, time[have] - histories.time[last], side="right")
    out[have] = 0.0
    out[have, (histories.category[last] + shift) % categories] = 1.0
    return out
