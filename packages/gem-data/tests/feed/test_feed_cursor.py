"""Resuming: a run killed at any step goes on with any number of ranks and trains each row once; with the same ranks as if it had not been cut."""

import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch
from gem_core.spec import RequestError, Shard
from gem_data.feed.cursor import Cursor, Trained
from gem_data.feed.units import Unit

ROWS = 150
QUICK = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(kit: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = kit.make_table(ROWS)
    made: Path = kit.write_folder(
        tmp_path_factory.mktemp("resume"),
        {"train-0.parquet": table.slice(0, 83), "train-1.parquet": table.slice(83), "test.parquet": table.slice(0, 9)},
    )
    return made


class Ranks:
    """So many ranks in one process, each with a source of its own, in step as the trainer keeps them (``uneven = pad``)."""

    def __init__(self, kit: ModuleType, folder: Path, world: int, states: Sequence[Any] = (), **options: Any) -> None:
        self.sources = [kit.open_source(folder, **{"workers": 0, **options}) for _ in range(world)]
        for source in self.sources:
            if states:
                source.restore(states)

    def steps(self, epoch: int, *, batch_size: int, seed: int | None) -> Iterator[list[list[int]]]:
        """The rows of each rank at each step; a step counts as trained when the next one is asked for."""
        world = len(self.sources)
        own = [
            source.batches("train", batch_size=batch_size, shard=Shard(rank=rank, world=world), seed=seed, epoch=epoch)
            for rank, source in enumerate(self.sources)
        ]
        while True:
            batches: list[Batch | None] = [next(iterator, None) for iterator in own]
            if all(batch is None for batch in batches):
                return
            for source, batch in zip(self.sources, batches, strict=True):
                source.trained([] if batch is None else [batch])
            yield [[] if batch is None or batch.origin is None else batch.origin.tolist() for batch in batches]

    def save(self) -> list[Any]:
        """The states of all ranks, through a checkpoint's way of writing and reading, and plain enough for JSON."""
        states = [source.cursor() for source in self.sources]
        file = BytesIO()
        torch.save({"data": states}, file)
        file.seek(0)
        read: list[Any] = torch.load(file, weights_only=True)["data"]
        assert json.loads(json.dumps(states)) == read
        return read


POLICIES = st.sampled_from([{}, {"balance": "lpt"}, {"balance": "bbs"}, {"batch_tokens": 60}, {"batch_tokens": 60, "balance": "cost"}])


@QUICK
@given(
    worlds=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=2, max_size=4),
    stops=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    batch_size=st.sampled_from([4, 16, 17]),
    windows=st.lists(st.sampled_from([1, 40, 10_000]), min_size=4, max_size=4),
    seed=st.none() | st.integers(0, 3),
    options=POLICIES,
)
def test_case_E04_each_row_once_whatever_ranks_and_windows_a_run_goes_on_with(
    kit: ModuleType,
    folder: Path,
    worlds: list[int],
    stops: list[int],
    batch_size: int,
    windows: list[int],
    seed: int | None,
    options: dict[str, Any],
) -> None:
    """Up to three kills in one epoch; then the next epoch is whole."""
    seen: list[int] = []
    states: list[Any] = []
    for i, world in enumerate(worlds):
        ranks = Ranks(kit, folder, world, states, window=windows[i], **options)
        stop = stops[i] if i < len(worlds) - 1 else 10**9
        steps = ranks.steps(2, batch_size=batch_size, seed=seed)
        for taken, step in enumerate(steps):
            seen += [row for rows in step for row in rows]
            if taken + 1 >= stop:
                break
        steps.close()
        states = ranks.save()
    assert sorted(seen) == list(range(ROWS))
    again = [row for step in Ranks(kit, folder, 2, states, **options).steps(3, batch_size=batch_size, seed=seed) for rows in step for row in rows]
    assert sorted(again) == list(range(ROWS)), "a cursor of one epoch means nothing to the next"


@QUICK
@given(
    world=st.sampled_from([1, 2, 3]),
    stop=st.integers(1, 9),
    again=st.integers(1, 3),
    batch_size=st.sampled_from([4, 16, 17]),
    seed=st.none() | st.integers(0, 3),
)
def test_with_the_same_ranks_the_run_goes_on_exactly_as_if_it_had_not_been_cut(
    kit: ModuleType, folder: Path, world: int, stop: int, again: int, batch_size: int, seed: int | None
) -> None:
    whole = list(Ranks(kit, folder, world).steps(0, batch_size=batch_size, seed=seed))
    parts: list[list[list[int]]] = []
    states: list[Any] = []
    for length in (stop, again, 10**9):
        ranks = Ranks(kit, folder, world, states)
        for step in ranks.steps(0, batch_size=batch_size, seed=seed):
            parts.append(step)
            length -= 1
            if not length:
                break
        states = ranks.save()
    assert parts == whole


