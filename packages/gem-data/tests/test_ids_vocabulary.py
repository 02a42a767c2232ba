"""Vocabularies and encoders against dictionaries and counters of plain Python."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.spec import RequestError
from gem_data.ids import PassEncoder, Vocabulary, VocabularyBuilder, VocabularyEncoder, encoders
from gem_data.schema import Id, MultiId, Schema, Sequence

IDS = st.sampled_from([0, 1, -1, 7, 2**62]) | st.integers(-5, 5)


def reference(values: list[object], min_count: int) -> dict[object, int]:
    counts = Counter(value for value in values if value is not None)
    kept = sorted((v for v, n in counts.items() if n >= min_count), key=lambda v: (-counts[v], v))
    return {value: number for number, value in enumerate(kept, start=1)}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(IDS | st.none(), max_size=8), max_size=5), st.integers(1, 3), st.lists(IDS | st.none(), max_size=8), st.booleans())
def test_parts_make_the_vocabulary_that_a_counter_makes(parts: list[list[int | None]], min_count: int, asked: list[int | None], text: bool) -> None:
    def column(values: list[int | None]) -> pa.Array:
        return pa.array([None if v is None else str(v) for v in values], pa.string()) if text else pa.array(values, pa.int64())

    builder = VocabularyBuilder("item", min_count=min_count)
    for part in parts:
        builder.add(column(part))
    encoder = VocabularyEncoder("item", builder.build())
    whole = [value for part in parts for value in column(part).to_pylist()]
    rows = reference(whole, min_count)
    assert encoder.cardinality == len(rows) + 1
    queries = column(asked)
    assert encoder.encode(queries).tolist() == [rows.get(value, 0) for value in queries.to_pylist()]
    assert encoder.unknown == sum(v is not None and v not in rows for v in queries.to_pylist())
    assert encoder.missing == queries.null_count


def test_the_order_is_by_count_then_by_value() -> None:
    found = Vocabulary.of("c", pa.array(["b", "a", "c", "c", None, "B", "é"]))
    assert found.values.to_pylist() == ["c", "B", "a", "b", "é"]
    assert found.counts.to_pylist() == [2, 1, 1, 1, 1]
    assert Vocabulary.of("c", pa.array([9, 3, 3, -1])).values.to_pylist() == [3, -1, 9]


def test_many_parts_are_merged_on_the_way() -> None:
    builder = VocabularyBuilder("c")
    for part in range(200):
        builder.add(pa.array([part % 3, part]))
    built = builder.build()
    counts = Counter(value for part in range(200) for value in (part % 3, part))
    assert dict(zip(built.values.to_pylist(), built.counts.to_pylist(), strict=True)) == counts


def test_a_vocabulary_is_written_and_read_back(tmp_path: Path) -> None:
    for values in (pa.array(["b", "é", "b"]), pa.array([2**64 - 1, 5, 5], pa.uint64()), pa.array([], pa.int64())):
        built = Vocabulary.of("v", values)
        path = built.write(tmp_path)
        table = pq.read_table(path)
        assert table.column_names == ["value", "row", "count"]
        assert table["row"].to_pylist() == list(range(1, built.cardinality))
        read = Vocabulary.read(tmp_path, "v")
        assert read.values.equals(built.values)
        assert read.counts.equals(built.counts)
        assert VocabularyEncoder("v", read).encode(values).tolist() == VocabularyEncoder("v", built).encode(values).tolist()


def test_a_missing_or_damaged_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"v\.parquet: there is no such file.*gem data prepare"):
        Vocabulary.read(tmp_path, "v")
    (tmp_path / "v.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(RequestError, match=r"v\.parquet: it cannot be read"):
        Vocabulary.read(tmp_path, "v")
    pq.write_table(pa.table({"value": ["a", "b"], "row": [2, 1], "count": [1, 1]}), tmp_path / "v.parquet")
    with pytest.raises(RequestError, match="its rows are not 1, 2, 3"):
        Vocabulary.read(tmp_path, "v")


def test_case_H10_unknown_ids_are_counted_or_refused() -> None:
    vocabulary = Vocabulary.of("item", pa.array([5, 6, 6]))
    encoder = VocabularyEncoder("item", vocabulary)
    assert encoder.cardinality == 3
    assert encoder.encode(pa.array([5, 3, -1, None, 6])).tolist() == [2, 0, 0, 0, 1]
    assert encoder.encode(pa.chunked_array([[3], [6]])).tolist() == [0, 1]
    assert (encoder.unknown, encoder.missing) == (3, 1)
    strict = VocabularyEncoder("item", vocabulary, "error")
    assert strict.encode(pa.array([6, None])).tolist() == [1, 0]
    with pytest.raises(RequestError, match=r"'item'.*2 values are not in its vocabulary of 2; the first is 3"):
        strict.encode(pa.array([5, 3, -1]))
    assert strict.unknown == 0


def test_case_H10_an_id_that_is_no_row_is_counted_or_refused() -> None:
    encoder = PassEncoder("item", 10)
    assert encoder.encode(pa.array([0, 9, 10, -1, None, 2**62])).tolist() == [0, 9, 0, 0, 0, 0]
    assert (encoder.unknown, encoder.missing, encoder.cardinality) == (3, 1, 10)
    assert encoder.encode(pa.array([2**64 - 1, 3], pa.uint64())).tolist() == [0, 3]
    assert encoder.encode(pa.array([2, None, 3], pa.int8()).dictionary_encode()).tolist() == [2, 0, 3]
    with pytest.raises(RequestError, match=r"1 values are not rows of its table, 0 \.\. 9; the first is 10"):
        PassEncoder("item", 10, "error").encode(pa.array([1, 10]))
    with pytest.raises(RequestError, match="they are large_string, and its encoding is 'pass'"):
        encoder.encode(pa.array(["1"]))


def test_missing_values_are_not_unknown() -> None:
    for encoder in (PassEncoder("item", 10, "error"), VocabularyEncoder("item", Vocabulary.of("item", pa.array([1])), "error")):
        assert encoder.encode(pa.nulls(2, pa.int64())).tolist() == [0, 0]
        assert (encoder.missing, encoder.unknown) == (2, 0)


def test_signed_and_unsigned_ids_of_the_same_bits_are_different() -> None:
    signed = VocabularyEncoder("v", Vocabulary.of("v", pa.array([-1, 5])))
    assert signed.encode(pa.array([2**64 - 1, 5], pa.uint64())).tolist() == [0, 2]
    unsigned = VocabularyEncoder("v", Vocabulary.of("v", pa.array([2**64 - 1, 5], pa.uint64())))
    assert unsigned.encode(pa.array([-1, 5])).tolist() == [0, 1]


def test_texts_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_data.ids.vocabulary.text_keys", lambda values: np.full(len(values), 7, np.uint64))
    encoder = VocabularyEncoder("v", Vocabulary.of("v", pa.array(["a"])))
    assert encoder.encode(pa.array(["b", "a"])).tolist() == [0, 1]


def test_a_vocabulary_of_texts_takes_integers_and_not_the_other_way_round() -> None:
    assert VocabularyEncoder("v", Vocabulary.of("v", pa.array(["7", "x"]))).encode(pa.array([7, 8])).tolist() == [1, 0]
    with pytest.raises(RequestError, match="they are texts, and its vocabulary holds integers"):
        VocabularyEncoder("v", Vocabulary.of("v", pa.array([7]))).encode(pa.array(["7"]))


def test_parts_of_different_types_join_or_are_refused() -> None:
    builder = VocabularyBuilder("v")
    builder.add(pa.array([1, 2], pa.int8()))
    builder.add(pa.array([2, 2**64 - 1], pa.uint64()))
    assert builder.build().values.to_pylist() == [2, 1, 2**64 - 1]
    for first, second, message in (
        (pa.array([1]), pa.array(["a"]), "texts in one part and integers in another"),
        (pa.array([-1]), pa.array([2**64 - 1], pa.uint64()), "negative in one part"),
    ):
        mixed = VocabularyBuilder("v")
        mixed.add(first)
        mixed.add(second)
        with pytest.raises(RequestError, match=message):
            mixed.build()


def shop() -> Schema:
    item = Id(name="item", encode="vocabulary", min_count=1)
    return Schema(
        id=(item, Id(name="site", encode="hash", rows=100), Id(name="slot", encode="pass", rows=4, unknown="error")),
        multi_id=(MultiId(name="tags", encode="vocabulary"),),
        sequence=(Sequence(name="clicks", max_length=9, id=(Id(name="item", encode="vocabulary"),)),),
    )


def shop_batch() -> pa.RecordBatch:
    columns = {
        "item": pa.array(["a", "b", None]),
        "site": pa.array([1, 2, 1]),
        "slot": pa.array([1, 2, 3]),
        "tags": pa.array([["t"], [], None], pa.list_(pa.string())),
        "clicks.item": pa.array([["c", "b"], [], ["b"]]),
    }
    return pa.RecordBatch.from_pydict(columns)


def write_vocabularies(folder: Path) -> None:
    """Of training rows that hold the items b, b, a, c and the tag t."""
    for table, values in (("item", ["b", "a", "c", "b"]), ("tags", ["t"])):
        Vocabulary.of(table, pa.array(values)).write(folder / "vocabulary")


def test_features_of_one_table_share_a_vocabulary_and_count_for_themselves(tmp_path: Path) -> None:
    schema, batch = shop(), shop_batch()
    write_vocabularies(tmp_path)
    found = encoders(schema, tmp_path)
    assert list(found) == ["item", "site", "slot", "tags", "clicks.item"]
    assert found["item"].encode(batch["item"]).tolist() == [2, 1, 0]
    assert found["clicks.item"].encode(batch["clicks.item"].flatten()).tolist() == [3, 1, 1]
    assert found["clicks.item"].encode(pa.array(["new"])).tolist() == [0]
    assert {key: (e.unknown, e.missing) for key, e in found.items()}["clicks.item"] == (1, 0)
    assert (found["item"].unknown, found["item"].missing) == (0, 1)
    assert [found[key].cardinality for key in found] == [4, 100, 4, 2, 4]
    with pytest.raises(RequestError, match="ids of 'slot': 1 values are not rows"):
        found["slot"].encode(pa.array([4]))


def test_a_schema_and_a_vocabulary_that_disagree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"item\.parquet: there is no such file"):
        encoders(shop(), tmp_path)
    write_vocabularies(tmp_path)
    wrong = Schema(id=(Id(name="item", encode="vocabulary", rows=9),))
    with pytest.raises(RequestError, match="id 'item': the schema states 9 rows and its vocabulary has 4"):
        encoders(wrong, tmp_path)
    assert encoders(Schema(id=(Id(name="item", encode="vocabulary", rows=4),)), tmp_path)["item"].cardinality == 4
