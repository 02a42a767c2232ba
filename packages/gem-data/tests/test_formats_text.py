"""Text formats: what a line may look like, and that no row is lost or changed without a word."""

import csv
import gzip
import io
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv as pacsv

from gem_core.spec import RequestError
from gem_data.formats import Scan, scan
from gem_data.formats import lines as lines_module
from gem_data.formats.infer import guess_type


def rows_of(found: Scan) -> list[dict[str, Any]]:
    return pa.Table.from_batches(list(found.batches()), found.schema).to_pylist()


def write(folder: Path, content: bytes | str, name: str = "x.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(folder: Path, content: bytes | str, name: str = "x.csv", **how: Any) -> list[dict[str, Any]]:
    return rows_of(scan(write(folder, content, name), **how))


FIELDS = st.text(st.characters(exclude_characters="\r\x00", exclude_categories=("Cs",)), max_size=6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(FIELDS, FIELDS, FIELDS), max_size=6), st.sampled_from([",", ";"]), st.booleans(), st.integers(1, 5))
def test_quoted_fields_come_back_as_python_wrote_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, ...]], separator: str, last_end: bool, batch_rows: int
) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=separator, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows([("a", "b", "c"), *rows])
    text = out.getvalue() if last_end else out.getvalue().removesuffix("\n")
    types = dict.fromkeys("abc", "string")
    path = write(tmp_path_factory.mktemp("q"), text)
    found = scan(path, separator=separator, types=types, missing=(), batch_rows=batch_rows)
    assert [tuple(row.values()) for row in rows_of(found)] == rows
    assert [batch.num_rows for batch in found.batches()] == [min(batch_rows, len(rows) - k) for k in range(0, len(rows), batch_rows)]
    assert found.dropped == {}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.text("ab:é;7 ", max_size=5), min_size=3, max_size=3), min_size=1, max_size=6),
    st.sampled_from(["::", "\x01", "|", "\t", "é", "::;"]),
    st.sampled_from(["utf-8", "latin-1", "utf-16"]),
    st.integers(1, 40),
)
def test_any_separator_in_any_encoding_splits_as_python_does(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]], separator: str, encoding: str, read_bytes: int
) -> None:
    text = "".join(separator.join(row) + "\n" for row in rows)
    expected = [line.split(separator) for line in text.splitlines()]
    path = write(tmp_path_factory.mktemp("s"), text.encode(encoding))
    how: dict[str, Any] = {"separator": separator, "encoding": encoding, "missing": (), "types": dict.fromkeys("abc", "string")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "READ", read_bytes)  # blocks end inside characters and separators
        found = scan(path, header=["a", "b", "c"], bad_lines="drop", **how)
        assert [list(row.values()) for row in rows_of(found)] == [line for line in expected if len(line) == 3]
        assert found.dropped["ragged line"] == sum(len(line) != 3 for line in expected)


QUOTED = st.lists(st.sampled_from(['"', '""', ",", "\n", "\r\n", "a", "é", "\n\n", 'b"', ',"', '",', '"\n', '\n"']), max_size=40).map("".join)


def lines_of(text: str) -> tuple[list[int], int]:
    """The numbers of the lines where records begin, and how many lines are blank, by a parser that goes from character to character."""
    begins, blanks, number, state = [], 0, 0, "begin"
    for line in re.findall(r"[^\n]*\n", text):
        number += 1
        if state != "quoted":
            if line in ("\n", "\r\n"):
                blanks += 1
                continue
            begins.append(number)
            state = "begin"
        for char in line:
            if state == "quoted":
                state = "closing" if char == '"' else state
            elif char == '"' and state in ("begin", "closing"):
                state = "quoted"
            else:
                state = "begin" if char in ",\n" else "plain"
    return begins, blanks


