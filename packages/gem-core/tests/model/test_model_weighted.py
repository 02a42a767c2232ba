"""Weighted multi-valued features: their pooling against a loop over rows, its gradients, the tables behind them, and what is refused."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gem_core.batch import Batch, Jagged, lengths_to_offsets
from gem_core.model.dlrm import DlrmModel, DlrmOptions
from gem_core.model.features import FeatureTokens
from gem_core.model.gem import GemOptions
from gem_core.model.jagged import mean_rows, weighted_mean_rows
from gem_core.model.tables import make_tables
from gem_core.spec import DataSchema, IdFeature, RequestError, SequenceFeature, Task
from gem_core.train.feed import empty_batch
from gem_core.train.labels import check_batch

TAGS = IdFeature(name="tags", cardinality=6, multi=True, weighted=True)
WEIGHTED = DataSchema(ids=(TAGS, IdFeature(name="plain", cardinality=6, multi=True)), tasks=(Task(name="y"),))


def by_loop(values: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean of each row, one value after the other."""
    rows = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        total, of_weights = values.new_zeros(values.shape[1]), 0.0
        for i in range(begin, end):
            total = total + weights[i] * values[i]
            of_weights += float(weights[i])
        rows.append(total / (of_weights or 1.0))
    return torch.stack(rows) if rows else values.new_zeros(0, values.shape[1])


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.sampled_from([0, 1, 2, 7]), max_size=6), zero=st.booleans(), seed=st.integers(0, 99))
def test_case_I08_weighted_mean_is_that_of_a_loop_and_so_are_its_gradients(lengths: list[int], zero: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
    total = int(offsets[-1])
    weights = torch.rand(total, generator=draw, dtype=torch.float64) * (0.0 if zero else 1.0)
    values = torch.randn(total, 3, generator=draw, dtype=torch.float64)
    mine, plain = values.clone().requires_grad_(), values.clone().requires_grad_()
    got, want = weighted_mean_rows(Jagged(mine, offsets, 7), weights), by_loop(plain, offsets, weights)
    torch.testing.assert_close(got, want)
    push = torch.randn(len(lengths), 3, generator=draw, dtype=torch.float64)
    if total and not zero:
        torch.testing.assert_close(torch.autograd.grad((got * push).sum(), mine)[0], torch.autograd.grad((want * push).sum(), plain)[0])


def test_case_B18_weighted_mean_of_an_empty_row_is_zero_not_nan() -> None:
    offsets = torch.tensor([0, 0, 2, 2])
    got = weighted_mean_rows(Jagged(torch.full((2, 3), 5.0), offsets, 2), torch.tensor([0.25, 0.75]))
    assert got.tolist() == [[0.0] * 3, [5.0] * 3, [0.0] * 3]


def test_equal_weights_give_the_plain_mean() -> None:
    column = Jagged(torch.randn(5, 2), torch.tensor([0, 2, 5]), 3)
    torch.testing.assert_close(weighted_mean_rows(column, torch.full((5,), 0.3)), mean_rows(column))


def weighted_batch(kit: ModuleType, rows: int = 4) -> Batch:
    batch: Batch = kit.make_batch(WEIGHTED, [[]] * rows)
    batch.id_weights["tags"] = torch.rand(batch.ids.ids("tags").numel()) + 0.1
    return batch


def test_tokens_pool_a_weighted_feature_by_its_weights_and_another_by_the_mean(kit: ModuleType) -> None:
    options = GemOptions.model_validate({"features": {"embedding_dim": 8, "norm": False}})
    tables = make_tables(WEIGHTED, options)
    assert {t.name: t.pooling for t in tables} == {"tags": "none", "plain": "mean"}
    layer, batch = FeatureTokens(WEIGHTED, tables, options.features, 8), weighted_batch(kit)
    embedded = kit.Lookup(tables)(batch.ids)
    tokens = layer(batch, embedded)
    torch.testing.assert_close(tokens[:, 0], by_loop(embedded["tags"], batch.ids["tags"].offsets, batch.id_weights["tags"]))
    torch.testing.assert_close(tokens[:, 1], embedded["plain"])
    batch.id_weights["tags"][0] *= 3
    assert not torch.equal(tokens, layer(batch, embedded))


@pytest.mark.parametrize(("weights", "so"), [(None, "the batch has none"), (torch.ones(1), r"their shape is \[1\] for")])
def test_missing_or_misshapen_weights_are_named(kit: ModuleType, weights: Any, so: str) -> None:
    options = GemOptions.model_validate({"features": {"embedding_dim": 8}})
    tables, batch = make_tables(WEIGHTED, options), weighted_batch(kit)
    batch.id_weights.clear()
    if weights is not None:
        batch.id_weights["tags"] = weights
    with pytest.raises(RequestError, match=f"weights of id feature 'tags': {so}"):
        FeatureTokens(WEIGHTED, tables, options.features, 8)(batch, kit.Lookup(tables)(batch.ids))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_negative_and_non_finite_id_weights_are_refused(kit: ModuleType, bad: float) -> None:
    batch = weighted_batch(kit)
    check_batch(batch, WEIGHTED.tasks)
    batch.id_weights["tags"][0] = bad
    with pytest.raises(RequestError, match="weight of 'tags'"):
        check_batch(batch, WEIGHTED.tasks)


def test_weighted_needs_several_ids() -> None:
    with pytest.raises(RequestError, match="'a': it is weighted but has one id a row"):
        IdFeature(name="a", cardinality=3, weighted=True)


def test_a_weighted_feature_beside_a_pooled_history_is_refused() -> None:
    shared = IdFeature(name="tags", cardinality=6, multi=True, weighted=True, table="item")
    clicks = SequenceFeature(name="clicks", ids=(IdFeature(name="item", cardinality=6),), max_length=4)
    schema = DataSchema(ids=(shared,), sequences=(clicks,), tasks=(Task(name="y"),))
    assert [t.pooling for t in make_tables(schema, GemOptions())] == ["none"]
    with pytest.raises(RequestError, match=r"'tags': it shares table 'item' with 'clicks.item'"):
        make_tables(schema, DlrmOptions(), pool_sequences=True)


def test_a_model_trains_on_weights_and_takes_an_empty_batch(kit: ModuleType) -> None:
    model, lookup = kit.make_model(DlrmModel, WEIGHTED, DlrmOptions())
    batch = weighted_batch(kit)
    kit.bce(model(batch, lookup(batch.ids)), batch).backward()
    assert all(float(w.grad.abs().sum()) > 0 for w in lookup.weights)
    empty = empty_batch(WEIGHTED)
    assert model(empty, lookup(empty.ids))["y"].shape == (0,)


def test_moving_a_batch_takes_weights_and_origin_along(kit: ModuleType) -> None:
    batch = weighted_batch(kit).to("meta")
    assert batch.id_weights["tags"].device.type == "meta"
    assert batch.origin is None
