"""Between feed and engine: what becomes of a batch's ids, what is counted, and rows that pass from one id to another."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged, lengths_to_offsets
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.config.schema import ManagedTable
from gem_core.spec import Embeddings, RequestError, SparseOptimizer, TableSpec
from gem_core.train.feed import Work
from gem_core.train.ids.layout import fresh_weights, with_rows
from gem_core.train.ids.managed import ManagedIds, reset_rows
from gem_core.train.world import World

HUGE = 2**63 - 1
TABLES = (
    TableSpec(name="item", rows=HUGE, dim=4, features=("item", "seen.item"), init_scale=0.1),
    TableSpec(name="tag", rows=50, dim=4, features=("tag",), pooling="sum", init_scale=0.1),
)


def batch(item: list[list[int]], seen: list[list[int]], tag: list[list[int]]) -> Batch:
    columns = {}
    for key, lists in {"item": item, "seen.item": seen, "tag": tag}.items():
        offsets = lengths_to_offsets(torch.tensor([len(ids) for ids in lists], dtype=torch.int64))
        columns[key] = Jagged(torch.tensor([i for ids in lists for i in ids], dtype=torch.int64), offsets, 0)
    rows = len(item)
    return Batch(
        rows=rows,
        ids=KeyedJagged.from_columns(columns, rows),
        labels={},
        dense={},
        event_dense={},
        event_time={},
        event_offsets={},
        masks={},
        weights={},
    )


def work(*batches: Batch) -> Work:
    return Work(batches=batches, rows=sum(b.rows for b in batches), flops=0, weights=torch.zeros(0), data_seconds=0.0)


def managed(**values: Any) -> ManagedIds:
    rule = ManagedTable(**{"pattern": "item", "rows": 6, "buckets": 1, "evict_every": 1, **values})
    return ManagedIds(TABLES, {"item": rule}, World(), seed=7)


def engine(ids: ManagedIds, optimizer: str = "adam") -> TorchEmbeddings:
    return TorchEmbeddings(
        with_rows(TABLES, {name: held.rule for name, held in ids.maps.items()}), SparseOptimizer(name=optimizer), device="cpu", seed=1
    )


def rows(ids: ManagedIds, tables: Embeddings, *batches: Batch) -> Sequence[Batch]:
    """A training step's batches as the engine gets them."""
    done = ids.admit(work(*batches))
    ids.begin_step(tables)
    return done.batches


def test_case_B15_features_keep_their_counts_when_raw_ids_exceed_the_table() -> None:
    ids = managed()
    raw = batch([[HUGE - 1], [3]], [[HUGE - 1, 10**12, 3], []], [[4, 4], [0]])
    (got,) = rows(ids, engine(ids), raw)
    assert got.ids.starts == raw.ids.starts
    assert torch.equal(got.ids.offsets, raw.ids.offsets)
    item, seen = got.ids.ids("item"), got.ids.ids("seen.item")
    assert (item[0], item[1]) == (seen[0], seen[2]), "one id has one row in both features"
    assert torch.cat([item, seen]).unique().numel() == 3
    assert int(got.ids.values.max()) < 6
    assert got.ids.ids("tag").tolist() == [4, 4, 0], "a table without a rule keeps its ids"
    assert raw.ids.ids("item").tolist() == [HUGE - 1, 3], "the source's batch is left alone"
    assert engine(ids)(got.ids)["seen.item"].shape == (3, 4)


def test_without_rules_batches_pass_as_they_are() -> None:
    raw, ids, plain = batch([[40]], [[]], [[1]]), managed(), ManagedIds(TABLES, {}, World(), seed=7)
    assert rows(ids, engine(ids), raw)[0] is not raw
    assert plain.admit(work(raw)).batches[0] is raw
    assert plain.read("train") == plain.read("test") == {}


def test_case_H10_unknown_ids_share_row_0_and_are_counted_by_feature() -> None:
    ids = managed(admit_after=2)
    tables = engine(ids)
    (first,) = rows(ids, tables, batch([[11], [0]], [[12, 12], [13]], [[], []]))
    assert first.ids.ids("item").tolist() == [0, 0]
    assert (first.ids.ids("seen.item") > 0).tolist() == [True, True, False]
    told = ids.read("train")
    assert told["features"] == {"item": {"ids": 1, "unadmitted": 1}, "seen.item": {"ids": 3, "unadmitted": 1}}
    assert told["tables"] == {"item": {"admitted": 1, "evicted": 0, "owned": 1}}
    rows(ids, tables, batch([[11], [14]], [[], []], [[], []]))
    told = ids.read("train")
    assert told["features"]["item"] == {"ids": 2, "unadmitted": 1}
    assert told["tables"]["item"] == {"admitted": 1, "evicted": 0, "owned": 2}


