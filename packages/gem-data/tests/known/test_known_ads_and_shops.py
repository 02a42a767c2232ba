"""Golden rows of Criteo, Avazu, Taobao, Ali-CCP, AliExpress, Amazon and Open Bandit."""

import gzip
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest

from gem_core.spec import RequestError
from gem_data.known.registry import known_data_set
from gem_data.known.tables import KnownTable

Read = Callable[..., dict[str, pl.DataFrame]]
Rows = Callable[[KnownTable], pl.DataFrame]
Sample = Callable[[str], Path]


def test_case_H03_criteo_rows_blanks_and_counts_below_zero(read: Read) -> None:
    rows = read("criteo-kaggle")["impressions"]
    assert rows.height == 8, "the last line counts without a newline"
    assert rows["row"].to_list() == list(range(8))
    assert rows["click"].to_list() == [0, 1] * 4
    assert rows["I1"].to_list() == [None, 1, 2, 3, 4, 5, 6, 7]
    assert rows["I2"].to_list()[:3] == [5, -2, 5]
    assert rows["I13"].to_list() == [260] * 8
    assert rows["C1"].to_list()[:3] == [None, None, 0xFFFFFFFF]
    assert rows["C2"][0] == 0x0A1B2C3D
    assert rows["C26"].null_count() == 8
    assert rows["day"].null_count() == 8


def test_case_H08_criteo_days_come_in_the_order_of_their_numbers_with_or_without_gz(sample: Sample, rows: Rows) -> None:
    folder = sample("criteo-1tb")
    frame = rows(known_data_set("criteo-1tb").tables(folder)["impressions"])
    assert frame["day"].to_list() == [0, 0, 2, 2, 10, 10, 10, 10]
    assert frame["I1"].to_list() == frame["day"].to_list()
    (folder / "day_2").write_bytes(gzip.decompress((folder / "day_2.gz").read_bytes()))
    with pytest.raises(RequestError, match="day_2 is there twice"):
        known_data_set("criteo-1tb").tables(folder)
    (folder / "day_2.gz").unlink()
    (folder / "day_1.json").write_text("{}")
    assert rows(known_data_set("criteo-1tb").tables(folder)["impressions"]).equals(frame)


@pytest.mark.parametrize(("field", "value"), [(1, "x7"), (1, "1.5"), (20, "nothex"), (0, "x")])
def test_a_criteo_field_that_is_no_number_is_refused(sample: Sample, rows: Rows, field: int, value: str) -> None:
    folder = sample("criteo-kaggle")
    fields = (folder / "train.txt").read_text().split("\n")[3].split("\t")
    fields[field] = value
    (folder / "train.txt").write_text("\t".join(fields) + "\n")
    with pytest.raises(RequestError, match=r"train\.txt"):
        rows(known_data_set("criteo-kaggle").tables(folder)["impressions"])


def test_case_H18_avazu_ids_of_20_digits_are_exact(read: Read) -> None:
    assert read("avazu")["impressions"]["id"].to_list() == ["10000169349117863999", "99999999999999999999", "7", "8"]


def test_case_H19_avazu_hours_are_timestamps(read: Read) -> None:
    times = [datetime.fromtimestamp(t, UTC) for t in read("avazu")["impressions"]["timestamp"]]
    assert times == [datetime(2014, 10, *at, tzinfo=UTC) for at in ((21, 0), (21, 23), (30, 0), (30, 1))]


def test_avazu_missing_codes_and_devices(read: Read) -> None:
    rows = read("avazu")["impressions"]
    assert rows["C20"].to_list() == [100084, None, None, 5]
    assert rows["banner_pos"].to_list() == [0, 0, -1, 1], "only C20 writes a missing value as -1"
    assert rows["user_id"].to_list() == ["96809ac8/711ee120", "96809ac8/711ee120", "c357dbff", "c357dbff"]


def test_an_avazu_hour_of_another_form_is_refused(sample: Sample, rows: Rows) -> None:
    folder = sample("avazu")
    text = gzip.decompress((folder / "train.gz").read_bytes()).decode().replace("14102123", "14102199")
    (folder / "train.gz").unlink()
    (folder / "train.csv").write_text(text)
    with pytest.raises(RequestError, match=r"train\.csv"):
        rows(known_data_set("avazu").tables(folder)["impressions"])


def test_taobao_behaviour_counts_what_it_drops(sample: Sample, rows: Rows) -> None:
    tables = known_data_set("taobao-behaviour").tables(sample("taobao-behaviour"))
    events, views = rows(tables["events"]), rows(tables["impressions"])
    outside = "dropped: time outside 2017-11-25 .. 2017-12-03"
    assert dict(tables["events"].ledger) == {"read": 11, "kept": 7, outside: 3, "dropped: unknown behaviour": 1}
    assert dict(tables["impressions"].ledger) == {"read": 11, "kept": 5, outside: 3, "dropped: unknown behaviour": 1, "dropped: no page view": 2}
    assert events["behaviour"].to_list() == ["pv", "pv", "buy", "pv", "cart", "pv", "pv"]
    assert views.rows()[:2] == [(1, 11, 100, 1511539200)] * 2, "repeated rows are kept"


