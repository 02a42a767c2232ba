"""Any readable format to one Parquet file, streamed, with an account of every row."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from gem_core.spec import MachineError, RequestError, RunFailed
from gem_data.formats import Scan


@dataclass(frozen=True)
class Converted:
    """``read`` = ``written`` + the rows ``dropped`` by reason."""

    read: int
    written: int
    dropped: Mapping[str, int]


def convert(rows: Scan, out: Path) -> Converted:
    """Write the rows of a scan as Parquet; ``out`` appears when it is whole, and a batch becomes a row group.

    Raises:
        RequestError: ``out`` exists, or a row cannot be read; nothing is left behind.
        MachineError: the folder cannot be written.
        RunFailed: the file written does not hold the rows read.
    """
    asked = f"Parquet file {out}"
    if out.exists():
        raise RequestError(asked, "it exists already", "Remove it, or name another file.")
    read = 0
    try:
        handle, name = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    except OSError as error:
        raise MachineError(asked, f"its folder cannot be written ({error})", "Name a file in a folder that exists.") from error
    os.close(handle)
    partial = Path(name)
    try:
        with pq.ParquetWriter(partial, rows.schema, compression="zstd") as writer:
            for batch in rows.batches():
                writer.write_batch(batch)
                read += batch.num_rows
        written = pq.read_metadata(partial).num_rows
        if written != read:
            raise RunFailed(asked, f"{read} rows were read and {written} written", "Report this.")
        partial.chmod(0o644)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return Converted(read=read + sum(rows.dropped.values()), written=written, dropped=dict(rows.dropped))