def test_case_H10_nothing_is_admitted_in_evaluation() -> None:
    ids = managed()
    rows(ids, engine(ids), batch([[11]], [[]], [[]]))
    before = ids.maps["item"].state.copy()
    for _ in range(3):
        (got,) = ids.look_up(work(batch([[11], [12]], [[12], []], [[], []]))).batches
    assert got.ids.ids("item").tolist() == [1, 0]
    assert np.array_equal(ids.maps["item"].state, before)
    assert ids.read("test") == {"features": {"item": {"ids": 6, "unadmitted": 3}, "seen.item": {"ids": 3, "unadmitted": 3}}}
    assert ids.read("train")["features"]["item"] == {"ids": 1, "unadmitted": 0}
    assert ids.rows_of(batch([[11]], [[]], [[]])).ids.ids("item").tolist() == [1]
    assert ids.read("test")["features"]["item"]["ids"] == 0, "scoring one batch is told nowhere"


def test_case_H17_any_64_bit_id_owns_a_row_and_the_same_one_in_every_run() -> None:
    raw = [1, 2**31, 2**62 + 11, HUGE - 1]
    seen = []
    for _ in range(2):
        ids = managed()
        (got,) = rows(ids, engine(ids), batch([[i] for i in raw], [[]] * 4, [[]] * 4))
        seen.append(got.ids.ids("item").tolist())
    assert sorted(seen[0]) == [1, 2, 3, 4]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("wrong", [-1, HUGE])
def test_an_id_outside_the_feature_is_refused_before_anything_is_counted(wrong: int) -> None:
    ids = managed()
    with pytest.raises(RequestError, match=f"'seen.item'.*{wrong}"):
        ids.admit(work(batch([[1]], [[wrong]], [[]])))
    assert ids.maps["item"].state.size == 0


class Second(World):
    """The first of two ranks; the other one found an error."""

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.stack([values, torch.ones_like(values)])

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, RequestError("ids of rank 1", "they are wrong", "Correct them.")]


def test_a_wrong_id_on_one_rank_is_raised_on_all() -> None:
    ids = managed()
    ids._world = Second()
    with pytest.raises(RequestError, match="ids of rank 1"):
        ids.admit(work(batch([[1]], [[]], [[]])))
    assert ids.maps["item"].state.size == 0


def test_raw_ids_without_a_rule_are_refused_with_the_remedy() -> None:
    with pytest.raises(RequestError, match=rf"'item'.*{HUGE} rows of width 4.*\[\[embedding.ids\]\]"):
        TorchEmbeddings(TABLES, SparseOptimizer(), device="cpu", seed=1)


def test_hashed_rows_take_ids_that_own_none() -> None:
    ids = managed(hashed_rows=3, admit_after=100)
    many = list(range(1, 200))
    (got,) = rows(ids, engine(ids), batch([[i] for i in many], [[]] * 199, [[]] * 199))
    shared = got.ids.ids("item")
    assert set(shared.tolist()) == {1, 2, 3}
    assert ids.read("train")["features"]["item"] == {"ids": 199, "unadmitted": 199}
    assert torch.equal(ids.look_up(work(batch([[i] for i in many], [[]] * 199, [[]] * 199))).batches[0].ids.ids("item"), shared)


def test_micro_batches_of_a_step_are_one_step() -> None:
    parts = [batch([[5]], [[6, 7]], [[]]), batch([[6]], [[8, 8]], [[]])]
    whole = batch([[5], [6]], [[6, 7], [8, 8]], [[], []])
    got, ids = {}, {}
    for name, batches in (("apart", parts), ("together", [whole])):
        ids[name] = managed(admit_after=2)
        done = rows(ids[name], engine(ids[name]), *batches)
        got[name] = [torch.cat([b.ids.ids(key) for b in done]).tolist() for key in ("item", "seen.item")]
    assert got["apart"] == got["together"]
    assert ids["apart"].clock == 1
    assert np.array_equal(ids["apart"].maps["item"].state, ids["together"].maps["item"].state)