def test_case_H21_taobao_ads_blanks_and_names(sample: Sample, rows: Rows) -> None:
    tables = known_data_set("taobao-ads").tables(sample("taobao-ads"))
    found = {name: rows(table) for name, table in tables.items()}
    assert found["users"]["new_user_class_level"].to_list() == [3, None]
    assert found["users"]["pvalue_level"].to_list() == [None, 2]
    assert found["ads"]["brand"].to_list() == [95471, None]
    assert found["events"]["brand"].to_list() == [2, 95471, None, 3]
    assert found["impressions"]["click"].to_list() == [0, 1, 0, 1, 0]
    assert dict(tables["impressions"].ledger) == {"read": 6, "kept": 5, "dropped: clk and nonclk agree": 1}


def test_taobao_users_may_be_called_nick(sample: Sample, rows: Rows) -> None:
    folder = sample("taobao-ads")
    path = folder / "behavior_log.csv"
    before = rows(known_data_set("taobao-ads").tables(folder)["events"])
    path.write_text(path.read_text().replace("user,", "nick,", 1))
    assert rows(known_data_set("taobao-ads").tables(folder)["events"]).equals(before)


def test_case_H03_ali_ccp_features_between_control_characters(read: Read) -> None:
    tables = read("ali-ccp")
    first = tables["impressions"].row(0, named=True)
    assert (first["205"], first["206"], first["508"], first["508.value"], first["301"]) == (4, 5, 6, 0.5, 1)
    assert (first["210"], first["210.value"]) == ([7, 8], [1.0, 1.0])
    assert (first["207"], first["702.value"], first["853"]) == (None, None, [])
    common = tables["common"].to_dicts()
    assert (common[0]["101"], common[0]["109_14"], common[0]["109_14.value"], common[0]["121"]) == (31, [1, 2], [2.25, 0.75], 3)
    assert (common[1]["common_id"], common[1]["101"], common[1]["109_14"]) == ("bb", None, [])


@pytest.mark.parametrize(
    ("policy", "purchases"),
    [
        ("drop", [(1, 0), (2, 1), (4, 0), (1, 0), (2, 0)]),
        ("keep", [(1, 0), (2, 1), (3, 1), (4, 0), (1, 0), (2, 0)]),
        ("mask", [(1, 0), (2, 1), (3, None), (4, 0), (1, 0), (2, 0)]),
    ],
)
def test_ali_ccp_policy_for_purchases_without_a_click(read: Read, policy: str, purchases: list[tuple[int, int | None]]) -> None:
    assert read("ali-ccp", purchase_without_click=policy)["impressions"].select("sample_id", "purchase").rows() == purchases


def test_ali_ccp_drops_by_default_and_counts(sample: Sample, rows: Rows) -> None:
    table = known_data_set("ali-ccp").tables(sample("ali-ccp"))["impressions"]
    rows(table)
    assert dict(table.ledger) == {"read": 6, "kept": 5, "dropped: purchase without a click": 1}
    assert table.starts == {"sample_skeleton_train.csv": 0, "sample_skeleton_test.csv": 4}


def test_ali_ccp_test_rows_are_those_of_the_test_file(sample: Sample, rows: Rows) -> None:
    known = known_data_set("ali-ccp")
    tables = known.tables(sample("ali-ccp"))
    frame = rows(tables["impressions"])
    split = known.definition(tables)["split"]
    assert split == {"kind": "time", "test_from": 4}
    assert frame.filter(pl.col("row") >= 4)["common_id"].to_list() == ["bb", "dd"]


def test_ali_ccp_files_may_lie_where_their_archives_put_them(sample: Sample, rows: Rows) -> None:
    folder = sample("ali-ccp")
    before = rows(known_data_set("ali-ccp").tables(folder)["impressions"])
    for part in ("train", "test"):
        (folder / f"sample_{part}").mkdir()
        for name in ("sample_skeleton", "common_features"):
            (folder / f"{name}_{part}.csv").rename(folder / f"sample_{part}" / f"{name}_{part}.csv")
    assert rows(known_data_set("ali-ccp").tables(folder)["impressions"]).equals(before)


def test_an_ali_ccp_row_with_too_few_features_is_refused(sample: Sample, rows: Rows) -> None:
    folder = sample("ali-ccp")
    path = folder / "sample_skeleton_train.csv"
    path.write_text(path.read_text().replace(",6,", ",7,", 1))
    with pytest.raises(RequestError, match="announces 7 features and has 6"):
        rows(known_data_set("ali-ccp").tables(folder)["impressions"])