@settings(max_examples=80, deadline=None)
@given(QUOTED, st.integers(1, 9))
def test_quotes_and_blank_lines_are_those_of_a_parser_that_goes_by_characters(
    tmp_path_factory: pytest.TempPathFactory, text: str, read_bytes: int
) -> None:
    text = f"x,y\n{text}\n"
    skipped: list[Any] = []

    def skip(row: Any) -> str:
        skipped.append(row)
        return "skip"

    plain = pacsv.read_csv(
        io.BytesIO(text.encode()),
        read_options=pacsv.ReadOptions(column_names=["a", "b"], use_threads=False),
        parse_options=pacsv.ParseOptions(newlines_in_values=True, invalid_row_handler=skip),
        convert_options=pacsv.ConvertOptions(column_types={"a": pa.string(), "b": pa.string()}),
    )
    path = write(tmp_path_factory.mktemp("b"), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines_module, "READ", read_bytes)
        found = scan(path, header=["a", "b"], missing=(), types={"a": "string", "b": "string"}, bad_lines="drop")
        assert rows_of(found) == plain.to_pylist()
    assert found.dropped["ragged line"] == sum(1 + row.text.count("\n") for row in skipped)
    begins, blanks = lines_of(text)
    assert found.dropped["blank line"] == blanks
    if skipped:
        with pytest.raises(RequestError, match=f"line {begins[skipped[0].number - 1]} has {skipped[0].actual_columns} fields"):
            rows_of(scan(path, header=["a", "b"], types={"a": "string", "b": "string"}))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.from_regex(r"\A[+-]?[0-9]{0,20}[.]?[0-9]{0,2}(e-?[0-9])?\Z") | st.integers(-(2**63), 2**64).map(str), min_size=1, max_size=4))
def test_no_guessed_type_changes_a_value(texts: list[str]) -> None:
    kind = guess_type(pa.array(texts))
    present = [text for text in texts if text]
    values = pa.array(texts).cast(kind).to_pylist() if kind == pa.string() else pa.array(present).cast(kind).to_pylist()
    if pa.types.is_integer(kind):
        assert [str(value) for value in values] == present
    elif pa.types.is_floating(kind):
        assert values == [float(text) for text in present]
        assert all(float(text) == Decimal(text) for text in present if text.lstrip("-").isdigit())


def test_types_are_guessed_such_that_no_value_changes(tmp_path: Path) -> None:
    text = "i,big,huge,zip,f,mixed,long,neg,none,date\n1,10000169349117863715,99999999999999999999,0012,1.5,a,0.5,-3,,2024-01-01\n"
    text += "2,3,1,94110,1e-3,7,10000169349117863,2,,2024-01-02\n"
    found = scan(write(tmp_path, text))
    assert dict(zip(found.schema.names, map(str, found.schema.types), strict=True)) == {
        "i": "int64",
        "big": "uint64",
        "huge": "string",
        "zip": "string",
        "f": "double",
        "mixed": "string",
        "long": "string",
        "neg": "int64",
        "none": "string",
        "date": "string",
    }
    first = rows_of(found)[0]
    assert (first["big"], first["huge"], first["zip"], first["f"]) == (10000169349117863715, "99999999999999999999", "0012", 1.5)


def test_case_H18_ids_of_twenty_digits_keep_every_digit(tmp_path: Path) -> None:
    text = "id,click\n1000009418151094273,0\n10000169349117863715,1\n"
    assert [row["id"] for row in read(tmp_path, text)] == [1000009418151094273, 10000169349117863715]
    assert [row["id"] for row in read(tmp_path, text, types={"id": "string"})] == ["1000009418151094273", "10000169349117863715"]
    with pytest.raises(RequestError, match=r"column 'id': .*int64: invalid value '10000169349117863715'"):
        read(tmp_path, text, types={"id": "int64"})


def test_given_types_missing_texts_and_columns_are_taken(tmp_path: Path) -> None:
    text = "a,b,c\nNULL,1,x\n,-1,\n5,NULL,z\n"
    assert read(tmp_path, text, missing=("", "NULL", "-1"), types={"a": pa.int8(), "b": "float64"}, columns=["c", "a", "b"]) == [
        {"c": "x", "a": None, "b": 1.0},
        {"c": None, "a": None, "b": None},
        {"c": "z", "a": 5, "b": None},
    ]
    assert read(tmp_path, text, missing=(), columns=["c"]) == [{"c": "x"}, {"c": ""}, {"c": "z"}]


