"""The account of rows, and the checks on splits."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import DataSchema, IdFeature, RequestError, Task
from gem_data.collate import Table
from gem_data.ledger import Ledger
from gem_data.sources.base import OneClassSplit, TableSource

SCHEMA = DataSchema(ids=(IdFeature(name="a", cardinality=4),), tasks=(Task(name="ctr"), Task(name="cvr", condition="ctr")))


def source(ctr: list[int], cvr: list[int], *, mask: list[bool] | None = None, train: int = 4, ledger: Ledger | None = None) -> TableSource:
    rows = len(ctr)
    table = Table(
        schema=SCHEMA,
        rows=rows,
        labels={"ctr": torch.tensor(ctr).float(), "cvr": torch.tensor(cvr).float()},
        ids={"a": torch.arange(rows) % 4},
        masks={} if mask is None else {"ctr": torch.tensor(mask)},
    )
    index = torch.arange(rows)
    return TableSource("tiny", table, {"train": index[:train], "test": index[train:]}, ledger or Ledger(rows))


GOOD = {"ctr": [1, 1, 0, 0, 1, 1, 0], "cvr": [1, 0, 0, 0, 1, 0, 0]}


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(0, 9)), st.integers(0, 9), st.integers(0, 9))
def test_ledger_adds_up(dropped: dict[str, int], train: int, test: int) -> None:
    total = sum(dropped.values()) + train + test
    for read in (total, total + 1):
        ledger = Ledger(read)
        for reason, rows in dropped.items():
            ledger.drop(reason, rows)
        ledger.keep("train", train)
        ledger.keep("test", test)
        if read == total:
            expected = {"read": read, "train": train, "test": test}
            assert ledger.counts() == expected | {f"dropped: {reason}": rows for reason, rows in dropped.items() if rows}
        else:
            with pytest.raises(RequestError, match=f"{read} rows read, but .* adds up to {total}"):
                ledger.counts()


def test_rows_of_one_reason_add_up() -> None:
    ledger = Ledger(5)
    ledger.drop("no item", 2)
    ledger.drop("no item", 3)
    assert ledger.counts() == {"read": 5, "dropped: no item": 5}


def test_a_source_enters_its_splits_and_refuses_lost_rows() -> None:
    ledger = Ledger(9)
    ledger.drop("no item", 2)
    data = source(**GOOD, ledger=ledger)
    assert data.ledger() == {"read": 9, "train": 4, "test": 3, "dropped: no item": 2}
    data.ledger()["read"] = 0
    assert data.ledger()["read"] == 9
    with pytest.raises(RequestError, match="8 rows read"):
        source(**GOOD, ledger=Ledger(8))


@pytest.mark.filterwarnings("ignore:tiny. the test split has 0 positives in 0 labels")
def test_case_D13_a_split_of_one_class_warns() -> None:
    with pytest.warns(OneClassSplit, match=r"tiny: the test split has 0 positives in 3 labels of 'ctr'"):
        source([1, 0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0])
    with pytest.warns(OneClassSplit, match=r"the train split has 4 positives in 4 labels of 'ctr'"):
        source([1, 1, 1, 1, 1, 1, 0], [1, 0, 0, 0, 1, 0, 0])


def test_case_D13_counts_observed_labels_only() -> None:
    with pytest.warns(OneClassSplit, match=r"the test split has 2 positives in 2 labels of 'ctr'"):
        source(**GOOD, mask=[True] * 6 + [False])
    with pytest.warns(OneClassSplit, match=r"the train split has 2 positives in 2 labels of 'cvr'"):
        source(GOOD["ctr"], [1, 1, 0, 0, 1, 0, 0])


def test_case_D13_two_classes_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert source(**GOOD).rows("test") == 3


def test_observed_joins_mask_and_condition() -> None:
    data = source(**GOOD, mask=[True, True, True, True, True, True, True])
    assert data.observed("cvr").tolist() == [True, True, False, False, True, True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = source(**GOOD, mask=[False, True, True, True, True, True, True])
    assert masked.observed("ctr").tolist() == [False] + [True] * 6
    assert masked.observed("cvr").tolist() == [False, True, False, False, True, True, False]


@pytest.mark.parametrize(("train", "split"), [(0, "train"), (7, "test")])
def test_an_empty_split_is_refused(train: int, split: str) -> None:
    with pytest.raises(RequestError, match=rf"its {split} split has no row; the ledger is .*'read': 7"):
        source(**GOOD, train=train)


def test_an_unknown_split_is_named() -> None:
    data = source(**GOOD)
    with pytest.raises(RequestError, match=r"split 'valid' of 'tiny': the splits are train, test"):
        data.rows("valid")
    with pytest.raises(RequestError, match="'valid'"):
        data.batches("valid", batch_size=2)


def test_unknown_ids_and_baselines_of_a_plain_table() -> None:
    data = source(**GOOD)
    assert data.unknown_ids("train") == {"a": 1}
    assert data.unknown_ids("test") == {"a": 1}
    assert data.baselines() == {}
    assert data.schema() is SCHEMA