def test_aliexpress_rows(sample: Sample, rows: Rows) -> None:
    known = known_data_set("aliexpress")
    tables = known.tables(sample("aliexpress"))
    frame = rows(tables["impressions"])
    assert frame.select("row", "search_id", "click", "conversion").rows() == [(0, 1, 1, 1), (2, 2, 0, 0), (3, 2, 1, 0), (4, 3, 1, 1), (5, 3, 0, 0)]
    assert frame["numerical_1"][0] == 0.8122229999999999
    assert dict(tables["impressions"].ledger) == {"read": 6, "kept": 5, "dropped: conversion without a click": 1}
    assert known.definition(tables)["split"] == {"kind": "time", "test_from": 4}


def test_aliexpress_with_one_file_is_split_by_place(sample: Sample, rows: Rows) -> None:
    known, folder = known_data_set("aliexpress"), sample("aliexpress")
    (folder / "train.csv").unlink()
    tables = known.tables(folder)
    rows(tables["impressions"])
    assert known.definition(tables)["split"] == {"kind": "time", "test_fraction": 0.2}


def test_the_three_amazon_releases_hold_the_same_ratings(read: Read) -> None:
    frames = [read(f"amazon-ratings-{year}")["impressions"] for year in (2014, 2018, 2023)]
    assert frames[0].row(0) == ("A2SUAM1J3GNN3B", "B00000IKRW", 5.0, 1000000000)
    assert frames[0].equals(frames[1])
    assert frames[0].equals(frames[2])


def test_amazon_2023_as_json_lines(tmp_path: Path, rows: Rows) -> None:
    review = {"rating": 4.0, "title": "Good", "text": "x", "images": [], "asin": "B1", "parent_asin": "B00000IKRW", "user_id": "AE2"}
    line = json.dumps(review | {"timestamp": 1588687728923, "helpful_vote": 0, "verified_purchase": True})
    (tmp_path / "All_Beauty.jsonl").write_text(line + "\n")
    assert rows(known_data_set("amazon-ratings-2023").tables(tmp_path)["impressions"]).rows() == [("AE2", "B00000IKRW", 4.0, 1588687728)]


@pytest.mark.parametrize(
    ("files", "name", "says"),
    [("2014", "2018", "the other way round"), ("2018", "2014", "the other way round")],
)
def test_an_amazon_file_of_another_release_is_refused(sample: Sample, rows: Rows, files: str, name: str, says: str) -> None:
    folder = sample(f"amazon-ratings-{files}")
    with pytest.raises(RequestError, match=says):
        rows(known_data_set(f"amazon-ratings-{name}").tables(folder)["impressions"])


@pytest.mark.parametrize(("name", "time", "unit"), [("2023", "1588687728", "milliseconds"), ("2014", "1588687728923", "seconds")])
def test_an_amazon_time_in_the_other_unit_is_refused(tmp_path: Path, rows: Rows, name: str, time: str, unit: str) -> None:
    header = "user_id,parent_asin,rating,timestamp\n" if name == "2023" else ""
    (tmp_path / "a.csv").write_text(f"{header}A2,B00000IKRW,4.0,{time}\n")
    with pytest.raises(RequestError, match=f"not in {unit}"):
        rows(known_data_set(f"amazon-ratings-{name}").tables(tmp_path)["impressions"])


def test_open_bandit_rows(sample: Sample, rows: Rows) -> None:
    tables = known_data_set("open-bandit").tables(sample("open-bandit"))
    frame, items = rows(tables["impressions"]), rows(tables["items"])
    base = int(datetime(2019, 11, 24, tzinfo=UTC).timestamp())
    assert frame["timestamp_us"].to_list() == [base * 10**6 + at for at in (23_800_821, 24_000_000, 24_000_000, 59_999_999)]
    assert frame["timestamp"].to_list() == [base + at for at in (23, 24, 24, 59)]
    assert frame.row(1, named=True)["user_id"] == "bb/u1/u2/u3"
    assert frame["propensity"].to_list() == [0.0125] * 4
    assert frame["affinity"][0].to_list() == [0.0] * 79 + [1.0]
    assert items.row(2) == (2, -0.25, "a", "b", "c")
    assert dict(tables["impressions"].ledger) == {"read": 5, "kept": 4, "dropped: line with the names": 1}


def test_open_bandit_choices(sample: Sample) -> None:
    folder = sample("open-bandit")
    with pytest.raises(RequestError, match="there is no men"):
        known_data_set("open-bandit").tables(folder, campaign="men")
    with pytest.raises(RequestError, match="campaign = all, men, women"):
        known_data_set("open-bandit").tables(folder, campaign="kids")