def test_a_value_that_does_not_fit_is_named_with_its_column(tmp_path: Path) -> None:
    text = "n,m\n" + "1,2\n" * 12_000 + "1,two\n"
    with pytest.raises(RequestError, match=r"x\.csv: column 'm': .*'two'.*types=\{'m': 'string'\}"):
        read(tmp_path, text)
    with pytest.raises(RequestError, match=r"column 'm'"):
        read(tmp_path, text, columns=["m"])
    assert len(read(tmp_path, text, types={"m": "string"})) == 12_001


def test_types_that_text_cannot_have_are_refused(tmp_path: Path) -> None:
    for kind in (pa.list_(pa.int64()), pa.struct([("a", pa.int64())])):
        with pytest.raises(RequestError, match=r"x\.csv: .*(not supported|not implemented|struct|list)"):
            read(tmp_path, "a,b\n1,2\n", types={"a": kind})
    with pytest.raises(RequestError, match=r"x\.jsonl: it cannot be parsed"):
        read(tmp_path, '{"a": 1}\n', "x.jsonl", types={"a": pa.list_(pa.int64())})


@pytest.mark.parametrize("line", ["3", "3,4,5", ",,"])
def test_a_ragged_line_is_an_error_with_its_number_or_is_counted(tmp_path: Path, line: str) -> None:
    text = f"a,b\n1,2\n\n{line}\n5,6\n\n"
    fields = line.count(",") + 1
    with pytest.raises(RequestError, match=rf"x\.csv: line 4 has {fields} fields, expected 2.*bad_lines"):
        read(tmp_path, text)
    found = scan(tmp_path / "x.csv", bad_lines="drop")
    for _ in range(2):  # reading twice counts once
        assert rows_of(found) == [{"a": 1, "b": 2}, {"a": 5, "b": 6}]
        assert found.dropped == {"ragged line": 1, "blank line": 2}
    with pytest.raises(RequestError, match=rf"line 3 has {fields} fields"):
        read(tmp_path, text.split("\n", 1)[1], header=["a", "b"])


def test_a_ragged_line_far_into_a_file_has_the_right_number(tmp_path: Path) -> None:
    text = "a,b\n" + "".join(f"{k},{k}\n" + "\n" * (k % 3 == 0) for k in range(200_000)) + "7\n"
    number = text.count("\n")
    with pytest.raises(RequestError, match=f"line {number} has 1 fields"):
        read(tmp_path, text)


def test_a_ragged_line_after_fields_of_several_lines_has_the_right_number(tmp_path: Path) -> None:
    text = 'a,b\n"1\n\n\n2",x\n\ny"z,4\n"5\n6",7\n8\n9,9\n'
    with pytest.raises(RequestError, match="line 10 has 1 fields"):
        read(tmp_path, text)
    assert text.split("\n")[9] == "8"


def test_blank_lines_in_quotes_and_in_single_columns_are_values(tmp_path: Path) -> None:
    found = scan(write(tmp_path, 'a,b\n"x\n\ny",1\n\n"\n",2\n'))
    assert rows_of(found) == [{"a": "x\n\ny", "b": 1}, {"a": "\n", "b": 2}]
    assert found.dropped == {"blank line": 1}
    assert read(tmp_path, "a\n\n1\n\n") == [{"a": None}, {"a": 1}, {"a": None}]


def test_a_quote_that_is_never_closed_is_an_error_or_its_lines_are_counted(tmp_path: Path) -> None:
    text = 'a,b\n1,2\n"3,4\n5,6\n7,8\n'
    with pytest.raises(RequestError, match="line 3"):
        read(tmp_path, text)
    found = scan(tmp_path / "x.csv", bad_lines="drop")
    assert rows_of(found) == [{"a": 1, "b": 2}]
    assert found.dropped["ragged line"] == 3
    assert [row["a"] for row in read(tmp_path, text, quote=False)] == ["1", '"3', "5", "7"]


def test_quotes_are_plain_text_where_tabs_separate(tmp_path: Path) -> None:
    assert read(tmp_path, 'a\tb\n"x\t"y\n', "x.tsv") == [{"a": '"x', "b": '"y'}]
    assert read(tmp_path, 'a::b\n"x::y"::z\n', separator="::", quote=True) == [{"a": "x::y", "b": "z"}]


