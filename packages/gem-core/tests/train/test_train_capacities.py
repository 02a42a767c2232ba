"""Capacities of graphs: batches seen and those of later windows fit, more capacities leave less room, levels are the cheapest there are."""

from dataclasses import replace
from itertools import combinations, pairwise
from statistics import NormalDist, fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.builtin.toy import SCHEMA, ToySource
from gem_core.train.capacities import SPREAD, STEP, Survey, capacities, levels
from gem_core.train.static_inputs import ROWS, Extents

Sizes = list[dict[str, int]]


def smallest_fit(found: Sizes, sizes: dict[str, int]) -> int | None:
    """The entries of the capacity that a batch takes."""
    return next((sum(each.values()) for each in found if all(each[name] >= size for name, size in sizes.items())), None)


def waste(found: Sizes, batches: Sizes) -> float:
    """Share of room left, of the batches that fit."""
    room = [(smallest_fit(found, sizes), sum(sizes.values())) for sizes in batches]
    return fmean(taken / used - 1 for taken, used in room if taken is not None)


def misses(found: Sizes, batches: Sizes) -> float:
    return fmean(smallest_fit(found, sizes) is None for sizes in batches)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([0.0, 30.0]))
def test_every_batch_seen_fits_a_capacity(sizes: list[tuple[int, int]], count: int, alone: float) -> None:
    seen = [{"a": a, "b": b} for a, b in sizes]
    found = capacities(seen, {"a": alone, "b": 0.0}, count)
    assert 1 <= len(found) <= count
    assert all(below[name] <= above[name] for below, above in pairwise(found) for name in "ab")
    assert len({tuple(each.values()) for each in found}) == len(found)
    assert found[-1]["a"] >= fmean(a for a, _ in sizes) + SPREAD * (pstdev(a for a, _ in sizes) ** 2 + 2 * alone / len(sizes)) ** 0.5 - 1e-6
    assert all(smallest_fit(found, each) is not None for each in seen)


def test_batches_that_are_all_alike_take_one_capacity_without_waste() -> None:
    assert capacities([{"a": 7, "b": 3}] * 5, {"a": 0.0, "b": 0.0}, 4) == [{"a": 7, "b": 3}]


def test_a_data_set_without_groups_has_one_capacity() -> None:
    assert capacities([{}, {}], {}, 4) == [{}]


# ---- levels -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
def test_levels_are_the_cheapest_of_all(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.capacities.STEP", 0.5)
    heights = [SPREAD - 0.5 * i for i in range(14, -1, -1)]

    def cost(chosen: list[float]) -> float:
        share = [NormalDist().cdf(height) ** groups for height in chosen]
        return sum(height * (above - below) for height, above, below in zip(chosen, share, [0.0, *share], strict=False))

    for count in (1, 2, 3):
        least = min(cost([*some, SPREAD]) for some in combinations(heights[:-1], count - 1))
        assert cost(levels(count, groups)) == pytest.approx(least)


def test_levels_rise_to_the_spread_and_with_the_number_of_groups() -> None:
    assert levels(1, 1) == [SPREAD]
    one, three = levels(4, 1), levels(4, 3)
    for found in (one, three):
        assert np.diff(found).min() > STEP / 2
        assert found[-1] == SPREAD
    assert all(below < above for below, above in zip(one[:-1], three[:-1], strict=True))


# ---- batches to come ----------------------------------------------------------------------------------------------------------------------


def windows(window: int, *, batches: int = 512, rows: int = 256, seed: int = 0) -> tuple[Sizes, dict[str, float]]:
    """Sizes of batches whose rows were dealt out evenly within windows of so many, and their variances if rows were independent."""
    lengths = np.random.default_rng(seed).lognormal(4.0, 0.8, (2, batches, rows)).astype(np.int64)
    even = lengths.sum(2).reshape(2, -1, window).mean(2).repeat(window, 1).astype(int)
    alone = rows * lengths.var((1, 2))
    return [{"a": int(a), "b": int(b)} for a, b in even.T], {"a": float(alone[0]), "b": float(alone[1])}


@pytest.mark.parametrize("window", [1, 8, 64])
def test_nearly_all_batches_of_later_windows_fit(window: int) -> None:
    found = []
    for seed in range(5):
        sizes, alone = windows(window, seed=seed)
        found.append(misses(capacities(sizes[:32], alone, 4), sizes[32:]))
    assert fmean(found) < 0.001


def test_planned_fault_what_one_window_varies_by_is_too_little_for_the_others() -> None:
    sizes, alone = windows(64)
    assert misses(capacities(sizes[:32], dict.fromkeys(alone, 0.0), 4), sizes[32:]) > 0.5


def test_more_capacities_leave_less_room_and_so_do_longer_windows() -> None:
    found = {window: windows(window) for window in (1, 8, 64)}
    room = {(window, count): waste(capacities(sizes[:32], alone, count), sizes) for window, (sizes, alone) in found.items() for count in (1, 2, 4, 8)}
    for window in found:
        assert room[window, 1] > 1.5 * room[window, 2] > 1.5 * room[window, 4] > 1.5 * room[window, 8] > 0
    assert room[1, 4] > 2 * room[8, 4] > 2 * room[64, 4]


# ---- surveys ------------------------------------------------------------------------------------------------------------------------------


def test_a_survey_takes_sizes_and_variances_of_its_batches() -> None:
    extents = Extents(SCHEMA, frozenset())
    survey = Survey(extents)
    batches = list(ToySource(rows=96).batches("train", batch_size=32))
    seen, alone = [], []
    for batch in batches:
        survey.add(batch, extents.sizes(batch))
        spans = {name: batch.event_offsets[name] if name in batch.event_offsets else batch.ids[name] for name in ("views", "buys", "tags")}
        lengths = {name: np.diff(span.offsets.numpy()) for name, span in spans.items()}
        seen.append({name: int(each.sum()) for name, each in lengths.items()})
        alone.append({name: 32 * float(each.var()) for name, each in lengths.items()})
    assert len(survey) == 3
    assert all(variance > 0 for each in alone for variance in each.values())
    mean = {name: fmean(each[name] for each in alone) for name in seen[0]}
    assert survey.capacities(4) == capacities(seen, mean, 4)


def test_a_survey_of_a_data_set_without_groups() -> None:
    extents = Extents(replace(SCHEMA, sequences=(), ids=SCHEMA.ids[:1]), frozenset())
    survey = Survey(extents)
    survey.add(next(ToySource(rows=8).batches("train", batch_size=8)), {ROWS: 8})
    assert survey.capacities(2) == [{}]


def test_a_survey_remembers_the_latest_batches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that outgrow every capacity are looked at as long as a run lasts."""
    monkeypatch.setattr("gem_core.train.capacities.KEPT", 2)
    extents = Extents(SCHEMA, frozenset())
    few, many = Survey(extents), Survey(extents)
    batches = list(ToySource(rows=96).batches("train", batch_size=32))
    for batch in batches:
        many.add(batch, extents.sizes(batch))
    for batch in batches[1:]:
        few.add(batch, extents.sizes(batch))
    assert len(many) == 2
    assert many.capacities(3) == few.capacities(3)
