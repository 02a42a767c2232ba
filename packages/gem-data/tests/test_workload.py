"""The source ``workload``: rows alone, lengths by their law, balanced batches that account for every row, labels that histories explain."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gem_core.batch import Batch, KeyedJagged
from gem_core.spec import RequestError, Shard
from gem_data.generate.draws import GOLDEN, Draws, mix
from gem_data.options import SequenceShape, WorkloadOptions
from gem_data.score import ne
from gem_data.sources.workload import Workload, load

SHAPES = ({"name": "views", "lengths": "lognormal", "mean": 20.0, "longest": 90}, {"name": "buys", "lengths": "zipf", "longest": 40})
SMALL: dict[str, Any] = {"rows": 700, "test_rows": 60, "items": 200, "categories": 5, "users": 30, "workers": 0, "sequences": SHAPES}


def source(**options: Any) -> Workload:
    return load(**{**SMALL, **options})


def read(made: Workload, split: str = "train", **how: Any) -> list[Batch]:
    return list(made.batches(split, **{"batch_size": 50, **how}))


def rows_of(batches: Sequence[Batch]) -> Counter[tuple[Any, ...]]:
    """Every row as plain values, counted: its ids, numbers, label, time, and its events."""
    found: Counter[tuple[Any, ...]] = Counter()
    for batch in batches:
        for r in range(batch.rows):
            events = []
            for name, span in batch.event_offsets.items():
                part = slice(int(span.offsets[r]), int(span.offsets[r + 1]))
                columns = (batch.ids[f"{name}.item"].values, batch.ids[f"{name}.category"].values, batch.event_time[name])
                events.append(tuple(tuple(column[part].tolist()) for column in columns))
            single = tuple(int(batch.ids[key].values[r]) for key in ("item", "category", "user"))
            assert batch.time is not None
            found[single, float(batch.labels["ctr"][r]), int(batch.time[r]), float(batch.dense["number_1"][r, 0]), tuple(events)] += 1
    return found


def events_by_group(batches: Sequence[Batch]) -> np.ndarray:
    """``[batches, sequences]``."""
    return np.array([[int(span.offsets[-1]) for span in batch.event_offsets.values()] for batch in batches])


ALL = rows_of(read(source()))


@pytest.mark.parametrize(
    "how",
    [
        {"batch_size": 7},
        {"seed": 3, "epoch": 2},
        {"seed": 3, "batch_size": 699},
    ],
)
@pytest.mark.parametrize("options", [{}, {"balance": "lpt"}, {"balance": "lpt", "workers": 2}])
def test_every_row_is_in_one_batch_whatever_their_order(options: dict[str, Any], how: dict[str, Any]) -> None:
    batches = read(source(**options), **how)
    assert rows_of(batches) == ALL
    size = how.get("batch_size", 50)
    assert [batch.rows for batch in batches] == [size] * (700 // size) + [700 % size] * (700 % size > 0)


def test_the_order_depends_on_seed_and_epoch_and_not_on_workers() -> None:
    first = read(source(), seed=1)
    assert all(torch.equal(a.ids.values, b.ids.values) for a, b in zip(first, read(source(workers=3), seed=1), strict=True))
    for other in ({"seed": 2}, {"seed": 1, "epoch": 1}):
        assert not torch.equal(first[0].ids.values, read(source(), **other)[0].ids.values)


@pytest.mark.parametrize("workers", [0, 2])
def test_with_workers_the_training_thread_neither_deals_rows_out_nor_makes_batches(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    threads: set[int] = set()

    def told(method: str) -> None:
        plain = getattr(Workload, method)
        monkeypatch.setattr(Workload, method, lambda *given: threads.add(get_ident()) or plain(*given))

    told("_dealt"), told("_batch")
    assert len(read(source(workers=workers, balance="lpt"))) == 14
    assert (get_ident() in threads) == (workers == 0)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    world=st.integers(1, 5),
    batch_size=st.integers(1, 120),
    start=st.integers(0, 9),
    balance=st.sampled_from(["none", "lpt"]),
    window=st.integers(1, 20),
)
def test_ranks_share_each_global_batch_and_a_later_start_goes_on(world: int, batch_size: int, start: int, balance: str, window: int) -> None:
    made = source(rows=200, balance=balance, window=window)
    whole = [read(made, batch_size=batch_size, shard=Shard(rank=r, world=world), seed=1) for r in range(world)]
    assert rows_of([batch for rank in whole for batch in rank]) == rows_of(read(made, batch_size=batch_size))
    assert len({len(rank) for rank in whole}) == 1
    for together in zip(*whole, strict=True):
        assert sum(batch.rows for batch in together) == together[0].global_rows <= batch_size
        assert max(batch.rows for batch in together) - min(batch.rows for batch in together) <= 1
    later = read(made, batch_size=batch_size, shard=Shard(rank=0, world=world), seed=1, start=start)
    assert rows_of(later) == rows_of(whole[0][start:])


def test_balanced_batches_have_nearly_as_many_events_of_each_kind() -> None:
    shapes = ({"name": "views", "mean": 60.0, "longest": 600}, {"name": "buys", "mean": 15.0, "longest": 150})
    options: dict[str, Any] = {"rows": 2048, "sequences": shapes}
    plain, balanced = (events_by_group(read(source(balance=balance, **options), batch_size=256)) for balance in ("none", "lpt"))
    assert plain.sum(0).tolist() == balanced.sum(0).tolist()
    assert (plain.max(0) / plain.mean(0) - 1 > 0.05).all()
    assert (balanced.max(0) / balanced.mean(0) - 1 < 0.002).all()


def test_ranks_have_nearly_as_many_events_of_each_kind() -> None:
    shapes = ({"name": "views", "mean": 60.0, "longest": 600}, {"name": "buys", "mean": 15.0, "longest": 150})
    made = source(rows=2048, sequences=shapes, balance="lpt", window=2)
    events = np.stack([events_by_group(read(made, batch_size=1024, shard=Shard(rank=r, world=4))) for r in range(4)])
    assert events.shape == (4, 2, 2)
    assert (events.max((0, 1)) / events.mean((0, 1)) - 1 < 0.002).all()


def test_a_longer_window_makes_windows_more_alike() -> None:
    def deviation(window: int) -> float:
        events = events_by_group(read(source(rows=3200, balance="lpt", window=window), batch_size=100)).sum(1)
        return float(events.std() / events.mean())

    assert deviation(32) < deviation(8) / 2 < deviation(2) / 2


@pytest.mark.parametrize(
    ("shape", "mean", "most", "share_of_most"),
    [
        ({"lengths": "fixed", "longest": 7}, 7.0, 7, 1.0),
        ({"lengths": "uniform", "shortest": 1, "longest": 1400}, 700.5, 1400, 1 / 1400),
        ({"lengths": "zipf", "longest": 4096}, 969.0, 4096, 4096**-0.2),  # sum of n ** -0.2; P(n >= 4096)
        ({"lengths": "lognormal", "mean": 100.0, "sigma": 0.5, "longest": 5000}, 100.0, 5000, 0.0),
        ({"lengths": "lognormal", "mean": 100.0, "sigma": 0.0, "longest": 60}, 60.0, 60, 1.0),
    ],
)
def test_lengths_follow_their_law(shape: dict[str, Any], mean: float, most: int, share_of_most: float) -> None:
    made = source(sequences=({"name": "history", **shape},))
    lengths = made.columns(np.arange(60_000)).lengths["history"]
    assert lengths.min() >= shape.get("shortest", 0)
    assert lengths.max() <= most
    assert lengths.mean() == pytest.approx(mean, rel=0.02)
    assert (lengths == most).mean() == pytest.approx(share_of_most, rel=0.05, abs=1e-3)


def test_items_follow_zipf_and_events_the_interest() -> None:
    made = source(rows=2000, interest=0.6)
    (batch,) = read(made, batch_size=2000)
    categories = batch.ids["views.category"].values.numpy() - 1
    row = np.repeat(np.arange(2000), np.diff(batch.event_offsets["views"].offsets.numpy()))
    interest = made.columns(np.arange(2000)).interest
    assert (categories == interest[row]).mean() == pytest.approx(0.6 + 0.4 / 5, abs=0.01)
    items = batch.ids["views.item"].values.numpy() - 1
    assert np.array_equal(items % 5, categories)
    counts = np.bincount(items // 5, minlength=40)
    assert counts[0] / counts[1] == pytest.approx(np.log(2) / np.log(1.5), rel=0.1)  # each rank n has the weight of [n, n + 1]
    assert int(batch.ids.values.min()) >= 1
    for key, feature in made.schema().all_id_features().items():
        assert int(batch.ids[key].values.max()) < feature.cardinality


def one_event(made: Workload, name: str, row: int, later: int) -> tuple[int, int, int]:
    """Item, category and time of the event that is ``later`` (1: the newest) of a row, by themselves, in whole numbers where that matters."""
    o, draw, number = made.options, Draws(made.options.seed), np.array([row])
    columns = made.columns(number)
    word = int(mix(np.array([(int(draw.words(f"events {name}", number)[0]) + later * int(GOLDEN)) % 2**64], np.uint64))[0])
    own = word % 2**16 < int(o.interest * 2**16)
    category = int(columns.interest[0]) if own else word // 2**16 % 2**16 * o.categories // 2**16
    each = o.items // o.categories
    place = int(np.exp(np.float32(word >> 40) * np.float32(2.0**-24) * np.float32(np.log1p(each))))
    item = (min(place, each) - 1) * o.categories + category
    pace = 60 + int(draw.uniform(f"pace {name}", number)[0] * 3540)
    return item + 1, category + 1, int(columns.time[0]) - later * pace


@pytest.mark.parametrize("piece", [1, 17, 1 << 15])
def test_each_event_is_the_one_computed_alone_whatever_is_computed_with_it(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Rows without events, rows longer than a piece, and pieces of several rows."""
    monkeypatch.setattr("gem_data.sources.workload.PIECE", piece)
    made = source(rows=40, sequences=({"name": "views", "mean": 8.0, "sigma": 1.6, "longest": 70},))
    (batch,) = read(made, batch_size=40)
    found = [batch.ids["views.item"].values, batch.ids["views.category"].values, batch.event_time["views"]]
    offsets = batch.event_offsets["views"].offsets.tolist()
    assert min(np.diff(offsets)) == 0
    assert max(np.diff(offsets)) > 30
    for row, (start, stop) in enumerate(pairwise(offsets)):
        expected = [one_event(made, "views", row, stop - at) for at in range(start, stop)]
        assert list(zip(*(column[start:stop].tolist() for column in found), strict=True)) == expected


