"""RecBole's atomic files: typed header, blank fields, clear errors."""

from pathlib import Path

import pytest

from gem_core.spec import RequestError
from gem_data.formats.recbole import read_atomic, require_columns

HEADER = "user_id:token\trating:float\tgenres:token_seq\tweights:float_seq"


def write(folder: Path, *lines: str, end: str = "\n", encoding: str = "utf-8") -> Path:
    path = folder / "some.inter"
    path.write_bytes((end.join(lines) + end).encode(encoding))
    return path


def test_types_come_from_the_header(tmp_path: Path) -> None:
    frame = read_atomic(write(tmp_path, HEADER, "007\t4.5\tDrama War\t1 2.5", "ann\t-3\tFilm-Noir\t0"))
    assert frame.columns == ["user_id", "rating", "genres", "weights"]
    assert frame.rows() == [("007", 4.5, ["Drama", "War"], [1.0, 2.5]), ("ann", -3.0, ["Film-Noir"], [0.0])]


def test_blank_fields_are_null_or_empty(tmp_path: Path) -> None:
    frame = read_atomic(write(tmp_path, HEADER, "\t\t\t", " \t \t \t ", "u\t1\ta  b\t"))
    assert frame.rows() == [(None, None, [], []), (None, None, [], []), ("u", 1.0, ["a", "b"], [])]


def test_ties_keep_the_order_of_the_file(tmp_path: Path) -> None:
    rows = [f"u{k}\t5" for k in (3, 1, 2, 9, 0)]
    frame = read_atomic(write(tmp_path, "user_id:token\ttime:float", *rows))
    assert frame.sort("time", maintain_order=True).get_column("user_id").to_list() == ["u3", "u1", "u2", "u9", "u0"]


def test_a_float_that_is_no_number_is_null_for_the_caller_to_count(tmp_path: Path) -> None:
    frame = read_atomic(write(tmp_path, "rating:float", "4", "four", "1e2"))
    assert frame.get_column("rating").to_list() == [4.0, None, 100.0]


def test_quotes_colons_and_windows_line_ends_are_plain_text(tmp_path: Path) -> None:
    frame = read_atomic(write(tmp_path, "a:b:token\tc:token", '"x\ty"', end="\r\n"))
    assert frame.columns == ["a:b", "c"]
    assert frame.rows() == [('"x', 'y"')]


def test_a_byte_order_mark_and_a_named_encoding_are_read(tmp_path: Path) -> None:
    assert read_atomic(write(tmp_path, "\ufeffname:token", "Amélie")).rows() == [("Amélie",)]
    latin = write(tmp_path, "name:token", "Amélie", encoding="latin-1")
    assert read_atomic(latin, encoding="latin-1").rows() == [("Amélie",)]
    with pytest.raises(RequestError, match=r"some.inter: byte 0xe9 at offset 13 is not utf-8"):
        read_atomic(latin)


def test_a_header_alone_gives_no_rows_with_the_right_columns(tmp_path: Path) -> None:
    frame = read_atomic(write(tmp_path, HEADER))
    assert frame.height == 0
    assert frame.columns == ["user_id", "rating", "genres", "weights"]


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("user_id", "'user_id' is not name:type"),
        ("user_id:int", "'user_id:int' is not name:type"),
        (":token", "':token' is not name:type"),
        ("", "'' is not name:type"),
        ("a:token\ta:float", "column 'a' occurs twice"),
    ],
)
def test_a_bad_header_names_the_file_and_the_cell(tmp_path: Path, header: str, message: str) -> None:
    with pytest.raises(RequestError, match=r"some\.inter") as caught:
        read_atomic(write(tmp_path, header, "1\t2"))
    assert message in str(caught.value)


@pytest.mark.parametrize(("line", "fields"), [("1\t2\t3", 3), ("1", 1), ("", 1)])
def test_a_line_with_the_wrong_number_of_fields_names_file_and_line(tmp_path: Path, line: str, fields: int) -> None:
    path = write(tmp_path, "a:token\tb:float", "x\t1", line, "y\t2")
    with pytest.raises(RequestError, match=rf"some\.inter: line 3 has {fields} fields, the header has 2"):
        read_atomic(path)


def test_a_missing_file_and_missing_columns_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none\.user: there is no such file"):
        read_atomic(tmp_path / "none.user")
    path = write(tmp_path, "a:token\tb:float", "x\t1")
    frame = read_atomic(path)
    require_columns(path, frame, ("b", "a"))
    with pytest.raises(RequestError, match=r"some\.inter: it lacks the columns \['c'\]"):
        require_columns(path, frame, ("a", "c"))