def test_it_also_goes_on_exactly_after_the_ranks_have_changed_once(kit: ModuleType, folder: Path) -> None:
    def take(ranks: Ranks, count: int) -> list[list[list[int]]]:
        return [step for _, step in zip(range(count), ranks.steps(0, batch_size=16, seed=1), strict=False)]

    one = Ranks(kit, folder, 1)
    take(one, 3)
    states = one.save()
    whole = take(Ranks(kit, folder, 2, states), 99)
    two = Ranks(kit, folder, 2, states)
    first = take(two, 2)
    assert [*first, *take(Ranks(kit, folder, 2, two.save()), 99)] == whole


def test_case_F04_what_is_left_is_dealt_evenly_to_more_ranks(kit: ModuleType, folder: Path) -> None:
    one = Ranks(kit, folder, 1)
    steps = one.steps(0, batch_size=16, seed=1)
    for _ in range(4):
        next(steps)
    rest = list(Ranks(kit, folder, 4, one.save()).steps(0, batch_size=16, seed=1))
    assert [sum(len(rows) for rows in step) for step in rest] == [16] * 5 + [6]
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in rest)


def test_batches_that_were_read_ahead_are_not_trained(kit: ModuleType, folder: Path) -> None:
    """A checkpoint counts steps, not what workers have prepared."""
    source = kit.open_source(folder, workers=2)
    batches = source.batches("train", batch_size=16, seed=1)
    first, second = next(batches), next(batches)
    source.trained([first])
    rest = kit.open_source(folder)
    rest.restore([source.cursor()])
    left = kit.origins(rest.batches("train", batch_size=16, seed=1))
    assert sorted(left + first.origin.tolist()) == list(range(ROWS))
    assert set(second.origin.tolist()) <= set(left)
    batches.close()


def test_evaluating_while_training_leaves_the_cursor_alone(kit: ModuleType, folder: Path) -> None:
    source = kit.open_source(folder)
    batches = source.batches("train", batch_size=16, seed=1)
    source.trained([next(batches)])
    before = source.cursor()
    assert len(kit.origins(source.batches("test", batch_size=4))) == 9
    assert source.cursor() == before
    batches.close()


def test_other_files_or_row_groups_are_refused(kit: ModuleType, folder: Path, tmp_path: Path) -> None:
    state = kit.open_source(folder).cursor()
    other = kit.write_folder(tmp_path, {"train.parquet": kit.make_table(ROWS), "test.parquet": kit.make_table(3)}, unit=32)
    with pytest.raises(RequestError, match="its cursor was written over other files"):
        kit.open_source(other).restore([state])


def test_a_finished_epoch_has_nothing_left(kit: ModuleType, folder: Path) -> None:
    ranks = Ranks(kit, folder, 2)
    list(ranks.steps(0, batch_size=16, seed=1))
    assert [state["trained"]["some"] == {} or state["trained"]["whole"] for state in ranks.save()]
    assert list(Ranks(kit, folder, 3, ranks.save()).steps(0, batch_size=16, seed=1)) == []


# The account of rows.


def units(*rows: int) -> list[Unit]:
    first = np.cumsum([0, *rows[:-1]]).tolist()
    return [Unit(Path("f.parquet"), i, count, first[i]) for i, count in enumerate(rows)]


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=6), data=st.data())
def test_trained_rows_survive_writing_and_merging(sizes: list[int], data: st.DataObject) -> None:
    total = sum(sizes)
    one, two = (data.draw(st.sets(st.integers(0, total - 1))) for _ in range(2))
    merged = Trained(units(*sizes))
    for rows in (one, two):
        part = Trained(units(*sizes))
        part.add(np.array(sorted(rows), dtype=np.int64))
        merged.merge(part.state())
    left = [unit.first + int(row) for unit in units(*sizes) for row in merged.left(unit.index, np.arange(unit.rows))]
    assert set(range(total)) - set(left) == one | two
    assert sum(merged.count(unit) for unit in range(len(sizes))) == len(one | two)


def test_the_state_is_small() -> None:
    """A hundred units that are done and two that are not: a range and a bit a row."""
    many = Trained(units(*[16_384] * 102))
    many.add(np.arange(100 * 16_384))
    many.add(np.arange(100 * 16_384, 102 * 16_384, 2))
    state = many.state()
    assert state["whole"] == [[0, 99]]
    assert len(json.dumps(state)) < 2 * 16_384 / 4 + 100


def test_ranges_do_not_swallow_gaps() -> None:
    some = Trained(units(2, 2, 2, 2))
    some.add(np.array([0, 1, 4, 5, 6, 7]))
    assert some.state() == {"whole": [[0, 0], [2, 3]], "some": {}}


def test_only_the_first_rank_keeps_what_was_trained_before_the_dealing() -> None:
    cursor = Cursor(units(4, 4))
    cursor.begin(0, 0, [2, 4, 8, 0])
    assert cursor.state(0)["base"] == {"whole": [], "some": {}}
    assert cursor.state(1)["base"] is None
