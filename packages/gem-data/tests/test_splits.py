"""Splits: conditions, exact fractions, stable hashes, and warnings."""

import hashlib
import warnings
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from gem_data.splits import ColdSplit, OneClassSplit, Split, hash_below, ratio, test_condition, warn_about

SPLIT: TypeAdapter[Any] = TypeAdapter(Split)
condition_of = test_condition
del test_condition  # pytest would take it for a test
FRACTIONS = st.integers(1, 999).map(lambda k: k / 1000)


def holds(condition: str, **columns: int | str) -> bool:
    values = ", ".join(f"{value!r} AS {name}" for name, value in columns.items())
    (found,) = duckdb.sql(f"SELECT {condition} FROM (SELECT {values})").fetchall()
    return bool(found[0])


def test_fractions_are_taken_as_written() -> None:
    assert (ratio(0.1).numerator, ratio(0.1).denominator) == (1, 10)
    assert ratio(1 / 3) == ratio(0.3333333333333333)
    assert ratio(1e-7).denominator == 10**7


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fraction=FRACTIONS, n=st.integers(1, 400), data=st.data())
def test_user_fraction_begins_at_the_ceiling(fraction: float, n: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, n - 1))
    condition = condition_of(SPLIT.validate_python({"kind": "user_fraction", "train_fraction": fraction}))
    exact = -(-n * round(fraction * 1000) // 1000)  # ceil(f n) without floats
    assert holds(condition, gem_position=position, gem_user_rows=n) == (position >= exact)


def test_floats_would_have_misplaced_the_border() -> None:
    """0.07 * 100 is 7.000000000000001 in floats, whose ceiling is 8."""
    condition = condition_of(SPLIT.validate_python({"kind": "user_fraction", "train_fraction": 0.07}))
    assert holds(condition, gem_position=7, gem_user_rows=100)
    assert not holds(condition, gem_position=6, gem_user_rows=100)


@pytest.mark.parametrize(("position", "rows", "test"), [(0, 1, True), (0, 2, True), (0, 3, False), (1, 3, True), (2, 3, True)])
def test_leave_last_takes_the_last_rows(position: int, rows: int, test: bool) -> None:
    condition = condition_of(SPLIT.validate_python({"kind": "leave_last", "last": 2}))
    assert holds(condition, gem_position=position, gem_user_rows=rows) is test


def test_time_takes_the_moment_itself() -> None:
    condition = condition_of(SPLIT.validate_python({"kind": "time", "test_from": -5}))
    assert [holds(condition, gem_time=t) for t in (-6, -5, -4)] == [False, True, True]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(key=st.one_of(st.integers(-(2**63), 2**63 - 1), st.text("abé'\\", max_size=5)), share=FRACTIONS, seed=st.integers(0, 9))
def test_the_hash_is_the_md5_of_seed_and_key(key: int | str, share: float, seed: int) -> None:
    condition = condition_of(SPLIT.validate_python({"kind": "hash", "by": "user", "test_fraction": share, "seed": seed}))
    digest = hashlib.md5(f"{seed}:{key}".encode()).hexdigest()
    expected = int(digest[:15], 16) < round(share * 1000) * 16**15 // 1000
    (found,) = duckdb.execute(f"SELECT {condition} FROM (SELECT ? AS gem_user, 3 AS gem_row)", [key]).fetchall()
    assert bool(found[0]) == expected


def test_rows_without_a_request_are_drawn_one_by_one() -> None:
    condition = condition_of(SPLIT.validate_python({"kind": "hash", "test_fraction": 0.5}))
    rows = "SELECT CAST(NULL AS STRING) AS gem_request, k AS gem_row FROM range(40) t(k)"
    drawn = [bool(found) for (found,) in duckdb.sql(f"SELECT {condition} FROM ({rows}) ORDER BY gem_row").fetchall()]
    assert drawn == [int(hashlib.md5(f"0:row {k}".encode()).hexdigest()[:15], 16) < 16**15 // 2 for k in range(40)]
    assert set(drawn) == {True, False}


def test_the_hash_draws_its_share_evenly() -> None:
    ((count,),) = duckdb.sql(f"SELECT count(*) FROM range(20000) t(k) WHERE {hash_below('CAST(k AS STRING)', 0.3)}").fetchall()
    assert abs(count / 20_000 - 0.3) < 4 * (0.21 / 20_000) ** 0.5


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "hash", "test_fraction": 0.0},
        {"kind": "hash", "test_fraction": 1.0},
        {"kind": "hash", "test_fraction": 0.5, "by": "item"},
        {"kind": "user_fraction"},
        {"kind": "leave_last", "last": True},
        {"kind": "time", "test_from": 1.5},
        {"kind": "time", "test_from": 1, "at": 2},
        {"kind": "chance"},
    ],
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SPLIT.validate_python(wrong)


def about(positive: int = 5, observed: int = 10, cold: int = 0) -> dict[str, Any]:
    return {
        "labels": {"train": {"ctr": {"observed": 10, "positive": 5}}, "test": {"ctr": {"observed": observed, "positive": positive}}},
        "ledger": {"read": 20, "train": 10, "test": 10},
        "cold": {"_user": cold, "item": 0},
    }


@pytest.mark.parametrize(("positive", "observed"), [(0, 10), (10, 10), (0, 0)])
def test_case_D13_splits_of_one_class_warn(positive: int, observed: int) -> None:
    with pytest.warns(OneClassSplit, match=f"the test split has {positive} positives in {observed} labels of 'ctr'; AUC and NE are undefined"):
        warn_about(about(positive, observed))


def test_case_D13_mostly_cold_users_warn() -> None:
    with pytest.warns(ColdSplit, match="6 of 10 test rows have a user that no training row has"):
        warn_about(about(cold=6))


def test_case_D13_good_splits_are_quiet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about(about(cold=5))
