"""``gem data generate``: the prepared folder holds the rows of the source, its schema, its ledger and its bounds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from gem_core.spec import RequestError
from gem_data.audit import audit
from gem_data.cli import app
from gem_data.generate import bounds, writer
from gem_data.generate.bounds import Truth, score_bounds
from gem_data.generate.world import World
from gem_data.generate.writer import write_folder
from gem_data.options import GeneratedOptions
from gem_data.schema.files import read_schema
from gem_data.sources.files import load as load_files
from gem_data.sources.generated import load as load_generated

SMALL: dict[str, Any] = {"rows": 3000, "test_rows": 1001, "users": 300, "items": 200, "categories": 5, "history_length": 20}


def read(folder: Path, split: str) -> pl.DataFrame:
    """All rows of a split as data.json lists the files, shared histories joined to their rows."""
    parts = []
    for part in json.loads((folder / "data.json").read_text())["splits"][split]:
        rows = pl.read_parquet(folder / part["file"])
        assert rows.height == part["rows"]
        requests = (folder / part["file"]).with_suffix(".requests.parquet")
        if requests.exists():
            assert rows["request_row"].is_sorted()
            rows = rows.hstack(pl.read_parquet(requests)[rows["request_row"]]).drop("request_row")
        parts.append(rows)
    return pl.concat(parts)


@pytest.mark.parametrize("candidates", [1, 4])
def test_the_folder_holds_the_rows_of_the_source(tmp_path: Path, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_ROWS", 900)
    monkeypatch.setattr(bounds, "ROWS_AT_ONCE", 400)
    options = GeneratedOptions(**SMALL, candidates=candidates)
    told: list[int] = []
    write_folder(options, tmp_path / "out", told.append)
    assert sum(told) == 4001
    for split, count in (("train", 3000), ("test", 1001)):
        found, rows = read(tmp_path / "out", split), World(options).rows(split, np.arange(count))
        assert len(list((tmp_path / "out" / split).glob("part-?????.parquet"))) > 1
        assert np.array_equal(found["_time"].to_numpy(), rows.requests.time[rows.request])
        assert np.array_equal(found["_user"].to_numpy(), rows.requests.user[rows.request])
        assert np.array_equal(found["item"].to_numpy(), rows.item + 1)
        assert np.array_equal(found["label.ctr"].to_numpy() == 1, rows.clicked)
        assert np.array_equal(found["mask.cvr"].to_numpy(), rows.closed)
        assert np.array_equal(found["delay.cvr"].fill_null(-1).to_numpy(), rows.delay)
        assert np.array_equal(found["click_probability"].to_numpy(), rows.click)
        lengths = np.diff(rows.histories.offsets)[rows.request]
        assert np.array_equal(found["history.item"].list.len().to_numpy(), lengths)
        whole = [rows.histories.time[a:b] for a, b in zip(rows.histories.offsets[:-1], rows.histories.offsets[1:], strict=True)]
        assert [time for times in found["history.time"].to_list() for time in times] == np.concatenate([whole[r] for r in rows.request]).tolist()
        assert found["_request"].n_unique() == -(-count // candidates)


def test_schema_ledger_and_bounds_of_the_folder(tmp_path: Path) -> None:
    found = write_folder(GeneratedOptions(**SMALL), tmp_path / "out")
    schema, data = read_schema(tmp_path / "out" / "schema.toml"), json.loads((tmp_path / "out" / "data.json").read_text())
    frame = read(tmp_path / "out", "test")
    assert set(schema.columns()) <= set(frame.columns)
    for key, column, feature in schema.id_columns():
        values = pl.Series([v for values in frame[column].to_list() for v in values]) if key.startswith("history.") else frame[column]
        assert feature.encode == "pass"
        assert 1 <= values.min() <= values.max() < feature.rows  # type: ignore[operator]
    assert data["ledger"] == {"read": 4001, "train": 3000, "test": 1001}
    assert data["definition"]["options"] == GeneratedOptions(**SMALL).model_dump()
    columns = {"click": "click_probability", "blind": "click_probability_without_history", "conversion": "conversion_probability"}
    labels = {"clicked": frame["label.ctr"] == 1, "converted": frame["label.cvr"] == 1, "seen": (frame["label.ctr"] == 1) & frame["mask.cvr"]}
    truth = Truth(
        **{name: frame[column].to_numpy() for name, column in columns.items()}, **{name: label.to_numpy() for name, label in labels.items()}
    )
    recomputed = score_bounds(truth, conversion=True)
    assert recomputed == found == data["baselines"]


@pytest.mark.parametrize("candidates", [1, 4])
def test_the_audit_of_prepared_folders_holds(tmp_path: Path, candidates: int) -> None:
    write_folder(GeneratedOptions(**SMALL, candidates=candidates), tmp_path / "out")
    data = audit(tmp_path / "out")
    assert data["leakage"]["history"] > 1000
    assert data["labels"]["test"]["cvr"]["observed"] == data["labels"]["test"]["ctr"]["positive"] > data["labels"]["test"]["cvr"]["positive"] > 0


@pytest.mark.parametrize("candidates", [1, 4])
def test_the_source_files_yields_what_the_source_generated_yields(tmp_path: Path, candidates: int) -> None:
    options = {**SMALL, "candidates": candidates}
    write_folder(GeneratedOptions(**options), tmp_path / "out")
    folder, direct = load_files(path=tmp_path / "out"), load_generated(**options)
    assert folder.schema() == direct.schema()
    assert folder.baselines() == direct.baselines()
    assert folder.ledger() == direct.ledger()
    for split in ("train", "test"):
        for found, want in zip(folder.batches(split, batch_size=700), direct.batches(split, batch_size=700), strict=True):
            assert found.rows == want.rows
            for key in direct.schema().all_id_features():
                assert torch.equal(found.ids[key].values, want.ids[key].values), key
                assert torch.equal(found.ids[key].offsets, want.ids[key].offsets), key
            for name in ("number_1", "number_2"):
                assert torch.equal(found.dense[name], want.dense[name])
            assert torch.equal(found.event_time["history"], want.event_time["history"])
            assert torch.equal(found.labels["ctr"], want.labels["ctr"])
            observed = want.masks["cvr"]
            assert torch.equal(found.masks["cvr"], observed)
            assert torch.equal(found.labels["cvr"][observed], want.labels["cvr"][observed])
            assert found.time is not None
            assert found.groups is not None
            assert torch.equal(found.time, want.time)  # type: ignore[arg-type]
            assert torch.equal(found.groups, want.groups)  # type: ignore[arg-type]


def test_without_conversions_there_is_no_such_column(tmp_path: Path) -> None:
    found = write_folder(GeneratedOptions(**SMALL, conversion=False), tmp_path / "out")
    assert list(found["bayes expected"]) == ["ctr"]
    assert [task.name for task in read_schema(tmp_path / "out" / "schema.toml").task] == ["ctr"]
    assert not [name for name in read(tmp_path / "out", "train").columns if "cvr" in name or name.startswith("conversion")]


def test_row_groups_are_no_larger_than_agreed(tmp_path: Path) -> None:
    write_folder(GeneratedOptions(**{**SMALL, "rows": 40_000}), tmp_path / "out")
    about = pq.ParquetFile(tmp_path / "out" / "train" / "part-00000.parquet").metadata
    assert about.num_row_groups > 2
    assert max(about.row_group(g).num_rows for g in range(about.num_row_groups)) <= 16_384


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    def interrupt(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(GeneratedOptions(**SMALL), tmp_path / "out", interrupt)
    assert not (tmp_path / "out").exists()
    write_folder(GeneratedOptions(**SMALL), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(RequestError, match="exists already"):
        write_folder(GeneratedOptions(**SMALL), tmp_path / "out")


def test_one_request_with_more_rows_than_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_ROWS", 100)
    write_folder(GeneratedOptions(**SMALL, candidates=1500), tmp_path / "out")
    assert read(tmp_path / "out", "train").height == 3000


def test_the_command_prints_both_bounds(tmp_path: Path) -> None:
    words = ["generate", "--out", str(tmp_path / "out"), "--rows", "500", "--test-rows", "300", "--set", "items=100", "--set", "zipf=0.5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "without history" in done.output
    options = json.loads((tmp_path / "out" / "data.json").read_text())["definition"]["options"]
    assert (options["rows"], options["items"], options["zipf"]) == (500, 100, 0.5)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("items=abc", "no TOML value"),
        ("itmes=100", "Extra inputs"),
        ("items=true", "valid integer"),
        ("items=7", "no multiple"),
        ("items", "no TOML"),
    ],
)
def test_wrong_settings_are_refused_before_work(tmp_path: Path, setting: str, says: str) -> None:
    done = CliRunner().invoke(app, ["generate", "--out", str(tmp_path / "out"), "--set", setting])
    assert isinstance(done.exception, RequestError)
    assert says in str(done.exception)
    assert not list(tmp_path.iterdir())
