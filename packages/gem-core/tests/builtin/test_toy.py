"""The toy source keeps the promises of a source, and its labels can be learnt."""

import pytest
import torch

from gem_core.batch import Batch
from gem_core.builtin.toy import SCHEMA, ToySource
from gem_core.spec import RequestError, Shard


def joined(batches: list[Batch], key: str) -> torch.Tensor:
    return torch.cat([batch.ids[key].values for batch in batches])


@pytest.fixture(scope="module")
def toy() -> ToySource:
    return ToySource(rows=400)


def test_it_is_deterministic_and_its_seed_matters() -> None:
    first, again, other = (next(ToySource(rows=64, seed=seed).batches("train", batch_size=64)) for seed in (0, 0, 1))
    assert torch.equal(first.ids.values, again.ids.values)
    assert torch.equal(first.labels["ctr"], again.labels["ctr"])
    assert not torch.equal(first.ids["item"].values, other.ids["item"].values)


def test_every_kind_of_feature_is_there(toy: ToySource) -> None:
    batch = next(toy.batches("train", batch_size=400))
    assert batch.ids.keys == tuple(SCHEMA.all_id_features())
    assert batch.dense["picture"].shape == (400, 4)
    assert batch.event_dense["views.dwell"].shape == (int(batch.event_offsets["views"].offsets[-1]), 1)
    assert int(batch.event_offsets["views"].lengths().min()) == 0
    assert int(batch.event_offsets["views"].lengths().max()) > 4
    assert batch.weights["ctr"].unique().tolist() == [1.0, 2.0]
    assert batch.groups is not None
    batch.check_labels()
    for key, feature in SCHEMA.all_id_features().items():
        values = batch.ids[key].values
        assert int(values.min()) >= 1
        assert int(values.max()) < feature.cardinality


def test_a_conversion_needs_a_click(toy: ToySource) -> None:
    batch = next(toy.batches("train", batch_size=400))
    assert 0.2 < float(batch.labels["ctr"].mean()) < 0.8
    assert float(batch.labels["cvr"].sum()) > 10
    assert bool((batch.labels["cvr"] <= batch.labels["ctr"]).all())


def test_events_are_in_time_order_and_before_the_impression(toy: ToySource) -> None:
    batch = next(toy.batches("train", batch_size=400))
    assert batch.time is not None
    for group, times in batch.event_time.items():
        offsets = batch.event_offsets[group].offsets
        row = torch.repeat_interleave(torch.arange(batch.rows), offsets.diff())
        assert bool((times < batch.time[row]).all())
        falls = (times.diff() < 0) & (row.diff() == 0)
        assert not bool(falls.any())


def test_ranks_share_each_global_batch(toy: ToySource) -> None:
    whole = list(toy.batches("train", batch_size=96, seed=5, epoch=1))
    parts = [list(toy.batches("train", batch_size=96, seed=5, epoch=1, shard=Shard(rank=rank, world=3))) for rank in range(3)]
    assert [len(part) for part in parts] == [len(whole)] * 3
    for step, batch in enumerate(whole):
        assert torch.equal(batch.ids["item"].values, joined([part[step] for part in parts], "item"))
        assert {part[step].global_rows for part in parts} == {batch.rows}


def test_an_epoch_has_each_row_once_and_starts_where_asked(toy: ToySource) -> None:
    plain = joined(list(toy.batches("train", batch_size=64)), "user")
    shuffled = joined(list(toy.batches("train", batch_size=64, seed=1)), "user")
    assert plain.numel() == toy.rows("train") == 400
    assert torch.equal(plain.sort().values, shuffled.sort().values)
    assert not torch.equal(plain, shuffled)
    later = list(toy.batches("train", batch_size=64, seed=1, start=2))
    assert torch.equal(joined(later, "user"), shuffled[128:])


def test_test_rows_are_others_than_training_rows(toy: ToySource) -> None:
    train, test = (joined(list(toy.batches(split, batch_size=512)), "item") for split in ("train", "test"))
    assert test.numel() == toy.rows("test") == 100
    assert not torch.equal(train[:100], test)
    ledger = toy.ledger()
    assert ledger["read"] == ledger["train"] + ledger["test"]


@pytest.mark.parametrize(("rows", "split"), [(4, "train"), (400, "valid")])
def test_bad_requests_are_refused(rows: int, split: str) -> None:
    with pytest.raises(RequestError):
        ToySource(rows=rows).rows(split)