def test_case_H06_latin_1_titles_are_read_when_named_and_never_guessed(tmp_path: Path) -> None:
    films = "1::Misérables, Les (1995)::Drama|Musical\n2::Été (1968)::Drama\n".encode("latin-1")
    how: dict[str, Any] = {"separator": "::", "header": ["film", "title", "genres"]}
    assert [row["title"] for row in read(tmp_path, films, encoding="latin-1", **how)] == ["Misérables, Les (1995)", "Été (1968)"]
    with pytest.raises(RequestError, match=r"byte 0xe9 at offset 6, in line 1, is not utf-8.*latin-1"):
        read(tmp_path, films, **how)
    with pytest.raises(RequestError, match="'latin-99' is no encoding"):
        read(tmp_path, films, encoding="latin-99", **how)


def test_a_wrong_byte_far_into_a_file_has_its_line_and_offset(tmp_path: Path) -> None:
    good = "a,b\n" + "é,1\n" * 400_000
    path = write(tmp_path, good.encode() + b"caf\xe9,2\n")
    offset = len(good.encode()) + 3
    with pytest.raises(RequestError, match=f"byte 0xe9 at offset {offset}, in line 400002, is not utf-8"):
        rows_of(scan(path))


def test_case_H07_utf_8_titles_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufefftitle,n\nAmélie,1\n") == [{"title": "Amélie", "n": 1}]


@pytest.mark.parametrize("packed", [gzip.compress, lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:]), lambda data: zstd(data)])
@pytest.mark.parametrize("name", ["day_0.csv.gz", "day_0.csv.zst", "day_0.csv"])
def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path, packed: Any, name: str) -> None:
    assert read(tmp_path, packed(b"a,b\n1,2\n3,4\n"), name) == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def test_a_file_of_many_packed_blocks_empty_ones_among_them_is_read_to_its_end(tmp_path: Path) -> None:
    lines = [b"%d,%d\n" % (k, k * 7) for k in range(3000)]
    blocks = [b"a,b\n", *(b"".join(lines[k : k + 10]) if k % 40 else b"" for k in range(0, 3000, 10)), *lines[-1:], b""]
    expected = b"".join(blocks).count(b"\n") - 1
    for pack in (gzip.compress, zstd):
        found = read(tmp_path, b"".join(pack(block) for block in blocks), "x.csv.gz")
        assert len(found) == expected
        assert found[-1] == {"a": 2999, "b": 20993}


