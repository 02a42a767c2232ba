"""What runs the relational part of a preparation. Every engine gets the same SQL."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

BATCH_ROWS = 65_536


class Engine(Protocol):
    """Runs SQL in the common part of DuckDB's and Spark's dialects."""

    def register(self, name: str, file: Path) -> None:
        """Make a Parquet file a table."""

    def view(self, name: str, sql: str) -> None:
        """Name a query, which is evaluated on each use."""

    def create(self, name: str, sql: str) -> None:
        """Evaluate a query once and keep its rows as a table."""

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """The few rows of a small result."""

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """The rows of a large result, in its order."""

    def close(self) -> None:
        """Free everything; the engine is of no use afterwards."""


class DuckEngine:
    """DuckDB over a database file, with a memory limit and room on disk for what exceeds it.

    Args:
        folder: an existing empty folder for the database and the spilled data.
        memory: bytes that DuckDB may use.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._folder = folder
        config: dict[str, str | bool | int | float | list[str]] = {
            "memory_limit": f"{memory // 2**20}MiB",
            "temp_directory": str(folder / "spill"),
            "preserve_insertion_order": "false",  # results that need an order ask for it
        }
        self._connection = duckdb.connect(str(folder / "engine.duckdb"), config=config)

    def register(self, name: str, file: Path) -> None:
        path = str(file).replace("'", "''")
        self._connection.execute(f"CREATE VIEW {name} AS SELECT * FROM read_parquet('{path}')")

    def view(self, name: str, sql: str) -> None:
        self._connection.execute(f"CREATE VIEW {name} AS {sql}")

    def create(self, name: str, sql: str) -> None:
        self._connection.execute(f"CREATE TABLE {name} AS {sql}")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        with self._connection.cursor() as cursor:
            yield from cursor.sql(sql).to_arrow_reader(BATCH_ROWS)

    def close(self) -> None:
        self._connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
