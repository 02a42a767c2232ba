"""Every known data set goes all the way: raw files, canonical tables, definition, prepared rows."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from gem_core.spec import RequestError
from gem_data.cli import app
from gem_data.known.export import export
from gem_data.known.registry import KNOWN
from gem_data.prepare.definition import read_definition

Sample = Callable[[str], Path]


def test_every_known_data_set_has_a_sample(sample_names: list[str]) -> None:
    assert sample_names == list(KNOWN)


@pytest.mark.filterwarnings("ignore::UserWarning")  # tiny samples have cold users and splits of one class
@pytest.mark.parametrize("name", list(KNOWN))
def test_case_H02_raw_files_become_prepared_rows_and_no_row_is_lost(name: str, sample: Sample, tmp_path: Path) -> None:
    ledgers = export(KNOWN[name], sample(name), tmp_path / "tables")
    definition, _ = read_definition(tmp_path / "tables" / "definition.toml")
    for table, ledger in ledgers.items():
        assert pq.ParquetFile(tmp_path / "tables" / f"{table}.parquet").metadata.num_rows == ledger["kept"]
    assert set(definition.tables) <= set(ledgers)
    done = CliRunner().invoke(app, ["prepare", str(tmp_path / "tables" / "definition.toml"), "--out", str(tmp_path / "prepared")])
    assert done.exit_code == 0, repr(done.exception)
    data = json.loads((tmp_path / "prepared" / "data.json").read_text())
    counts = dict(data["ledger"])
    assert counts["read"] == ledgers["impressions"]["kept"] == sum(counts.values()) - counts["read"]
    assert counts["train"] > 0
    assert counts["test"] > 0


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_case_H01_both_kuairand_periods_reach_the_prepared_rows(sample: Sample, tmp_path: Path) -> None:
    export(KNOWN["kuairand-27k"], sample("kuairand-27k"), tmp_path / "tables")
    CliRunner().invoke(app, ["prepare", str(tmp_path / "tables" / "definition.toml"), "--out", str(tmp_path / "prepared")])
    rows = pl.concat([pl.read_parquet(part) for part in sorted((tmp_path / "prepared").glob("*/part-*.parquet"))], how="diagonal")
    assert sorted(rows["_user"].to_list()) == [1, 2, 2, 3]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_case_H21_impressions_without_profile_ad_or_brand_all_train(sample: Sample, tmp_path: Path) -> None:
    export(KNOWN["taobao-ads"], sample("taobao-ads"), tmp_path / "tables")
    CliRunner().invoke(app, ["prepare", str(tmp_path / "tables" / "definition.toml"), "--out", str(tmp_path / "prepared")])
    data = json.loads((tmp_path / "prepared" / "data.json").read_text())
    assert {name: count for name, count in data["ledger"].items() if "dropped" in name} == {}
    assert sum(split["unmatched"] for split in data["sides"]["users"].values()) == 1
    assert sum(split["unmatched"] for split in data["sides"]["ads"].values()) == 1
    rows = pl.concat([pl.read_parquet(part) for part in sorted((tmp_path / "prepared").glob("*/part-*.parquet"))], how="diagonal")
    assert rows.filter(pl.col("brand") == 0).height == 3, "no ad, or an ad without a brand: row 0"


def test_an_export_is_whole_or_not_there(sample: Sample, tmp_path: Path) -> None:
    folder = sample("avazu")

    def interrupt(table: str, rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(KNOWN["avazu"], folder, tmp_path / "tables", told=interrupt)
    assert not (tmp_path / "tables").exists()
    told: list[tuple[str, int]] = []
    export(KNOWN["avazu"], folder, tmp_path / "tables", told=lambda table, rows: told.append((table, rows)))
    assert told == [("impressions", 4)]
    assert not (tmp_path / "tables.partial").exists()
    with pytest.raises(RequestError, match="exists already"):
        export(KNOWN["avazu"], folder, tmp_path / "tables")


def test_a_table_of_which_no_row_is_left_is_refused(sample: Sample, tmp_path: Path) -> None:
    folder = sample("taobao-behaviour")
    (folder / "UserBehavior.csv").write_text("1,2,3,pv,5\n")
    with pytest.raises(RequestError, match="no row is left"):
        export(KNOWN["taobao-behaviour"], folder, tmp_path / "tables")
    assert not (tmp_path / "tables").exists()


def test_a_ledger_that_does_not_add_up_is_refused(sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_data.known.tables import KnownTable

    monkeypatch.setattr(KnownTable, "_kept", lambda self, piece: piece[1:])
    with pytest.raises(RequestError, match="does not add up"):
        export(KNOWN["avazu"], sample("avazu"), tmp_path / "tables")


def test_the_list_names_every_data_set_and_the_json_holds_all(sample_names: list[str]) -> None:
    shown = CliRunner().invoke(app, ["known"]).output
    assert all(name in shown for name in sample_names)
    assert "Latin-1" in shown
    listed = json.loads(CliRunner().invoke(app, ["known", "--json"]).output)
    assert [entry["name"] for entry in listed] == sample_names
    assert all(entry[key] for entry in listed for key in ("summary", "files", "quirks", "terms"))


def test_the_export_command_prints_the_ledger_and_the_next_step(sample: Sample, tmp_path: Path) -> None:
    words = [
        "known",
        "export",
        "ali-ccp",
        "--path",
        str(sample("ali-ccp")),
        "--out",
        str(tmp_path / "tables"),
        "--choose",
        "purchase_without_click=mask",
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, repr(done.exception)
    assert "kept" in done.output
    assert f"gem data prepare {tmp_path / 'tables' / 'definition.toml'}" in done.output.replace("\n", "")
    assert json.loads((tmp_path / "tables" / "ledger.json").read_text())["choices"] == {"purchase_without_click": "mask"}
    assert pl.read_parquet(tmp_path / "tables" / "impressions.parquet")["purchase"].null_count() == 1


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prepare_takes_a_known_name(sample: Sample, tmp_path: Path) -> None:
    out = tmp_path / "rows"
    words = ["prepare", "ali-ccp", "--path", str(sample("ali-ccp")), "--out", str(out), "--choose", "purchase_without_click=mask"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, repr(done.exception)
    assert json.loads((out / "data.json").read_text())["ledger"]["read"] == 6
    assert (tmp_path / "rows-tables" / "definition.toml").exists()
    again = CliRunner().invoke(app, words)
    assert "exists already" in str(again.exception)


def test_a_choice_without_a_known_data_set_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["prepare", "definition.toml", "--out", str(tmp_path / "rows"), "--choose", "a=b"])
    assert isinstance(done.exception, RequestError)
    assert "--path" in str(done.exception)


def test_a_choice_without_a_value_is_refused(sample: Sample, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["known", "export", "ali-ccp", "--path", str(sample("ali-ccp")), "--out", str(tmp_path / "t"), "--choose", "mask"])
    assert isinstance(done.exception, RequestError)
    assert "NAME=VALUE" in str(done.exception)
