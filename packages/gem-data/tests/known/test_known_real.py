"""Real files, where they are at hand: in ``GEM_DATA_SAMPLES``, else ``../shared/data/raw``, or in the cache of ``gem data fetch``."""

import os
from pathlib import Path

import polars as pl
import pytest

from gem_data.fetch import default_folder
from gem_data.known.registry import known_data_set

RAW = Path(os.environ.get("GEM_DATA_SAMPLES", Path(__file__).parents[5] / "shared" / "data" / "raw"))


def rows(name: str, folder: Path, table: str = "impressions") -> pl.DataFrame:
    known = known_data_set(name).tables(folder)[table]
    frame = pl.concat([pl.DataFrame(pl.from_arrow(batch)) for batch in known.batches()])
    assert known.ledger["read"] == known.ledger["kept"] == frame.height
    return frame


def real(name: str) -> Path:
    if not (RAW / name).exists():
        pytest.skip(f"{RAW / name} is not there")
    return RAW / name


def test_case_H18_real_avazu_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").symlink_to(real("avazu.csv"))
    found = rows("avazu", tmp_path)
    assert found.height == 100
    assert found["id"].str.len_chars().max() == 20
    assert found["timestamp"].unique().to_list() == [1413849600]
    assert 0 < found["click"].sum() < 100


def test_real_criteo_rows(tmp_path: Path) -> None:
    lines = real("criteo-with-header.csv").read_text().splitlines()[1:]
    (tmp_path / "train.txt").write_text("\n".join(line.replace(",", "\t") for line in lines))
    found = rows("criteo-kaggle", tmp_path)
    assert found.height == 200
    assert found["I2"].min() < 0  # type: ignore[operator]
    assert found["C22"].null_count() > 100
    assert found["C1"][0] == 0x05DB9164


def test_real_aliexpress_rows(tmp_path: Path) -> None:
    (tmp_path / "train.csv").symlink_to(real("aliexpress-click-conversion.csv"))
    found = rows("aliexpress", tmp_path)
    assert found.height == 100
    assert found.filter((pl.col("conversion") == 1) & (pl.col("click") == 0)).height == 0


def test_real_ml_100k_atomic_files() -> None:
    folder = default_folder("ml-100k")
    if not (folder / "ml-100k.inter").exists():
        pytest.skip("ml-100k is not in the cache; gem data fetch ml-100k")
    found = rows("ml-100k", folder)
    assert (found.height, found["user_id"].n_unique(), found["item_id"].n_unique()) == (100_000, 943, 1682)
    assert found.filter(pl.col("rating") >= 4).height == 55_375
    assert rows("ml-100k", folder, "users").height == 943
    assert rows("ml-100k", folder, "items")["genres"].list.len().min() == 1