def test_events_are_in_order_and_before_the_row() -> None:
    for batch in read(source(rows=100)):
        for name, span in batch.event_offsets.items():
            times, offsets = batch.event_time[name].numpy(), span.offsets.numpy()
            assert batch.time is not None
            for r in range(batch.rows):
                mine = times[offsets[r] : offsets[r + 1]]
                assert (np.diff(mine) > 0).all()
                assert mine.size == 0 or mine[-1] < int(batch.time[r])


def test_labels_can_be_learnt_from_histories_and_not_without() -> None:
    made = source(rows=4000, test_rows=4000, sequences=({"name": "views", "mean": 40.0, "longest": 200},))
    oracle = made.baselines()["oracle"]["ctr"]
    assert oracle["ne"] < 0.85
    (batch,) = read(made, batch_size=4000)
    rows, label = made.columns(np.arange(4000)), batch.labels["ctr"].numpy().astype(np.float64)
    assert ne(label, rows.click) == pytest.approx(oracle["ne"], abs=0.04)
    row = np.repeat(np.arange(4000), rows.lengths["views"])
    seen = np.zeros((4000, 5))
    np.add.at(seen, (row, batch.ids["views.category"].values.numpy() - 1), 1)
    shown = rows.lengths["views"] > 8
    assert (seen.argmax(1) == rows.interest)[shown].mean() > 0.95
    matches = shown & (seen.argmax(1) == rows.category)
    assert label[matches].mean() > label[shown & ~matches].mean() + 0.2


