"""Spark as the engine: the same SQL, on whatever cluster the environment's session runs on."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gem_core.spec import MachineError
from gem_data.prepare.engine import BATCH_ROWS

QUOTE = '"'
DIALECT = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.ansi.doubleQuotedIdentifiers": "true",
    "spark.sql.session.timeZone": "UTC",
}


class SparkEngine:
    """A Spark session.

    Args:
        folder: an existing folder that the driver and every executor can read and write; results pass through it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            session_class: Any = import_module("pyspark.sql").SparkSession
        except ModuleNotFoundError as error:
            raise MachineError("engine 'spark'", "pyspark is not installed", "Run: pip install 'gem-data[spark]'.") from error
        self._owned = session_class.getActiveSession() is None
        self._shared = session_class.builder.appName("gem data prepare").getOrCreate()
        self._session = self._shared.newSession()  # settings and views of its own, on the same cluster
        for key, value in DIALECT.items():
            self._session.conf.set(key, value)
        self._folder, self._count = folder, 0

    def register(self, name: str, file: Path) -> None:
        self._session.read.parquet(file.resolve().as_uri()).createOrReplaceTempView(f"`{name.strip(QUOTE)}`")

    def view(self, name: str, sql: str) -> None:
        self._session.sql(sql).createOrReplaceTempView(name)

    def create(self, name: str, sql: str) -> None:
        self._session.read.parquet(self._write(sql).as_uri()).createOrReplaceTempView(name)

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self._session.sql(sql).collect()]

    def stream(self, sql: str) -> Iterator[pa.RecordBatch]:
        """Spark writes one file a partition, named in the order of a sort."""
        for path in sorted(self._write(sql).glob("part-*.parquet")):
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH_ROWS):
                    yield _unsigned(batch)

    def _write(self, sql: str) -> Path:
        self._count += 1
        path = self._folder.resolve() / f"spark-{self._count}"
        self._session.sql(sql).write.parquet(path.as_uri())
        return path

    def close(self) -> None:
        if self._owned:
            self._shared.stop()


def _unsigned(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Spark has no uint64 and reads it as a decimal of 20 digits."""
    arrays = [a.cast(pa.uint64()) if a.type == pa.decimal128(20, 0) else a for a in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
