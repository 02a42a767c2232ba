"""Prepared folders: rows that share histories by request, the account of data.json, folders that were changed."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pytest

from gem_core.spec import RequestError


def prepared(kit: ModuleType, folder: Path, promised: int = 60) -> pa.Table:
    """A folder with data.json whose training rows, 60 in two parts, share histories by request. Returns the rows as if they did not."""
    whole = kit.make_table(20, seed=4)
    histories = [name for name in whole.column_names if name.startswith(("clicks.", "carts."))]
    rows = kit.make_table(60, seed=5).drop_columns(histories)
    request = np.sort(np.random.default_rng(0).integers(0, 20, 60))
    expanded = rows
    for name in histories:
        expanded = expanded.append_column(name, whole[name].take(pa.array(request)))
    for part, (a, b) in enumerate([(0, 37), (37, 60)]):
        low = int(request[a])
        own = rows.slice(a, b - a).append_column("request_row", pa.array(request[a:b] - low))
        kit.write(own, folder / f"train/part-0000{part}.parquet", 8)
        kit.write(whole.select(histories).slice(low), folder / f"train/part-0000{part}.requests.parquet", 3)
    kit.write(kit.make_table(10), folder / "test/part-00000.parquet", 8)
    (folder / "schema.toml").write_text(kit.SCHEMA)
    train = [{"file": f"train/part-0000{part}.parquet", "rows": rows} for part, rows in enumerate((37, promised - 37))]
    splits = {"train": train, "test": [{"file": "test/part-00000.parquet", "rows": 10}]}
    (folder / "data.json").write_text(
        json.dumps(
            {
                "format": 1,
                "splits": splits,
                "unknown": {"train": {"item": 4}},
                "ledger": {"read": 75, "train": 60, "test": 10, "dropped: no label": 5},
            }
        )
    )
    return expanded


@pytest.mark.parametrize("seed", [None, 7])
def test_a_prepared_folder_whose_rows_share_histories_by_request(kit: ModuleType, tmp_path: Path, seed: int | None) -> None:
    expanded = prepared(kit, tmp_path)
    source = kit.open_source(tmp_path, train=(), test=())
    batches = list(source.batches("train", batch_size=7, seed=seed))
    for batch in batches:
        kit.check(batch, expanded)
    assert sorted(kit.origins(batches)) == list(range(60))
    assert source.rows("test") == 10
    assert source.unknown_ids("train") == {"item": 4}
    assert source.ledger() == {"read": 75, "train": 60, "test": 10, "dropped: no label": 5}


def test_a_prepared_folder_that_was_changed_is_refused(kit: ModuleType, tmp_path: Path) -> None:
    prepared(kit, tmp_path, promised=61)
    with pytest.raises(RequestError, match=r"part-00001.parquet: it has 23 rows, data.json says 24"):
        kit.open_source(tmp_path, train=(), test=())
    (tmp_path / "data.json").write_text('{"format": 2}')
    with pytest.raises(RequestError, match="its format is not 1"):
        kit.open_source(tmp_path, train=(), test=())
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(RequestError, match="it is no JSON"):
        kit.open_source(tmp_path, train=(), test=())


def test_rows_that_name_no_request_are_refused(kit: ModuleType, tmp_path: Path) -> None:
    prepared(kit, tmp_path)
    path = tmp_path / "train/part-00001.parquet"
    table = pa.parquet.read_table(path)
    kit.write(kit.change(table, "request_row", pa.array([*([0] * 22), 99])), path, 8)
    with pytest.raises(RequestError, match=r"part-00001.parquet, row group 2, row 6 names request 99; part-00001.requests.parquet has"):
        list(kit.open_source(tmp_path, train=(), test=()).batches("train", batch_size=7))