def test_splits_are_other_rows_and_the_ledger_counts_them() -> None:
    made = source()
    assert not set(rows_of(read(made, "test"))) & set(ALL)
    assert made.ledger() == {"read": 760, "train": 700, "test": 60}
    with pytest.raises(RequestError, match="the splits are train, test"):
        made.rows("valid")


@pytest.mark.parametrize("how", [{"batch_size": 0}, {"start": -1}, {"seed": -1}, {"shard": Shard(rank=2, world=2)}])
def test_batches_that_cannot_be_are_refused_at_once(how: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="a rank below the world size"):
        source().batches("train", **{"batch_size": 5, **how})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"items": 201}, "no multiple of categories"),
        ({"sequences": ({"name": "a"}, {"name": "a"})}, "share a name: a, a"),
        ({"sequences": ()}, "at least 1"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        WorkloadOptions(**{**SMALL, **options})


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="shortest = 9 is more than longest = 8"):
        SequenceShape(shortest=9, longest=8)


@pytest.mark.parametrize("how", [{}, {"batch_size": 1, "shard": Shard(rank=0, world=2)}])
def test_ids_are_packed_as_columns_are(how: dict[str, Any]) -> None:
    """One rank of two has no row of a batch of one."""
    made = source(rows=50)
    batch = read(made, **how)[0]
    assert batch.rows == (0 if how else 50)
    columns = KeyedJagged.from_columns({key: batch.ids[key] for key in made.schema().all_id_features()}, batch.rows)
    assert (columns.keys, columns.starts, columns.max_lengths) == (batch.ids.keys, batch.ids.starts, batch.ids.max_lengths)
    assert torch.equal(columns.values, batch.ids.values)
    assert torch.equal(columns.offsets, batch.ids.offsets)


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    spans = [span.offsets for span in batch.event_offsets.values()]
    assert batch.time is not None
    return [batch.ids.values, batch.ids.offsets, batch.time, *spans, *batch.event_time.values(), *batch.dense.values(), *batch.labels.values()]


