"""The stable hash against a slow version of its documented definition."""

import re

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_data.ids import HashEncoder, hash_keys
from gem_data.ids.hashing import text_keys

ALL = 2**64 - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & ALL
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & ALL
    return x ^ (x >> 31)


def key_of_bytes(data: bytes) -> int:
    h = len(data)
    for at in range(0, len(data), 8):
        h = mix((h ^ int.from_bytes(data[at : at + 8], "little")) + 0x9E3779B97F4A7C15 & ALL)
    return h


def key(value: int | str) -> int:
    if isinstance(value, str):
        if re.fullmatch(r"0|-?[1-9][0-9]*", value) and -(2**63) <= int(value) < 2**64:
            return key(int(value))
        return key_of_bytes(value.encode())
    return mix((value & ALL) + 0x9E3779B97F4A7C15 & ALL)


def row(value: int | str, rows: int, salt: str) -> int:
    return mix(key(value) ^ key_of_bytes(salt.encode())) % (rows - 1) + 1


TEXTS = st.text(max_size=40) | st.from_regex(r"\A-?[0-9]{1,21}\Z") | st.integers(-(2**63), 2**64 - 1).map(str)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXTS | st.none(), max_size=12), st.integers(2, 10**6), st.text(max_size=9))
def test_strings_hash_as_the_definition_says(values: list[str | None], rows: int, salt: str) -> None:
    found = HashEncoder("f", rows, salt).encode(pa.array(values, pa.string()))
    assert found.tolist() == [0 if value is None else row(value, rows, salt) for value in values]
    assert found.dtype == np.int64


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.none(), max_size=12), st.lists(st.integers(0, 2**64 - 1) | st.none(), max_size=12))
def test_integers_of_both_kinds_hash_as_the_definition_says(signed: list[int | None], unsigned: list[int | None]) -> None:
    for values, kind in ((signed, pa.int64()), (unsigned, pa.uint64())):
        found = HashEncoder("f", 1000, "t").encode(pa.array(values, kind))
        assert found.tolist() == [0 if value is None else row(value, 1000, "t") for value in values]


@pytest.mark.parametrize("value", [0, 1, -1, 42, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 10000169349117863715])
def test_case_H18_an_id_hashes_alike_as_text_and_as_integer(value: int) -> None:
    kind = pa.uint64() if value >= 2**63 else pa.int64()
    assert hash_keys(pa.array([value], kind)).tolist() == hash_keys(pa.array([str(value)], pa.large_string())).tolist() == [key(value)]


@pytest.mark.parametrize("text", ["042", "+42", "-0", " 42", "42 ", "4.2", "", "-", str(2**64), str(-(2**63) - 1), "9" * 20, "\uff14\uff12"])
def test_texts_that_are_not_an_integers_own_form_are_texts(text: str) -> None:
    assert hash_keys(pa.array([text], pa.large_string())).tolist() == [key_of_bytes(text.encode())]


def test_case_H17_rows_are_pinned_so_that_no_version_or_platform_changes_them() -> None:
    encoder = HashEncoder("brand", 1001, "brand")
    assert encoder.encode(pa.array(["x", "y", "é", "05db9164", None, ""])).tolist() == [763, 294, 105, 28, 0, 554]
    assert encoder.encode(pa.array([7, -7, None, 2**40])).tolist() == [964, 546, 0, 603]


def test_case_H17_hashes_of_one_column_spread_evenly() -> None:
    for values in (pa.array([str(k) for k in range(5000)]), pa.array(range(5000)), pa.array([f"v{k}" for k in range(5000)])):
        counts = np.bincount(HashEncoder("brand", 51, "brand").encode(values), minlength=51)
        assert counts[0] == 0
        assert 0.5 * 100 < counts[1:].min() <= counts[1:].max() < 1.6 * 100


def test_tables_collide_independently() -> None:
    values = pa.array(range(2000))
    one, other = (HashEncoder("f", 101, salt).encode(values) for salt in ("one", "other"))
    assert 0.001 < (one == other).mean() < 0.03


@pytest.mark.parametrize(
    "values",
    [
        pa.array(["a", "b", None, "a"]),
        pa.array(["a", "b", None, "a"], pa.large_string()),
        pa.array(["a", "b", None, "a"]).dictionary_encode(),
        pa.array(["zz", "a", "b", None, "a", "yy"]).slice(1, 4),
        pa.chunked_array([["a"], [], ["b", None, "a"]]),
        pa.DictionaryArray.from_arrays(pa.array([1, 2, 0, 1]), pa.array([None, "a", "b"])),
        pl.Series(["a", "b", None, "a"]).to_arrow(),
        pl.Series(["a", "b", None, "a"], dtype=pl.Categorical).to_arrow(),
    ],
)
def test_case_H15_every_way_to_store_texts_gives_the_same_rows(values: pa.Array) -> None:
    encoder = HashEncoder("f", 1000, "f")
    assert encoder.encode(values).tolist() == [row("a", 1000, "f"), row("b", 1000, "f"), 0, row("a", 1000, "f")]
    assert (encoder.missing, encoder.unknown) == (1, 0)


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint8(), pa.int16(), pa.uint32(), pa.int32(), pa.int64(), pa.uint64()])
def test_case_H14_every_width_of_integers_gives_the_same_rows(kind: pa.DataType) -> None:
    assert HashEncoder("f", 1000, "f").encode(pa.array([3, None, 9], kind)).tolist() == [row(3, 1000, "f"), 0, row(9, 1000, "f")]


@pytest.mark.parametrize("values", [pa.array([1.5]), pa.array([[1]]), pa.array([b"a"]), pa.array([1]).cast(pa.timestamp("s"))])
def test_what_cannot_be_ids_is_refused(values: pa.Array) -> None:
    with pytest.raises(RequestError, match=r"ids of 'f': they are "):
        HashEncoder("f", 1000, "f").encode(values)


def test_nothing_and_one_very_long_text_are_hashed() -> None:
    encoder = HashEncoder("f", 1000, "f")
    assert encoder.encode(pa.array([], pa.string())).tolist() == encoder.encode(pa.chunked_array([], pa.int64())).tolist() == []
    assert encoder.encode(pa.nulls(3)).tolist() == [0, 0, 0]
    long = "ab" * 5_000
    assert encoder.encode(pa.array(["x", long, ""])).tolist() == [row(text, 1000, "f") for text in ("x", long, "")]


def test_keys_are_of_any_text_or_integer_type_and_never_of_missing_values() -> None:
    for values in (pa.array(["a", "7"]), pa.array(["a", "7"], pa.large_string()), pa.array(["x", "a", "7"]).slice(1)):
        assert hash_keys(values).tolist() == [key("a"), key(7)]
    assert hash_keys(pa.array([7], pa.int8())).tolist() == [key(7)]
    with pytest.raises(RequestError, match="1 values are missing"):
        hash_keys(pa.array([1, None]))


def test_the_bytes_beside_a_text_do_not_matter() -> None:
    body = pa.array(["abc", "Xabc", "abcX", "abc"], pa.large_string())
    keys = text_keys(body)
    assert keys[0] == keys[3]
    assert len({int(k) for k in keys}) == 3
    assert text_keys(body.slice(3)).tolist() == [keys[0]]