@pytest.mark.parametrize("packed", [gzip.compress, zstd])
def test_a_compressed_file_that_was_cut_is_an_error(tmp_path: Path, packed: Any) -> None:
    whole = packed(b"a,b\n" + b"".join(b"%d,%d\n" % (k, k * 7919 % 1000) for k in range(300_000)))
    with pytest.raises(RequestError, match="it cannot be read to its end"):
        read(tmp_path, whole[: len(whole) * 2 // 3], "x.csv.gz")


def test_lines_that_end_in_carriage_returns_alone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="its header cannot be parsed"):
        read(tmp_path, "a,b\r1,2\r")
    with pytest.raises(RequestError, match="line 3 holds a carriage return that ends no line"):
        read(tmp_path, "a\tb\r\n1\t2\r\n3\r\t4\r\n", "x.tsv")
    assert read(tmp_path, "a\tb\r\n1\t2\r\n", "x.tsv") == [{"a": 1, "b": 2}]


def test_empty_files_and_headers_alone(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="it is empty, so it has no header"):
        scan(write(tmp_path, ""))
    with pytest.raises(RequestError, match="column 2 of its header has no name"):
        scan(write(tmp_path, "a,\n1,2\n"))
    with pytest.raises(RequestError, match="it has two columns 'a'"):
        scan(write(tmp_path, "a,a\n1,2\n"))
    for text, how in (("a,b\n", {}), ("", {"header": ["a", "b"]}), ("\n\n", {"header": ["a", "b"]}), ("\n\na,b\n\n", {})):
        found = scan(write(tmp_path, text), **how)
        assert rows_of(found) == []
        assert found.schema.names == ["a", "b"]


def test_a_line_longer_than_a_block_is_read_and_one_beyond_the_limit_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "7 " * 1_500_000
    assert read(tmp_path, f"a,b\n1,{long}\n2,x\n")[0]["b"] == long
    monkeypatch.setattr(lines_module, "LONGEST_LINE", 100_000)
    with pytest.raises(RequestError, match="line 2, or a quoted field that ends there, is longer than 100000 bytes"):
        read(tmp_path, f"a,b\n1,{long}\n")


def test_the_stand_in_for_a_long_separator_may_not_occur(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"line 2 holds the character '\\x1f'"):
        read(tmp_path, "1::2\n3::\x1f4\n", separator="::", header=["a", "b"])


def test_list_columns_of_text(tmp_path: Path) -> None:
    text = "id,clicks,words\n1,5^7,a|b\n2,,\n3,9,c\n"
    found = read(tmp_path, text, lists={"clicks": "^", "words": "|"}, types={"clicks": "int64"})
    assert found == [
        {"id": 1, "clicks": [5, 7], "words": ["a", "b"]},
        {"id": 2, "clicks": None, "words": None},
        {"id": 3, "clicks": [9], "words": ["c"]},
    ]
    assert read(tmp_path, text, lists={"clicks": "^"}, columns=["id"]) == [{"id": 1}, {"id": 2}, {"id": 3}]
    with pytest.raises(RequestError, match="list column 'words' does not fit list<item: int64>"):
        read(tmp_path, text, lists={"words": "|"}, types={"words": "int64"})
    with pytest.raises(RequestError, match="its separator is empty"):
        read(tmp_path, text, lists={"words": ""})


def test_later_files_are_read_with_the_types_of_the_first(tmp_path: Path) -> None:
    write(tmp_path, "a,b\nx1,1\n", "part-1.csv")
    write(tmp_path, "b,a,more\n2,7,0\n", "part-2.csv")
    write(tmp_path, "a,b\n8,3\n", "part-10.csv")
    assert read(tmp_path, "", "_SUCCESS", format="csv", header=["z"]) == []
    assert rows_of(scan(tmp_path)) == [{"a": "x1", "b": 1}, {"a": "7", "b": 2}, {"a": "8", "b": 3}]
    write(tmp_path, "a\n8\n", "part-11.csv")
    with pytest.raises(RequestError, match=r"part-11\.csv: it lacks the columns 'b'"):
        rows_of(scan(tmp_path))


def test_json_lines_keep_lists_long_ids_and_missing_fields(tmp_path: Path) -> None:
    text = '{"id": 10000169349117863715, "tags": ["a"], "x": 1.5}\n\n{"id": 3, "tags": []}\n'
    found = scan(write(tmp_path, text, "x.jsonl"))
    assert found.schema.field("id").type == pa.uint64()
    assert rows_of(found) == [{"id": 10000169349117863715, "tags": ["a"], "x": 1.5}, {"id": 3, "tags": [], "x": None}]
    assert found.dropped == {"blank line": 1}
    assert read(tmp_path, gzip.compress(text.encode()), "x.jsonl.gz", columns=["x"]) == [{"x": 1.5}, {"x": None}]
    with pytest.raises(RequestError, match="field 'id' holds 18446744073709551616"):
        read(tmp_path, '{"id": 18446744073709551616}\n', "x.jsonl")
    with pytest.raises(RequestError, match="it is empty"):
        read(tmp_path, "", "x.jsonl")


def test_json_lines_name_the_line_that_is_wrong(tmp_path: Path) -> None:
    good = '{"a": 1}\n'
    with pytest.raises(RequestError, match=r"from number to string in line 4"):
        read(tmp_path, good * 2 + '\n{"a": "x"}\n' + good, "x.jsonl")
    late = good * 200_000 + '{"a": "x"}\n'
    with pytest.raises(RequestError, match=r"from number to string in line 200001"):
        read(tmp_path, late, "x.jsonl")
    with pytest.raises(RequestError, match=r"x\.jsonl: it cannot be parsed"):
        read(tmp_path, good * 200_000 + '{"a": 1, "new": 2}\n', "x.jsonl")
    assert len(read(tmp_path, good * 200_000 + '{"a": 1, "new": 2}\n', "x.jsonl", columns=["a"])) == 200_001
