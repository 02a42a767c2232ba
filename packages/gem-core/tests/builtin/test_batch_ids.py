"""The check of a batch's ids before a look-up, against a loop over every id."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import Jagged, KeyedJagged, check_offsets
from gem_core.spec import RequestError

Limits = dict[str, tuple[str, int]]
LIMITS: Limits = {"a": ("first", 5), "b": ("second", 9), "d": ("first", 5)}
"""Feature ``c`` is in the batch and in no table."""


def packed(columns: Mapping[str, list[int]], dtype: torch.dtype = torch.int64) -> KeyedJagged:
    """Columns of one row."""
    jagged = {key: Jagged(torch.tensor(ids, dtype=dtype), torch.tensor([0, len(ids)]), len(ids)) for key, ids in columns.items()}
    return KeyedJagged.from_columns(jagged, 1)


def first_wrong(columns: Mapping[str, list[int]]) -> tuple[str, int] | None:
    return next(((key, i) for key, ids in columns.items() if key in LIMITS for i in ids if not 0 <= i < LIMITS[key][1]), None)


ids = st.lists(st.one_of(st.integers(0, 4), st.integers(-2, 10), st.sampled_from([-(2**63), 2**63 - 1, 2**32])), max_size=5)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(columns=st.fixed_dictionaries(dict.fromkeys("cabd", ids)))
def test_case_H10_the_first_id_without_a_row_is_named(columns: dict[str, list[int]]) -> None:
    wrong = first_wrong(columns)
    if wrong is None:
        packed(columns).check_ids(LIMITS)
        return
    with pytest.raises(RequestError) as caught:
        packed(columns).check_ids(LIMITS)
    assert f"ids of feature {wrong[0]!r}: id {wrong[1]} is not a row of table {LIMITS[wrong[0]][0]!r}" in str(caught.value)


def test_case_C08_int32_ids_and_no_rows() -> None:
    packed({key: [4] for key in "abd"}, torch.int32).check_ids(LIMITS)
    packed({key: [] for key in "abd"}).check_ids(LIMITS)
    with pytest.raises(RequestError, match="id -1"):
        packed({"a": [], "b": [-1], "d": []}, torch.int32).check_ids(LIMITS)


def test_ids_of_a_strided_tensor() -> None:
    wide = torch.tensor([[1, 9], [2, 9], [3, 9]])
    batch = replace(packed({"a": [0, 0, 0], "b": [], "d": []}), values=wide[:, 0])
    batch.check_ids(LIMITS)
    with pytest.raises(RequestError, match="'a': id 9"):
        replace(batch, values=wide[:, 1]).check_ids(LIMITS)


def test_offsets_are_checked_once() -> None:
    """Packed columns are sound and stay so in copies; offsets from elsewhere are looked at in each look-up."""
    batch = packed({"a": [1], "b": [2], "d": [3]})
    assert batch.sound
    assert batch.select(["b"]).sound
    assert batch.to("cpu").sound
    foreign = KeyedJagged(("a",), torch.tensor([1, 2]), torch.tensor([0, 2, 1, 2]), 3, (0, 2), (2,))
    for _ in range(2):
        with pytest.raises(RequestError, match="offsets fall from 2 to 1 at index 1"):
            foreign.check_ids({"a": ("first", 5)})
    with pytest.raises(RequestError, match="4 offsets for 1 columns of 2 rows"):
        replace(foreign, rows=2).check_ids({"a": ("first", 5)})


@pytest.mark.parametrize(
    ("offsets", "words"),
    [([1, 2], "the first offset is 1"), ([0, 3, 2, 2], "fall from 3 to 2 at index 1"), ([0, 1], "last offset 1 but 2 values"), ([[0, 2]], "shape")],
)
def test_case_B10_B11_unsound_offsets_are_named(offsets: list[int], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        check_offsets(torch.tensor(offsets), 2, "x")
