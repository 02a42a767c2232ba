"""Which ids own rows: against a slow implementation with dictionaries, on any division of the buckets among ranks."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.config.schema import ManagedTable
from gem_core.spec import RequestError, TableSpec
from gem_core.train.ids.idmap import COUNTS, IDS, ROWS, USED, IdMap
from gem_core.train.ids.layout import fresh_weights, keys_of, layout_of, rules_by_table, with_rows

WORD = 2**64 - 1
STREAM = st.lists(st.lists(st.sampled_from([1, 2, 3, 5, 8, 13, 21, 34, 2**62 + 1, 2**63 - 1]), max_size=12), max_size=12)


def rule(**values: Any) -> ManagedTable:
    return ManagedTable(**{"pattern": "*", "rows": 7, "buckets": 2, "evict_every": 2, **values})


RULES = st.builds(
    rule,
    rows=st.integers(6, 9),
    buckets=st.integers(1, 3),
    hashed_rows=st.integers(0, 2),
    policy=st.sampled_from(["distance_lfu", "lfu", "lru"]),
    admit_after=st.integers(1, 3),
    evict_every=st.integers(1, 3),
)


def split_mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class Slow:
    """The rules in plain words: an entry is ``[row, count, last use]``; every choice looks at every entry of the bucket."""

    def __init__(self, rule: ManagedTable) -> None:
        self.rule = rule
        first, parts = 1 + rule.hashed_rows, rule.buckets
        edges = [first + (rule.rows - first) * b // parts for b in range(parts + 1)]
        self.free = [list(range(edges[b], edges[b + 1])) for b in range(parts)]
        self.size = [len(rows) for rows in self.free]
        self.entries: dict[int, list[int]] = {}

    def bucket(self, id: int) -> int:
        return (split_mix(id) >> 32) * self.rule.buckets >> 32

    def value(self, id: int, now: int) -> float:
        _, count, used = self.entries[id]
        return {"lru": used, "lfu": count, "distance_lfu": count / (now - used + 1)}[self.rule.policy]

    def second(self, id: int) -> int:
        _, count, used = self.entries[id]
        return count if self.rule.policy == "lru" else used

    def ordered(self, ids: list[int], now: int, sign: int) -> list[int]:
        return sorted(ids, key=lambda id: (sign * self.value(id, now), sign * self.second(id), split_mix(id)))

    def step(self, ids: list[int], now: int) -> list[tuple[int, int]]:
        """Rows that passed on, with their new ids."""
        for id, count in Counter(ids).items():
            entry = self.entries.setdefault(id, [0, 0, 0])
            entry[1] += count
            entry[2] = now
        passed = []
        for bucket in range(self.rule.buckets):
            mine = [id for id in self.entries if self.bucket(id) == bucket]
            for id in self.ordered([id for id in mine if self.waits(id)], now, -1):
                if self.free[bucket]:
                    self.entries[id][0] = self.free[bucket].pop(0)
            if now % self.rule.evict_every:
                continue
            waiting = self.ordered([id for id in mine if self.waits(id)], now, -1)
            owners = self.ordered([id for id in mine if self.entries[id][0]], now, 1)
            for new, old in zip(waiting, owners):
                if self.value(new, now) > self.value(old, now):
                    self.entries[new][0], self.entries[old][0] = self.entries[old][0], 0
                    passed.append((self.entries[new][0], new))
            for id in self.ordered([id for id in mine if not self.entries[id][0]], now, -1)[self.size[bucket] :]:
                del self.entries[id]
        return passed

    def waits(self, id: int) -> bool:
        return not self.entries[id][0] and self.entries[id][1] >= self.rule.admit_after

    def row(self, id: int) -> int:
        own = self.entries.get(id, [0])[0]
        return own or (1 + split_mix(split_mix(id)) % self.rule.hashed_rows if self.rule.hashed_rows else 0)


def observe(held: IdMap, ids: list[int], now: int) -> list[tuple[int, int]]:
    values, counts = np.unique(np.array(ids, np.int64), return_counts=True)
    changes = held.observe(values, counts, now)
    return list(zip(changes.rows.tolist(), changes.ids.tolist(), strict=True))


def entries(*maps: IdMap) -> dict[int, list[int]]:
    state = np.concatenate([held.state for held in maps], axis=1)
    return {int(column[IDS]): column[[ROWS, COUNTS, USED]].tolist() for column in state.T}


def compare(rule: ManagedTable, stream: list[list[int]], make: type[IdMap] = IdMap) -> None:
    held, slow = make(rule), Slow(rule)
    for now, ids in enumerate(stream, start=1):
        assert sorted(observe(held, ids, now)) == sorted(slow.step(ids, now))
        assert entries(held) == slow.entries
        asked = np.array([*ids, 77, 2**61], np.int64)
        assert held.look_up(asked).tolist() == [slow.row(int(id)) for id in asked]


@settings(max_examples=120, deadline=None)
@given(rule=RULES, stream=STREAM)
def test_admission_and_eviction_are_those_of_dictionaries(rule: ManagedTable, stream: list[list[int]]) -> None:
    compare(rule, stream)


class Forgetful(IdMap):
    """A planted fault: an id that is evicted loses its count."""

    def _evict(self, clock: int) -> Any:
        before = self.state[ROWS].copy()
        out = super()._evict(clock)
        self.state[COUNTS, (before > 0) & (self.state[ROWS] == 0)] = 0
        return out


class Late(IdMap):
    """A planted fault: rows are given at evictions only."""

    def _admit(self, clock: int) -> int:
        return 0 if clock % self.rule.evict_every else super()._admit(clock)


@pytest.mark.parametrize("fault", [Forgetful, Late])
def test_the_comparison_sees_a_planted_fault(fault: type[IdMap]) -> None:
    stream = [[1, 2, 3, 5, 8, 13], [21, 34, 21, 34, 1], [21, 34, 2], [3, 3, 3, 5, 5, 5, 8, 8, 8]]
    compare(rule(rows=4, buckets=1, policy="lfu"), stream)
    with pytest.raises(AssertionError):
        compare(rule(rows=4, buckets=1, policy="lfu"), stream, fault)


@settings(max_examples=40, deadline=None)
@given(rule=RULES, stream=STREAM, cut=st.integers(0, 3))
def test_ranks_that_share_the_buckets_hold_together_what_one_holds(rule: ManagedTable, stream: list[list[int]], cut: int) -> None:
    whole, cut = IdMap(rule), min(cut, rule.buckets)
    parts = [IdMap(rule, 0, cut), IdMap(rule, cut, rule.buckets)]
    for now, ids in enumerate(stream, start=1):
        passed = []
        for part in parts:
            bucket = part.layout.bucket(keys_of(np.array(ids, np.int64)))
            passed += observe(part, [id for id, b in zip(ids, bucket) if part.low <= b < part.high], now)
        assert sorted(passed) == sorted(observe(whole, ids, now))
    assert entries(*parts) == entries(whole)
    assert np.array_equal(np.concatenate([part.state for part in parts], axis=1), whole.state), "one order, whatever the number of ranks"


@settings(max_examples=40, deadline=None)
@given(rule=RULES, stream=STREAM)
def test_no_two_ids_own_one_row_and_none_owns_a_shared_one(rule: ManagedTable, stream: list[list[int]]) -> None:
    held = IdMap(rule)
    starts = held.layout.starts()
    for now, ids in enumerate(stream, start=1):
        observe(held, ids, now)
        owners = held.state[:, held.state[ROWS] > 0]
        assert np.unique(owners[ROWS]).size == owners.shape[1] == held.owned
        bucket = held.layout.bucket(keys_of(np.ascontiguousarray(owners[IDS])))
        assert (owners[ROWS] >= starts[bucket]).all()
        assert (owners[ROWS] < starts[bucket + 1]).all()
        if now % rule.evict_every == 0:
            waiting = np.bincount(held.layout.bucket(keys_of(np.ascontiguousarray(held.state[IDS, held.state[ROWS] == 0]))), minlength=rule.buckets)
            assert (waiting <= np.diff(starts)).all()


@settings(max_examples=40, deadline=None)
@given(rule=RULES, stream=STREAM, at=st.integers(0, 12), order=st.randoms())
def test_case_E09_dumped_and_loaded_ids_are_evicted_as_without_the_interruption(
    rule: ManagedTable, stream: list[list[int]], at: int, order: Any
) -> None:
    straight, broken = IdMap(rule), IdMap(rule)
    for now, ids in enumerate(stream, start=1):
        if now == at:
            places = list(range(broken.state.shape[1]))
            order.shuffle(places)
            fresh = IdMap(rule)
            fresh.load(broken.state[:, places])
            broken = fresh
        assert observe(straight, ids, now) == observe(broken, ids, now)
    assert entries(straight) == entries(broken)


def test_case_E09_a_dump_without_last_use_is_noticed() -> None:
    straight, broken = (IdMap(rule(rows=3, buckets=1, policy="lru", evict_every=1)) for _ in range(2))
    for held in (straight, broken):
        observe(held, [1], 1)
        observe(held, [2], 2)
    state = broken.state.copy()
    state[USED] = 1
    broken.load(state)
    assert observe(straight, [3], 3) == [(int(straight.look_up(np.array([3]))[0]), 3)]
    observe(broken, [3], 3)
    assert entries(straight) != entries(broken)


def test_a_row_once_used_is_rated_by_each_policy_in_its_own_way() -> None:
    """Id 1 often and long ago, id 2 twice and later, id 3 once and now; two rows."""
    steps = [[1] * 9, [2, 2], *[[]] * 5, [3]]
    survivors = {}
    for policy in ("lfu", "lru", "distance_lfu"):
        held = IdMap(rule(rows=3, buckets=1, policy=policy, evict_every=len(steps)))
        for now, ids in enumerate(steps, start=1):
            observe(held, ids, now)
        survivors[policy] = {id for id, (row, *_) in entries(held).items() if row}
    assert survivors == {"lfu": {1, 2}, "lru": {2, 3}, "distance_lfu": {1, 3}}


@settings(max_examples=40, deadline=None)
@given(stream=STREAM, rows=st.integers(6, 40), before=RULES)
def test_case_E03_ids_move_to_a_table_of_another_size_the_most_valuable_first(stream: list[list[int]], rows: int, before: ManagedTable) -> None:
    old = IdMap(before)
    for now, ids in enumerate(stream, start=1):
        observe(old, ids, now)
    new = IdMap(rule(rows=rows, buckets=1, policy=before.policy))
    new.load(old.state)
    clock = len(stream)
    now_rows, old_rows = new.place_again(clock)
    was, now_is = entries(old), entries(new)
    assert {was[id][0]: row for id, (row, *_) in now_is.items() if row} == dict(zip(old_rows.tolist(), now_rows.tolist(), strict=True))
    assert len(now_rows) == min(rows - 1, old.owned)
    slow = Slow(before)
    slow.entries = was
    kept = [id for id, (row, *_) in now_is.items() if row]
    lost = [id for id in was if was[id][0] and id not in kept]
    assert all(slow.value(a, clock) >= slow.value(b, clock) for a in kept for b in lost)


def test_the_mixing_is_split_mix_64() -> None:
    assert keys_of(np.array([0])).tolist() == [0xE220A8397B1DCDAF]  # the first number of SplitMix64 from seed 0
    ids = np.array([1, -5, 2**63 - 1], np.int64)
    assert keys_of(ids).tolist() == [split_mix(int(id) & WORD) for id in ids]


def test_buckets_get_their_share_of_ids_and_rows() -> None:
    layout = layout_of(rule(rows=1_000, buckets=7, hashed_rows=4))
    assert (layout.starts()[0], layout.starts()[-1], np.diff(layout.starts()).min(), np.diff(layout.starts()).max()) == (5, 1_000, 142, 143)
    share = np.bincount(layout.bucket(keys_of(np.arange(70_000))), minlength=7)
    assert share.min() > 9_500
    assert share.max() < 10_500
    shared = layout.shared(keys_of(np.arange(1000)))
    assert set(shared.tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("values", [{"rows": 64}, {"rows": 100, "hashed_rows": 60}, {"rows": 8, "buckets": 8}])
def test_a_bucket_without_rows_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(RequestError, match=r"rows, .* are left for .* buckets"):
        layout_of(ManagedTable(**{"pattern": "item", **values}))


def test_rules_are_found_by_pattern_and_one_that_matches_nothing_is_refused() -> None:
    tables = [TableSpec(name=name, rows=10**12, dim=4, features=(name,), init_scale=0.1) for name in ("item", "item_2", "user")]
    rules = [rule(pattern="item", rows=50), rule(pattern="item*", rows=90)]
    found = rules_by_table(tables, rules)
    assert {name: of.rows for name, of in found.items()} == {"item": 50, "item_2": 90}
    assert [table.rows for table in with_rows(tables, found)] == [50, 90, 10**12]
    with pytest.raises(RequestError, match=r"'shop\*'.*item, item_2, user"):
        rules_by_table(tables, [*rules, rule(pattern="shop*")])
    with pytest.raises(RequestError, match="1 are left for 2 buckets"):
        rules_by_table(tables, [rule(pattern="item", rows=2)])


def test_every_key_of_a_rule_is_documented_with_its_default() -> None:
    text = (Path(__file__).parents[4] / "docs/parallelism.md").read_text()
    for key, item in ManagedTable.model_fields.items():
        default = "" if item.is_required() else item.default if isinstance(item.default, int) else f"`{item.default}`"
        assert f"| `{key}` | {default} |".replace("  ", " ") in text, key


def test_fresh_weights_depend_on_seed_table_and_id_alone() -> None:
    table = TableSpec(name="item", rows=10, dim=3, features=("item",), init_scale=0.25)
    ids = np.arange(1, 5001)
    drawn = fresh_weights(table, ids, seed=3)
    assert (drawn.dtype, drawn.shape) == (np.float32, (5000, 3))
    assert np.array_equal(fresh_weights(table, ids[::-1].copy(), seed=3)[::-1], drawn)
    assert abs(drawn.mean()) < 0.005
    assert drawn.min() >= -0.25
    assert drawn.max() < 0.25
    assert abs(drawn.std() - 0.5 / 12**0.5) < 0.002
    assert abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.05
    other = TableSpec(name="shop", rows=10, dim=3, features=("shop",), init_scale=0.25)
    for same in (fresh_weights(table, ids, seed=4), fresh_weights(other, ids, seed=3)):
        assert (same == drawn).mean() < 0.001
