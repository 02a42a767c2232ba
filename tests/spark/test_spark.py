"""The same definition on DuckDB and on Spark gives the same rows, figure by figure and file by file. Run by ``nox -s spark``."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from gem_data.audit import audit
from gem_data.prepare import prepare

sql = pytest.importorskip("pyspark.sql", reason="pyspark is not installed")
pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")

ROWS = 400
SCHEMA: dict[str, Any] = {
    "user": "user",
    "request": "request",
    "time": "time",
    "id": [{"name": "item", "encode": "vocabulary"}, {"name": "brand", "encode": "hash", "rows": 99}],
    "multi_id": [{"name": "tags", "encode": "hash", "rows": 50}],
    "number": [{"name": "price"}],
    "embedding": [{"name": "vector", "width": 2}],
    "sequence": [
        {
            "name": "clicks",
            "max_length": 5,
            "time": "time",
            "id": [{"name": "item", "encode": "vocabulary", "table": "item"}],
            "number": [{"name": "score"}],
        },
        {"name": "views", "max_length": 4, "time": "time", "id": [{"name": "brand", "encode": "hash", "rows": 99, "table": "brand"}]},
    ],
    "task": [{"name": "ctr", "label": "click"}, {"name": "cvr", "label": "bought", "condition": "ctr"}],
}
DEFINITION: dict[str, Any] = {
    "schema": "schema.toml",
    "tables": {
        "log": {"path": "log-*.parquet", "user": "user", "time": "time", "unit": "ms"},
        "buys": {"path": "buys.parquet", "user": "user", "time": "time"},
        "price-list": {"path": "prices.parquet", "time": "since"},
    },
    "impressions": {"table": "log", "share_histories": True},
    "histories": [
        {"name": "clicks", "table": "log", "where": [["click", "==", 1]], "lag": 2, "window": 40},
        {"name": "views", "table": "log", "where": [["kind", "in", ["it's", "back\\slash"]]], "last": 3},
    ],
    "conversions": [{"task": "cvr", "table": "buys", "match": ["item"], "within": 15}],
    "sides": [{"table": "price-list", "on": ["item"], "columns": ["price"], "as_of": True}],
    "sampling": {"task": "ctr", "keep": 0.6},
    "split": {"kind": "time", "test_fraction": 0.3},
}
CASES: dict[str, tuple[pa.DataType, dict[str, Any]]] = {
    "texts, by time": (pa.string(), {}),
    "uint64, by request": (pa.uint64(), {"split": {"kind": "hash", "test_fraction": 0.3}, "impressions": {"table": "log"}}),
    "int64, by position": (pa.int64(), {"split": {"kind": "user_fraction", "train_fraction": 0.7}, "impressions": {"table": "log"}}),
}


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    """A local session with few partitions and nothing that listens beyond this machine."""
    quiet = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "3",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "1g",
    }
    builder = sql.SparkSession.builder.master("local[2]")
    for key, value in quiet.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    yield
    spark.stop()


def tables(folder: Path, users: pa.DataType) -> None:
    """A log in two files, with missing values and ties; purchases; prices that change."""
    rng = np.random.default_rng(5)
    ids = pa.array(rng.integers(0, 12, ROWS))
    user = pa.array([None if k % 41 == 0 else f"ü{v}" if users == pa.string() else v for k, v in enumerate(ids.to_pylist())], users)
    user = user if users != pa.uint64() else pa.array([None if v is None else 2**64 - 1 - v for v in user.to_pylist()], users)
    time = pa.array([None if k % 53 == 0 else int(t) for k, t in enumerate(rng.integers(0, 100_000, ROWS))], pa.int64())
    item = pa.array(rng.integers(1, 9, ROWS))
    log = pa.table(
        {
            "user": user,
            "time": time,
            "request": pa.array([f"r{k // 3}" if k % 37 else None for k in range(ROWS)]),
            "item": item,
            "brand": pa.array([["a", "b", None][k % 3] for k in range(ROWS)]),
            "kind": pa.array([["it's", "back\\slash", "x", None][k % 4] for k in range(ROWS)]),
            "tags": pa.array([[["t"], ["t", "u"], [], None][k % 4] for k in range(ROWS)], pa.list_(pa.string())),
            "vector": pa.array([[1.0, k] if k % 5 else None for k in range(ROWS)], pa.list_(pa.float32())),
            "score": pa.array([k / 7 if k % 6 else None for k in range(ROWS)]),
            "click": pa.array([[0, 1, 1, None, 0][k % 5] for k in range(ROWS)], pa.int8()),
        }
    )
    pq.write_table(log.slice(0, 150), folder / "log-0.parquet")
    pq.write_table(log.slice(150), folder / "log-1.parquet")
    pq.write_table(pa.table({"user": user.slice(50, 90), "time": rng.integers(0, 120, 90), "item": item.slice(20, 90)}), folder / "buys.parquet")
    prices = {"item": rng.integers(1, 8, 30), "since": rng.integers(0, 100, 30), "price": pa.array([k / 2 if k % 4 else None for k in range(30)])}
    pq.write_table(pa.table(prices), folder / "prices.parquet")


@pytest.mark.parametrize("case", CASES)
def test_both_engines_give_identical_rows(session: None, tmp_path: Path, case: str) -> None:
    users, changes = CASES[case]
    tables(tmp_path, users)
    (tmp_path / "schema.toml").write_text(tomli_w.dumps(SCHEMA))
    (tmp_path / "definition.toml").write_text(tomli_w.dumps(DEFINITION | changes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        duck, spark = (prepare(tmp_path / "definition.toml", tmp_path / engine, engine=engine) for engine in ("duckdb", "spark"))
    assert duck == spark
    assert audit(tmp_path / "spark") == spark
    assert min(n for name, n in duck["ledger"].items() if name != "read") > 0
    assert duck["leakage"]["clicks"] > 100
    files = sorted(path.relative_to(tmp_path / "duckdb") for path in (tmp_path / "duckdb").rglob("*.parquet"))
    assert files == sorted(path.relative_to(tmp_path / "spark") for path in (tmp_path / "spark").rglob("*.parquet"))
    for file in files:
        assert pq.read_table(tmp_path / "duckdb" / file).equals(pq.read_table(tmp_path / "spark" / file)), file


def test_a_planted_difference_is_seen(tmp_path: Path) -> None:
    """The comparison that the test above rests on."""
    one = pa.table({"a": pa.array([[1, 2], []], pa.list_(pa.int64()))})
    pq.write_table(one, tmp_path / "one.parquet")
    assert pq.read_table(tmp_path / "one.parquet").equals(one)
    assert not one.equals(pa.table({"a": pa.array([[2, 1], []], pa.list_(pa.int64()))}))
