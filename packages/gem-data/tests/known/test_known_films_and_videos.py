"""Golden rows of MovieLens, KuaiRand, Yambda and RecBole's atomic files."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gem_core.spec import RequestError
from gem_data.known.kuairand import FEEDBACK
from gem_data.known.registry import known_data_set
from gem_data.known.tables import KnownTable

Read = Callable[..., dict[str, pl.DataFrame]]
Rows = Callable[[KnownTable], pl.DataFrame]
Sample = Callable[[str], Path]


def test_case_H03_ml_100k_rows(read: Read) -> None:
    tables = read("ml-100k")
    assert tables["impressions"].rows()[:2] == [(7, 2, 4.0, 880000020), (9, 1, 3.0, 880000010)]
    assert tables["users"].rows() == [(7, 24, "F", "writer", "85711"), (9, 53, "M", "other", "T8H1N")]
    assert tables["items"]["genres"].to_list() == [["Children's", "Comedy"], ["Western"], ["unknown"]]
    assert tables["items"]["release_date"].to_list() == ["01-Jan-1995", "05-Feb-1994", None]


def test_case_H06_latin_1_films_keep_their_accents(read: Read) -> None:
    assert read("ml-100k")["items"]["title"].to_list()[0] == "Amélie à Paris (1995)"
    assert read("ml-1m")["items"]["title"].to_list() == ["CafÁ: A (Film), 1999 (1999)", '"Quoted" (1990)', "Plain (1980)"]


def test_case_H07_utf_8_films_keep_theirs(read: Read) -> None:
    items = read("ml-20m")["items"]
    assert items["title"].to_list() == ["Cité, La (1995)", "日本 (2001)", 'The "Best" (2000)']
    assert items["genres"].to_list() == [["Drama", "Mystery"], [], ["Comedy"]]


def test_case_H06_a_latin_1_file_read_as_utf_8_is_refused(sample: Sample, rows: Rows) -> None:
    folder = sample("ml-20m")
    (folder / "movies.csv").write_bytes("movieId,title,genres\n2,Cité,Drama\n".encode("latin-1"))
    with pytest.raises(RequestError, match="0xe9"):
        rows(known_data_set("ml-20m").tables(folder)["items"])


def test_ml_1m_rows(read: Read) -> None:
    tables = read("ml-1m")
    assert tables["impressions"].rows()[:2] == [(1, 10, 5.0, 978300760), (1, 20, 3.0, 978300760)]
    assert tables["users"].rows() == [(1, 1, "F", 10, "48067"), (2, 56, "M", 16, "70072-1234")]
    assert tables["items"]["genres"].to_list() == [["Drama", "War"], ["Comedy"], ["Sci-Fi"]]


def test_ml_20m_keeps_half_stars(read: Read) -> None:
    assert read("ml-20m")["impressions"]["rating"].to_list() == [3.5, 4.0, 0.5, 4.5, 5.0]


def test_ml_100k_as_atomic_files(tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "ml-100k.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t2\t4\t880000020\n")
    (tmp_path / "ml-100k.user").write_text("user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n7\t24\tF\twriter\t85711\n")
    (tmp_path / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n2\tPlain film\t1994\tSci-Fi War\n"
    )
    tables = {name: rows(table) for name, table in known_data_set("ml-100k").tables(tmp_path).items()}
    assert tables["impressions"].rows() == [(7, 2, 4.0, 880000020)]
    assert tables["users"].rows() == [(7, 24, "F", "writer", "85711")]
    assert tables["items"].rows() == [(2, "Plain film", "1994", ["Sci-Fi", "War"])]


def test_a_fractional_time_of_ml_100k_is_refused(tmp_path: Path, rows: Rows) -> None:
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n7\t2\t4\t88.5\n")
    for ending, columns in (("user", "user_id age gender occupation zip_code"), ("item", "item_id movie_title release_year class")):
        (tmp_path / f"a.{ending}").write_text("\t".join(f"{name}:token" for name in columns.split()) + "\n")
    with pytest.raises(RequestError, match=r"88\.5 is no whole number"):
        rows(known_data_set("ml-100k").tables(tmp_path)["impressions"])


@pytest.mark.parametrize("size", ["pure", "1k", "27k"])
def test_case_H01_users_of_one_kuairand_period_only_are_kept(read: Read, size: str) -> None:
    tables = read(f"kuairand-{size}")
    assert tables["impressions"]["user_id"].to_list() == [1, 2, 2, 3]
    assert tables["random"].height == 2


def test_case_H03_kuairand_labels_stand_with_their_event(read: Read) -> None:
    first, second, third, _ = read("kuairand-pure")["impressions"].to_dicts()
    assert (first["item_id"], first["is_click"], first["is_like"], first["long_view"], first["action"]) == (50, 1, 1, 1, 1 + 2 + 64)
    assert (second["item_id"], second["is_click"], second["is_hate"], second["action"]) == (51, 0, 1, 32)
    assert (third["is_follow"], third["is_profile_enter"], third["action"]) == (1, 1, 1 + 4 + 64 + 128)
    assert first["play_time_ms"] == 12000 > first["duration_ms"]
    assert sorted(FEEDBACK.values()) == [2**k for k in range(8)]


def test_kuairand_times_are_milliseconds_and_its_dates_are_of_china(read: Read) -> None:
    for row in read("kuairand-pure")["impressions"].iter_rows(named=True):
        there = datetime.fromtimestamp(row["timestamp"], UTC) + timedelta(hours=8)
        assert int(there.strftime("%Y%m%d")) == row["date"]
        assert int(there.strftime("%H%M")) // 100 == row["hourmin"] // 100
        assert row["time_ms"] // 1000 == row["timestamp"]


def test_case_H21_kuairand_blanks_ranges_and_lists(read: Read) -> None:
    tables = read("kuairand-27k")
    assert tables["users"]["follow_user_num_range"].to_list() == ["(0,10]", "0"]
    assert tables["users"]["is_live_streamer"].to_list() == ["0", "-124"]
    assert tables["items"]["video_duration"].to_list() == [10000.0, None, 8000.0]
    assert tables["items"]["tags"].to_list() == [["12", "65"], ["8"], []]
    assert tables["item_statistics"].rows() == [(50, 17.0, 120.5, 0.25), (51, 3.0, None, 0.001)]


def test_a_missing_period_of_kuairand_is_refused(sample: Sample) -> None:
    folder = sample("kuairand-pure")
    (folder / "data" / "log_standard_4_22_to_5_08_pure.csv").unlink()
    with pytest.raises(RequestError, match="log_standard_4_22_to_5_08_pure"):
        known_data_set("kuairand-pure").tables(folder)


def test_kuairand_does_without_what_its_definition_does_not_use(sample: Sample) -> None:
    folder = sample("kuairand-27k")
    for name in ("log_random_4_22_to_5_08_27k_part1", "log_random_4_22_to_5_08_27k_part2", "video_features_statistic_27k_part1"):
        (folder / "data" / f"{name}.csv").unlink()
    assert list(known_data_set("kuairand-27k").tables(folder)) == ["impressions", "users", "items", "item_statistics"]


def test_case_H23_yambda_keeps_replays_and_names_the_kinds(read: Read) -> None:
    tables = read("yambda")
    assert tables["impressions"]["played_ratio_pct"].to_list() == [130.0, 4.0, 100.0, 60.0]
    assert tables["events"]["event_type"].to_list() == ["listen"] * 4 + ["like"] * 2
    assert tables["events"]["played_ratio_pct"].to_list()[4:] == [None, None]


def test_yambda_sequential_files_are_the_flat_ones_taken_apart(read: Read, tmp_path: Path, rows: Rows) -> None:
    flat = read("yambda")["impressions"].sort("user_id", maintain_order=True)
    lists = flat.rename({"user_id": "uid"}).drop("event_type").group_by("uid", maintain_order=True).agg(pl.all())
    empty = pl.DataFrame({"uid": [8], **{name: [[]] for name in lists.columns[1:]}}, schema=lists.schema)
    (tmp_path / "sequential").mkdir()
    pl.concat([lists, empty]).write_parquet(tmp_path / "sequential" / "listens.parquet")
    assert rows(known_data_set("yambda").tables(tmp_path / "sequential")["impressions"]).equals(flat)


def test_yambda_multi_event_files(tmp_path: Path, rows: Rows) -> None:
    kinds = pa.array(["listen", "like", "listen"]).dictionary_encode()
    table = {"uid": [1, 1, 2], "item_id": [5, 5, 6], "timestamp": [0, 5, 5], "is_organic": [1, 1, 0], "event_type": kinds}
    pq.write_table(pa.table({**table, "played_ratio_pct": [90, None, 3], "track_length_seconds": [9, None, 9]}), tmp_path / "multi_event.parquet")
    tables = known_data_set("yambda").tables(tmp_path)
    assert rows(tables["events"])["event_type"].to_list() == ["listen", "like", "listen"]
    assert rows(tables["impressions"])["item_id"].to_list() == [5, 6]
    assert dict(tables["impressions"].ledger) == {"read": 3, "kept": 2, "dropped: no listen": 1}


def test_atomic_files_of_any_data_set(read: Read) -> None:
    tables = read("recbole")
    assert tables["impressions"]["user_id"].to_list() == ["u1", "u1", "u2", "u2", "u1", "u2", "u1"]
    assert tables["impressions"]["item_id"].to_list()[3] is None
    assert tables["impressions"]["timestamp"].to_list() == [100, 101, 102.75, 103, 104, 105, 106]
    assert tables["impressions"]["like"].to_list() == [1, None, 0, 1, 1, 1, 0]
    assert tables["items"].rows() == [("i1", ["A", '"quoted', "film"], [1.0, 2.5]), ("i2", [], [])]


def test_atomic_choice_of_the_rating_that_counts(read: Read) -> None:
    assert read("recbole", like_from="5")["impressions"]["like"].to_list() == [0, None, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(("header", "says"), [("user_id:token\titem_id", "name:type"), ("user_id:token\titem_id:tokens", "name:type")])
def test_a_bad_atomic_header_is_refused(tmp_path: Path, header: str, says: str) -> None:
    (tmp_path / "a.inter").write_text(f"{header}\n1\t2\n")
    with pytest.raises(RequestError, match=says):
        known_data_set("recbole").tables(tmp_path)


def test_atomic_files_without_a_needed_column_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.inter").write_text("user_id:token\titem_id:token\trating:float\n1\t2\t3\n")
    with pytest.raises(RequestError, match="timestamp"):
        known_data_set("recbole").tables(tmp_path)
