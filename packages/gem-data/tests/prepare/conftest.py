"""A tiny shop: a log of impressions, purchases, and preparations of them."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from gem_data.prepare import prepare
from gem_data.splits import SplitWarning

SCHEMA: dict[str, Any] = {
    "user": "user",
    "time": "time",
    "id": [{"name": "item", "encode": "pass", "rows": 10}],
    "sequence": [{"name": "clicks", "max_length": 4, "time": "time", "id": [{"name": "item", "encode": "pass", "rows": 10, "table": "item"}]}],
    "task": [{"name": "ctr", "label": "click"}],
}
DEFINITION: dict[str, Any] = {
    "schema": "schema.toml",
    "tables": {"log": {"path": "log.parquet", "user": "user", "time": "time"}},
    "impressions": {"table": "log"},
    "histories": [{"name": "clicks", "table": "log", "where": [["click", "==", 1]]}],
    "split": {"kind": "time", "test_from": 50},
}
LOG = {
    "user": [1, 1, 2, 1, 2, 1],
    "time": [10, 20, 20, 30, 60, 70],
    "item": [1, 2, 3, 4, 5, 6],
    "click": [1, 1, 0, 0, 1, 0],
    "request": [1, 2, 3, 4, 5, 6],
}
LOG_TYPES = pa.schema([(name, pa.int64()) for name in LOG])


class Shop:
    """A folder with tables, schema and definition; ``run`` prepares it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, LOG
        self.schema = json.loads(json.dumps(SCHEMA))
        self.definition = json.loads(json.dumps(DEFINITION))
        self.table("log", LOG, LOG_TYPES)

    def table(self, name: str, columns: dict[str, list[Any]], types: pa.Schema | None = None, **options: Any) -> None:
        pq.write_table(pa.table(columns, types), self.folder / f"{name}.parquet", **options)

    def write(self) -> Path:
        (self.folder / "schema.toml").write_text(tomli_w.dumps(self.schema))
        path = self.folder / "definition.toml"
        path.write_text(tomli_w.dumps(self.definition))
        return path

    def run(self, name: str = "out", **options: Any) -> dict[str, Any]:
        """Prepare without a word about the splits, which are too small to be good."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SplitWarning)
            return prepare(self.write(), self.folder / name, **options)

    def rows(self, split: str = "train", name: str = "out") -> list[dict[str, Any]]:
        """The rows of a split in order, shared histories given to each of their rows."""
        out: list[dict[str, Any]] = []
        for path in sorted((self.folder / name / split).glob("part-[0-9]*.parquet")):
            if path.name.endswith(".requests.parquet"):
                continue
            rows = pq.read_table(path).to_pylist()
            shared = path.with_suffix(".requests.parquet")
            if shared.exists():
                requests = pq.read_table(shared).to_pylist()
                rows = [row | requests[row["request_row"]] for row in rows]
            out += rows
        return out

    def column(self, name: str, split: str = "train") -> list[Any]:
        return [row[name] for row in self.rows(split)]


@pytest.fixture
def make_shop(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Shop]:
    return lambda: Shop(tmp_path_factory.mktemp("shop"))


@pytest.fixture
def shop(make_shop: Callable[[], Shop]) -> Shop:
    return make_shop()