def test_beside_a_gpu_events_are_made_in_page_locked_memory_and_the_rest_goes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no such memory: what is held here is which tensors are asked for there."""
    plain = read(source(rows=50))[0]
    made: list[int] = []
    moved: list[torch.Tensor] = []
    empty = torch.empty
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.empty", lambda *size, pin_memory=False, **how: (pin_memory and made.append(size[0]), empty(*size, **how))[1])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (moved.append(tensor), tensor)[1])
    batch = read(source(rows=50))[0]
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(batch), tensors_of(plain), strict=True))
    assert made == [batch.ids.values.numel(), *(times.numel() for times in batch.event_time.values())]
    assert {id(tensor) for tensor in tensors_of(batch)} <= {id(tensor) for tensor in moved}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_batches_are_pinned_and_reach_the_device_unchanged() -> None:
    """Copies are under way while later batches are made: none is overwritten before it has arrived."""
    batches = list(source(workers=2).batches("train", batch_size=50, seed=1))
    moved = [batch.to("cuda", non_blocking=True) for batch in source(workers=2).batches("train", batch_size=50, seed=1)]
    torch.cuda.synchronize()
    for batch, copy in zip(batches, moved, strict=True):
        for here, there in zip(tensors_of(batch), tensors_of(copy), strict=True):
            assert here.is_pinned()
            assert torch.equal(here, there.cpu())


def test_rows_without_any_event_make_a_batch() -> None:
    (batch,) = read(source(rows=3, sequences=({"name": "views", "lengths": "lognormal", "mean": 1e-9, "longest": 5},)))
    assert events_by_group([batch]).tolist() == [[0]]
    assert batch.event_offsets["views"].max_length == 0
    batch.check_labels()