def trained(ids: ManagedIds, tables: TorchEmbeddings, raw: Batch) -> Tensor:
    """One step; the rows of the first feature."""
    (got,) = rows(ids, tables, raw)
    tables.zero_grad()
    sum(vectors.square().sum() + vectors.sum() for vectors in tables(got.ids).values()).backward()  # type: ignore[union-attr]
    tables.step()
    return got.ids.ids("item")


def test_a_row_that_passes_on_starts_afresh_and_no_other_row_changes() -> None:
    ids = managed(rows=3, policy="lru")
    tables = engine(ids)
    before = trained(ids, tables, batch([[21], [22]], [[], []], [[1], [2]]))
    kept = tables.export_tables()
    done = ids.admit(work(batch([[21], [23]], [[], []], [[], []])))
    assert torch.equal(tables.export_tables()["item"]["weight"], kept["item"]["weight"]), "not before the step begins"
    ids.begin_step(tables)
    after = done.batches[0].ids.ids("item")
    assert after.tolist() == before.tolist(), "23 has the row of 22"
    now = tables.export_tables()
    row = int(before[1])
    assert torch.equal(now["item"]["weight"][row], torch.from_numpy(fresh_weights(TABLES[0], np.array([23]), 7)[0]))
    assert not now["item"]["exp_avg"][row].any()
    assert not now["item"]["exp_avg_sq"][row].any()
    assert kept["item"]["exp_avg"][row].all(), "there was something to reset"
    others = torch.arange(3) != row
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(now["item"][name][others], kept["item"][name][others])
        assert torch.equal(now["tag"][name], kept["tag"][name])
    assert now["item"]["step"] == kept["item"]["step"] == 1, "the engine's count of updates goes on"
    ids.begin_step(tables)
    assert torch.equal(tables.export_tables()["item"]["weight"], now["item"]["weight"]), "once"


class Half:
    """An engine that keeps rows 2 to 5 of the table, their columns 2 and 3 in a tensor of its own and in 16 bits."""

    def __init__(self) -> None:
        self.left, self.right, self.state = torch.ones(4, 2), torch.ones(4, 2, dtype=torch.float16), torch.ones(4)

    def table_slices(self) -> list[Any]:
        from gem_core.spec import TableSlice

        words: dict[str, Any] = {"table": "item", "start": 2}
        return [
            TableSlice(name="weight", shape=(6, 4), tensor=self.left, **words),
            TableSlice(name="weight", shape=(6, 4), tensor=self.right, column=2, **words),
            TableSlice(name="state", shape=(6,), tensor=self.state, **words),
            TableSlice(name="state", shape=(6,), table="tag", start=0, tensor=self.state),
        ]


def test_slices_of_rows_and_columns_are_reset_where_they_lie() -> None:
    half = Half()
    weights = torch.arange(12.0).view(3, 4)
    reset_rows(half, "item", torch.tensor([5, 1, 2]), weights)  # type: ignore[arg-type]
    assert half.left.tolist() == [[8, 9], [1, 1], [1, 1], [0, 1]]
    assert half.right.tolist() == [[10, 11], [1, 1], [1, 1], [2, 3]]
    assert half.state.tolist() == [0, 1, 1, 0]


def test_counting_sees_a_planted_double_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the figures rest on: distinct ids and their numbers."""
    from gem_core.train.ids import managed as module

    asked, place = module._distinct(np.array([5, 0, 7, 5, 5]))
    assert Counter(dict(asked.tolist())) == Counter({5: 3, 7: 1})
    assert [-1 if p < 0 else int(asked[p, 0]) for p in place] == [5, -1, 7, 5, 5]
    assert [part.tolist() for part in module._summed(np.array([[7, 2], [5, 1], [7, 3]]))] == [[5, 7], [1, 5]]
    monkeypatch.setattr(module, "_summed", lambda asked: (asked[:, 0], 2 * asked[:, 1]))
    ids = managed(admit_after=2)
    rows(ids, engine(ids), batch([[5]], [[]], [[]]))
    assert ids.read("train")["tables"]["item"]["admitted"] == 1


def test_an_empty_step_counts_nothing() -> None:
    ids = managed()
    (got,) = rows(ids, engine(ids), batch([], [], []))
    assert (got.rows, got.ids.values.numel(), ids.clock) == (0, 0, 1)
    assert ids.read("train")["tables"]["item"] == {"admitted": 0, "evicted": 0, "owned": 0}
