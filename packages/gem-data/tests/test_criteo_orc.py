"""Criteo-style clicks from ORC files written here."""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import orc

from gem_core.spec import RequestError
from gem_data.formats.orc import read_orc
from gem_data.logistic import fit_logistic
from gem_data.sources.criteo_orc import CATEGORIES, NUMBERS, CriteoOrc, choose_parts, find_parts, load

COLUMNS = ("label", *NUMBERS, *CATEGORIES)


def write(folder: Path, part: int, rows: int, **columns: list[Any]) -> None:
    """A part file; columns that are not given hold 1 (numbers), 7 (categories) and 0, 1, 0, 1, ... (labels); None becomes an empty list."""
    folder.mkdir(exist_ok=True)
    out = {}
    for name in COLUMNS:
        values = columns.get(name, [r % 2 for r in range(rows)] if name == "label" else [1 if name in NUMBERS else 7] * rows)
        assert len(values) == rows
        lists = [[] if value is None else value if isinstance(value, list) else [value] for value in values]
        filled = [value for one in lists for value in one]
        kind = pa.string() if any(isinstance(v, str) for v in filled) else pa.float64() if any(isinstance(v, float) for v in filled) else pa.int64()
        out[name] = pa.array(lists, pa.list_(kind))
    orc.write_table(pa.table(out), str(folder / f"part-{part}.orc"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two training files of 4 rows and a test file of 3; c1 has ids seen 3, 2 and 1 times in training, one missing and one of the test only."""
    write(tmp_path / "clicks", 0, 4, c1=[-5, -5, 30, None], i1=[-3, None, 0, 8], c2=[1, 2, 3, 4])
    write(tmp_path / "clicks", 1, 4, c1=[-5, 30, 30, 99], i1=[100, 2, None, -50], c2=[5, 6, 7, 8])
    write(tmp_path / "clicks", 10, 3, c1=[30, 1234, None], i1=[-3, None, 5], c2=[1, 8, 9], i2=[None, None, 4])
    return tmp_path / "clicks"


def column(source: CriteoOrc, name: str, split: str) -> list[int]:
    return list(source.table.ids[name][source.index(split)].tolist())


def test_the_last_part_is_the_test_and_rows_keep_their_order(folder: Path) -> None:
    source = load(path=folder, min_count=1)
    assert source.ledger() == {"read": 11, "train": 8, "test": 3}
    assert source.index("test").tolist() == [8, 9, 10]
    assert source.table.labels["ctr"].tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert choose_parts(find_parts(folder), None, None) == ((0, 1), (10,))  # 10 is above 9 as a number, not as text
    assert choose_parts(find_parts(folder), None, [0]) == ((1, 10), (0,))
    assert choose_parts(find_parts(folder), [10], None) == ((10,), (1,))


def test_case_H09_the_path_alone_is_enough(folder: Path) -> None:
    source = load(path=folder)
    batch = next(iter(source.batches("train", batch_size=8)))
    assert batch.rows == 8
    assert set(batch.ids.keys) == set(CATEGORIES)


def test_chosen_parts_are_read_and_others_are_not(folder: Path) -> None:
    (folder / "part-5.orc").write_bytes(b"no ORC file")
    source = load(path=folder, min_count=1, train_parts=(1,), test_parts=(0,))
    assert source.ledger() == {"read": 8, "train": 4, "test": 4}
    with pytest.raises(RequestError, match=r"part-5\.orc: it cannot be read"):
        load(path=folder)


def test_parts_may_have_leading_zeros_but_not_one_number_twice(folder: Path) -> None:
    (folder / "part-1.orc").rename(folder / "part-01.orc")
    assert load(path=folder, min_count=1).ledger() == {"read": 11, "train": 8, "test": 3}
    write(folder, 1, 4)
    with pytest.raises(RequestError, match=r"holds both part-01\.orc and part-1\.orc"):
        load(path=folder)


def test_labels_that_are_texts_are_refused(tmp_path: Path) -> None:
    for part in (0, 1):
        write(tmp_path, part, 2, label=["0", "1"])
    with pytest.raises(RequestError, match="column 'label': it holds String"):
        load(path=tmp_path)


def test_training_rows_of_one_class_have_no_baseline(tmp_path: Path) -> None:
    for label in (0, 1):
        write(tmp_path, 0, 4, label=[label] * 4)
        write(tmp_path, 1, 4)
        with pytest.warns(UserWarning, match="the train split has"):
            source = load(path=tmp_path)
        assert source.baselines() == {}


def test_empty_lists_are_missing_and_unknown_ids_go_to_row_0(folder: Path) -> None:
    source = load(path=folder, min_count=1)
    assert column(source, "c1", "train") == [1, 1, 2, 0, 1, 2, 2, 3]
    assert column(source, "c1", "test") == [2, 0, 0]
    assert column(source, "c2", "test") == [1, 8, 0]
    cardinality = {feature.name: feature.cardinality for feature in source.schema().ids}
    assert (cardinality["c1"], cardinality["c2"], cardinality["c3"]) == (4, 9, 2)
    assert source.unknown_ids("train") == {"c1": 1}
    assert source.unknown_ids("test") == {"c1": 2, "c2": 1}


@pytest.mark.parametrize(("min_count", "expected"), [(2, [1, 1, 2, 0, 1, 2, 2, 0]), (3, [1, 1, 2, 0, 1, 2, 2, 0]), (4, [0] * 8)])
def test_min_count_counts_training_rows_only(folder: Path, min_count: int, expected: list[int]) -> None:
    # 30 occurs three times in training and once more in the test: at 4 it goes
    assert column(load(path=folder, min_count=min_count), "c1", "train") == expected


def test_an_unknown_id_may_be_an_error_that_names_it(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"'c1'.*1 values are not in its vocabulary of 3; the first is 1234"):
        load(path=folder, min_count=1, unknown="error")


def test_hashed_ids_keep_missing_apart_and_stay_in_range(folder: Path) -> None:
    source = load(path=folder, hash_rows=5)
    ids = torch.stack([source.table.ids[name] for name in CATEGORIES])
    assert {feature.cardinality for feature in source.schema().ids} == {6}
    assert (ids.min(), ids.max()) >= (0, 1)
    assert ids.max() <= 5
    assert (source.table.ids["c1"] == 0).nonzero().flatten().tolist() == [3, 10]


def test_numbers_may_be_negative_and_are_scaled_by_training_rows(folder: Path) -> None:
    raw = [-3, None, 0, 8, 100, 2, None, -50, -3, None, 5]
    x = np.array([np.nan if v is None else np.sign(v) * np.log1p(abs(v)) for v in raw])
    scaled = (x - np.nanmean(x[:8])) / (np.nanstd(x[:8]) + 1e-6)
    expected = np.stack([np.nan_to_num(scaled), np.isnan(x)], axis=1)
    found = load(path=folder, min_count=1).table.dense["i1"].numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert (found[found[:, 1] == 0, 0] < 0).any()


def test_a_constant_and_an_all_missing_number_stay_finite(tmp_path: Path) -> None:
    write(tmp_path, 0, 4, i3=[None] * 4)
    write(tmp_path, 1, 2)
    dense = load(path=tmp_path, min_count=1).table.dense
    assert dense["i1"][:, 0].abs().max() < 1e-6
    torch.testing.assert_close(dense["i3"], torch.tensor([[0.0, 1.0]] * 4 + [[float(np.log(2)), 0.0]] * 2))


def test_batches_carry_all_columns(folder: Path) -> None:
    batch = next(iter(load(path=folder, min_count=1).batches("test", batch_size=10)))
    assert batch.ids.keys == CATEGORIES
    assert set(batch.dense) == set(NUMBERS)
    assert batch.dense["i2"][:, 1].tolist() == [1, 1, 0]
    assert batch.labels["ctr"].tolist() == [0, 1, 0]


def test_rows_without_a_label_are_dropped_and_bad_labels_refused(tmp_path: Path) -> None:
    write(tmp_path, 0, 4, label=[0, None, 1, 1], c1=[1, 2, 3, 4])
    write(tmp_path, 1, 3, label=[0, 1, None])
    source = load(path=tmp_path, min_count=1)
    assert source.ledger() == {"read": 7, "train": 3, "test": 2, "dropped: no label": 2}
    assert column(source, "c1", "train") == [1, 2, 3]
    write(tmp_path, 1, 3, label=[0, 1, 2])
    with pytest.raises(RequestError, match=r"'ctr': it holds 2\.0"):
        load(path=tmp_path, min_count=1)


def test_a_missing_folder_or_part_is_named(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere holds no part-N\.orc"):
        load(path=tmp_path / "nowhere")
    with pytest.raises(RequestError, match=r"no part \[3\]; there are \[0, 1, 10\]"):
        load(path=folder, train_parts=(0, 3))
    for train, test in (((0, 1), (1,)), ((), (1,)), ((0, 1, 10), ()), ((0, 0), (1,))):
        with pytest.raises(RequestError, match="each part once"):
            load(path=folder, train_parts=train, test_parts=test)
    with pytest.raises(RequestError):
        load(path=folder, train_parts=(0, 1, 10))


def test_columns_that_are_not_what_they_should_be_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    for columns, message in (
        ({"c4": [[1, 2], 3]}, r"part-0\.orc: column 'c4' holds 2 values in row 0"),
        ({"i5": ["a", "b"]}, "column 'i5'"),
        ({"c6": [0.5, 1.5]}, "column 'c6'"),
    ):
        write(tmp_path, 0, 2, **columns)
        write(tmp_path, 1, 2, **columns if "holds 2" not in message else {})
        with pytest.raises(RequestError, match=message):
            load(path=tmp_path, min_count=1)
    orc.write_table(pa.table({"label": [0, 1]}), str(tmp_path / "part-0.orc"))
    with pytest.raises(RequestError, match=r"part-0\.orc: it lacks the columns i1, .*c26"):
        load(path=tmp_path, min_count=1)


def test_orc_reads_plain_columns_and_strings(tmp_path: Path) -> None:
    path = tmp_path / "x.orc"
    orc.write_table(pa.table({"a": [1, None], "b": pa.array([["x"], []], pa.list_(pa.string())), "rest": [0, 0]}), str(path))
    assert read_orc(path, ("b", "a")).rows() == [("x", 1), (None, None)]


def test_logistic_regression_finds_a_planted_effect() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 4, (4000, 2))
    p = 1 / (1 + np.exp(-(ids[:, 0] - 1.5)))
    labels = (rng.random(4000) < p).astype(np.float64)
    logits = fit_logistic(ids, labels, epochs=20, lr=0.1)
    effects = logits(np.array([[k, 0] for k in range(4)]))
    assert np.all(np.diff(effects) > 0.5)
    unseen = logits(np.array([[9, 9]]))
    assert unseen == pytest.approx(np.log(labels.mean() / (1 - labels.mean())), abs=0.5)


def test_baselines_are_computed_and_beat_a_constant_on_a_planted_signal(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for part, rows in ((0, 1500), (1, 500)):
        label = rng.integers(0, 2, rows)
        signal = np.where(rng.random(rows) < 0.9, label, 1 - label)
        write(tmp_path, part, rows, label=label.tolist(), c1=signal.tolist())
    found = load(path=tmp_path).baselines()["logistic regression"]["ctr"]
    assert 0.80 < found["auc"] < 0.95
    assert found["ne"] < 1


@pytest.mark.skipif(
    not (Path(os.environ.get("GEM_TEST_DATA", "/nonexistent")) / "criteo-clicks").is_dir(),
    reason="GEM_TEST_DATA names no folder that holds criteo-clicks",
)
def test_the_real_files() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = load(path=Path(os.environ["GEM_TEST_DATA"]) / "criteo-clicks")
    ledger = source.ledger()
    assert ledger["read"] == sum(rows for name, rows in ledger.items() if name != "read")
    assert min(source.rows("train"), source.rows("test")) > 1000
    figures = source.baselines()["logistic regression"]["ctr"]
    assert 0.6 < figures["auc"] < 0.9
    assert figures["ne"] < 1
