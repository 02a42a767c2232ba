"""Every known data set goes all the way: raw files, canonical tables, definition, prepared rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

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
