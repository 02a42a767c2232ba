"""MovieLens-100K: split, labels, histories and leakage on a small data set in the same format."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Batch
from gem_core.spec import RequestError
from gem_data.fetch import RELEASES, default_folder, is_complete
from gem_data.history import PastIndex, RunningSum
from gem_data.sources.ml_100k import MovieLens100K, load

Rating = tuple[str, str, int, int]

# Times tie inside a user, also across the cut between training and test rows (ann: places 7 and 8 of 10).
RATINGS: list[Rating] = [
    ("ann", "12", 4, 600),
    ("ann", "10", 5, 100),
    ("bob", "10", 2, 50),
    ("ann", "11", 3, 100),
    ("ann", "13", 1, 200),
    ("cat", "10", 4, 300),
    ("ann", "14", 4, 200),
    ("bob", "15", 5, 60),
    ("ann", "15", 2, 200),
    ("ann", "16", 5, 300),
    ("bob", "12", 4, 60),
    ("ann", "17", 3, 400),
    ("ann", "18", 4, 500),
    ("ann", "19", 2, 500),
    ("bob", "18", 1, 450),
    ("bob", "13", 4, 450),
    ("bob", "20", 5, 900),
    ("dan", "10", 3, 700),
]
USERS = ["ann\t24\tF\twriter\t9021", "bob\t\tM\t\tE4B", "cat\tx\tF\tdoctor\t0"]  # dan is missing
ITEMS = [
    "10\tOne\t1995\tDrama War",
    "11\tTwo\tunknown\tDrama",
    "12\tThree\t\t",
    "13\tFour\t1940\tWar",
    "14\tFive\t1989\tComedy",
    "15\tSix\t1990\tComedy",
    "16\tSeven\t1998\tDrama",
    "17\tEight\t2005\tDrama",
    "18\tNine\t1997\tWar",
    "19\tTen\t1994\tDrama",
]  # 20 is missing


def write(folder: Path, ratings: list[Rating], extra: tuple[str, ...] = (), users: list[str] = USERS, items: list[str] = ITEMS) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["\t".join(map(str, rating)) for rating in ratings]
    contents = {
        "inter": ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines, *extra],
        "user": ["user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", *users],
        "item": ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", *items],
    }
    for ending, text in contents.items():
        (folder / f"ml-100k.{ending}").write_text("\n".join(text) + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "small", RATINGS)


def small(folder: Path, **options: Any) -> MovieLens100K:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load(path=folder, **options)


def in_time_order(ratings: list[Rating] = RATINGS) -> list[Rating]:
    return sorted(ratings, key=lambda rating: rating[3])


def last_fifth(ratings: list[Rating]) -> set[int]:
    """Rows at place ceil(0.8 n) or later among the user's n events, in stable time order; by a loop."""
    chosen = set()
    for user in {rating[0] for rating in ratings}:
        rows = [r for r, rating in enumerate(ratings) if rating[0] == user]
        chosen |= {row for place, row in enumerate(rows) if place >= -(-8 * len(rows) // 10)}
    return chosen


def test_split_is_each_users_last_fifth(folder: Path) -> None:
    source, ratings = small(folder), in_time_order()
    expected = last_fifth(ratings)
    assert set(source.index("test").tolist()) == expected
    assert set(source.index("train").tolist()) == set(range(len(ratings))) - expected
    by_user = {user: sum(ratings[r][0] == user for r in expected) for user in ("ann", "bob", "cat", "dan")}
    assert by_user == {"ann": 2, "bob": 1, "cat": 0, "dan": 0}
    assert source.ledger() == {"read": 18, "train": 15, "test": 3}
    assert (source.rows("train"), source.rows("test")) == (15, 3)


def test_label_is_four_stars_or_more(folder: Path) -> None:
    labels = small(folder).table.labels["like"].tolist()
    assert labels == [float(rating[2] >= 4) for rating in in_time_order()]


@pytest.mark.parametrize("rule", ["strict", "order"])
@pytest.mark.parametrize("length", [2, 50])
def test_history_is_what_a_loop_finds(folder: Path, rule: str, length: int) -> None:
    source, ratings = small(folder, history_rule=rule, history_length=length), in_time_order()
    batch = source.table.batch(torch.arange(len(ratings)))
    offsets = batch.event_offsets["history"].offsets.tolist()
    stars, times = batch.ids["history.rating"].values.tolist(), batch.event_time["history"].tolist()
    for row, (user, _, _, now) in enumerate(ratings):
        earlier = [r for r in ratings[:row] if r[0] == user and (rule == "order" or r[3] < now)][-length:]
        here = slice(offsets[row], offsets[row + 1])
        assert times[here] == [r[3] for r in earlier]
        assert stars[here] == [r[2] for r in earlier]


def leaks(batch: Batch) -> int:
    """History events at or after their impression."""
    assert batch.time is not None
    return int((batch.event_time["history"] >= batch.time.repeat_interleave(batch.event_offsets["history"].lengths())).sum())


def test_no_history_event_at_or_after_the_impression_under_strict(folder: Path) -> None:
    for split in ("train", "test"):
        batches = list(small(folder).batches(split, batch_size=4, seed=1))
        assert sum(batch.rows for batch in batches) == small(folder).rows(split)
        assert [leaks(batch) for batch in batches] == [0] * len(batches)


def test_the_leakage_check_finds_the_ties_of_the_order_rule(folder: Path) -> None:
    batches = small(folder, history_rule="order").batches("train", batch_size=100)
    assert sum(leaks(batch) for batch in batches) > 0


def changed(folder: Path, user: str, item: str, stars: int) -> Path:
    ratings = [(u, i, stars if (u, i) == (user, item) else s, t) for u, i, s, t in RATINGS]
    assert ratings != RATINGS
    return write(folder.parent / "changed", ratings)


def features(source: MovieLens100K, rows: torch.Tensor) -> torch.Tensor:
    batch = source.table.batch(rows)
    return torch.cat(list(batch.dense.values()), dim=1)


@pytest.mark.parametrize("statistics", ["past", "crossfit"])
@pytest.mark.parametrize("rule", ["strict", "order"])
def test_a_test_label_reaches_no_training_row_and_not_its_own(folder: Path, statistics: str, rule: str) -> None:
    options = {"item_statistics": statistics, "history_rule": rule}
    # ann's 19 at 500 is her first test row: bob's training rows and ann's tied training row must not see it
    before, after = small(folder, **options), small(changed(folder, "ann", "19", 5), **options)
    ratings, train = in_time_order(), before.index("train")
    own = torch.tensor([next(r for r, rating in enumerate(ratings) if rating[:2] == ("ann", "19"))])
    assert int(own) in last_fifth(ratings)
    assert torch.equal(features(before, train), features(after, train))
    assert torch.equal(before.table.batch(train).event_dense["history.surprise"], after.table.batch(train).event_dense["history.surprise"])
    assert torch.equal(features(before, own), features(after, own))
    assert not torch.equal(before.table.labels["like"][own], after.table.labels["like"][own])


def test_the_leakage_comparison_sees_a_training_rating(folder: Path) -> None:
    before, after = small(folder), small(changed(folder, "ann", "10", 1))
    rows = before.index("train")
    assert not torch.allclose(features(before, rows), features(after, rows))


@pytest.mark.parametrize("statistics", ["past", "crossfit"])
def test_features_are_finite_and_within_four_deviations(folder: Path, statistics: str) -> None:
    source = small(folder, item_statistics=statistics)
    values = features(source, torch.arange(source.table.rows))
    assert torch.isfinite(values).all()
    assert values.abs().max() <= 4
    assert values.std(0).max() > 0.5


def test_item_ids_are_of_training_items_and_shared_with_the_history(folder: Path) -> None:
    source, ratings = small(folder), in_time_order()
    chosen = last_fifth(ratings)
    counts = Counter(rating[1] for row, rating in enumerate(ratings) if row not in chosen)
    known = sorted(counts, key=lambda item: (-counts[item], item))
    rows = {item: known.index(item) + 1 if item in known else 0 for _, item, _, _ in ratings}
    assert source.table.ids["item"].tolist() == [rows[rating[1]] for rating in ratings]
    assert rows["19"] == rows["20"] == 0
    assert source.unknown_ids("test")["item"] == 2
    last = next(r for r, rating in enumerate(ratings) if rating[:2] == ("ann", "12"))
    history = source.table.batch(torch.tensor([last])).ids["history.item"].values.tolist()
    assert history == [rows[rating[1]] for rating in ratings[:last] if rating[0] == "ann" and rating[3] < 600]


def test_missing_and_non_numeric_fields_go_to_row_0(folder: Path) -> None:
    source, ratings = small(folder), in_time_order()
    first = {key: next(r for r, rating in enumerate(ratings) if key in rating[:2]) for key in ("ann", "bob", "cat", "dan", *map(str, range(10, 21)))}
    table = source.table
    age, occupation, zip_code = (table.ids[name].tolist() for name in ("age", "occupation", "zip"))
    assert [age[first[user]] for user in ("ann", "bob", "cat", "dan")] == [2, 0, 0, 0]
    assert occupation[first["bob"]] == occupation[first["dan"]] == 0 != occupation[first["ann"]]
    assert [zip_code[first[user]] for user in ("ann", "bob", "cat", "dan")] == [10, 11, 1, 0]
    release = {item: table.ids["release"].tolist()[first[item]] for item in map(str, range(10, 21))}
    assert release == {"10": 13, "11": 0, "12": 0, "13": 3, "14": 7, "15": 8, "16": 16, "17": 17, "18": 15, "19": 12, "20": 0}
    genres = table.batch(torch.tensor([first[item] for item in ("10", "12", "20")])).ids["genres"]
    assert genres.lengths().tolist() == [2, 0, 0]
    assert genres.values.min() > 0


def test_case_B25_no_film_has_a_genre(tmp_path: Path) -> None:
    items = [line.rpartition("\t")[0] + "\t" for line in ITEMS]
    batch = next(iter(small(write(tmp_path / "plain", RATINGS, items=items)).batches("train", batch_size=4)))
    assert batch.ids["genres"].lengths().tolist() == [0] * 4


def test_rows_that_lack_a_field_are_dropped_and_counted(tmp_path: Path) -> None:
    extra = ("\t10\t3\t5", "ann\t\t3\t5", "ann\t10\t3\t", "ann\t10\t3\tsoon", "ann\t10\t7\t5", "ann\t10\tgood\t5", "ann\t10\t3.5\t5")
    source = small(write(tmp_path / "torn", RATINGS, extra))
    ledger = source.ledger()
    assert ledger == {
        "read": 25,
        "train": 15,
        "test": 3,
        "dropped: no user": 1,
        "dropped: no item": 1,
        "dropped: no timestamp": 2,
        "dropped: rating is not 1, 2, 3, 4 or 5": 3,
    }
    assert ledger["read"] == sum(rows for name, rows in ledger.items() if name != "read")


@pytest.mark.parametrize("time", ["1e300", "-1e300", "881250949.5", "1e17"])
def test_a_timestamp_that_is_no_whole_second_is_dropped_and_counted(tmp_path: Path, time: str) -> None:
    source = small(write(tmp_path / "x", RATINGS, (f"ann\t10\t4\t{time}",)))
    assert source.ledger()["dropped: timestamp is no whole number of seconds"] == 1
    assert source.table.rows == len(RATINGS)


def test_ratings_without_a_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"ml-100k\.inter: no rating of 0 can be used"):
        small(write(tmp_path / "none", []))
    with pytest.raises(RequestError, match=r"no rating of 1 can be used"):
        small(write(tmp_path / "bad", [], ("ann\t10\t9\t100",)))


def test_training_rows_of_one_class_have_no_baseline(tmp_path: Path) -> None:
    assert small(write(tmp_path / "x", [(user, item, 5, time) for user, item, _, time in RATINGS])).baselines() == {}


def test_reading_warns_of_nothing_that_goes_away(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        small(folder)


def test_a_missing_folder_says_how_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="gem data fetch ml-100k"):
        load(path=tmp_path / "nowhere")
    monkeypatch.setenv("GEM_DATA_HOME", str(tmp_path / "home"))
    with pytest.raises(RequestError, match=r"home/ml-100k does not hold ml-100k\.inter.*synthetic"):
        load()


def test_one_missing_file_and_a_repeated_key_are_named(folder: Path) -> None:
    write(folder, RATINGS, users=[*USERS, USERS[0]])
    with pytest.raises(RequestError, match=r"ml-100k\.user: user_id 'ann' occurs more than once"):
        load(path=folder)
    (folder / "ml-100k.item").unlink()
    with pytest.raises(RequestError, match=r"does not hold ml-100k\.item\."):
        load(path=folder)


def test_the_cache_is_used_when_no_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEM_DATA_HOME", str(tmp_path))
    write(tmp_path / "ml-100k", RATINGS)
    assert load().rows("train") == 15


def test_baseline_adds_the_log_odds_of_user_and_item(folder: Path) -> None:
    found = small(folder).baselines()["target encoding"]["like"]
    ratings = in_time_order()
    chosen = last_fifth(ratings)
    train = [r for row, r in enumerate(ratings) if row not in chosen]
    rate = np.mean([r[2] >= 4 for r in train])

    def odds(column: int, value: str) -> float:
        # all items outside training share row 0, which has no training row
        likes = [r[2] >= 4 for r in train if r[column] == value]
        p = (sum(likes) + 5 * rate) / (len(likes) + 5)
        return float(np.log(p / (1 - p)) - np.log(rate / (1 - rate)))

    logits = np.array([odds(0, r[0]) + odds(1, r[1]) for row, r in enumerate(ratings) if row in chosen]) + np.log(rate / (1 - rate))
    labels = np.array([r[2] >= 4 for row, r in enumerate(ratings) if row in chosen])
    p = 1 / (1 + np.exp(-logits))
    mean = labels.mean()
    loss = -np.where(labels, np.log(p), np.log(1 - p)).mean()
    pairs = [(a > b) + (a == b) / 2 for a in p[labels] for b in p[~labels]]
    assert found["ne"] == pytest.approx(loss / -(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))
    assert found["auc"] == pytest.approx(np.mean(pairs))


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=20))
def test_past_index_and_running_sums_equal_a_loop(events: list[tuple[int, int]]) -> None:
    keys, times = np.array([k for k, _ in events]), np.array([t for _, t in events])
    values = np.arange(keys.size, dtype=np.float64) + 0.5
    index = PastIndex(keys, times)
    begin, end = index.before(keys, times)
    sums = RunningSum(index, values).over(begin, end)
    means = RunningSum(index, values).shrunk_mean(begin, end, 2.0)
    for row, (key, time) in enumerate(events):
        past = [r for r, (k, t) in enumerate(events) if k == key and t < time]
        assert sorted(index.order[begin[row] : end[row]].tolist()) == past
        assert sums[row] == pytest.approx(values[past].sum())
        assert means[row] == pytest.approx(values[past].sum() / (len(past) + 2))
    assert index.order[index.positions()].tolist() == list(range(keys.size))


@pytest.mark.skipif(
    not is_complete(RELEASES["ml-100k"], default_folder("ml-100k")), reason="MovieLens-100K is not in the cache: gem data fetch ml-100k"
)
def test_the_real_data_set() -> None:
    source = load()
    assert source.ledger()["read"] == source.rows("train") + source.rows("test") == 100_000
    users, test = source.table.groups, source.index("test")
    assert users is not None
    counts, tested = torch.bincount(users), torch.bincount(users[test], minlength=943)
    assert counts.numel() == 943
    assert torch.equal(tested, counts - (counts * 8 + 9) // 10)
    assert [leaks(batch) for batch in source.batches("test", batch_size=30_000)] == [0]
    figures = source.baselines()["target encoding"]["like"]
    assert 0.70 < figures["auc"] < 0.85
    assert figures["ne"] < 1
