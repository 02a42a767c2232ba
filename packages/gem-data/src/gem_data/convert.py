"""Any readable format to one Parquet file, streamed, with an account of every row."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from gem_core.spec import MachineError, RequestError, RunFailed
from gem_data.formats import Scan
from gem_data.partial import written_whole


@dataclass(frozen=True)
class Converted:
    """``read`` = ``written`` + the rows ``dropped`` by reason."""

    read: int
    written: int
    dropped: Mapping[str, int]


def convert(rows: Scan, out: Path) -> Converted:
    """Write the rows of a scan as Parquet; ``out`` appears when it is whole, and a batch becomes a row group.

    Raises:
        RequestError: ``out`` exists, its folder does not, or a row cannot be read; nothing is left behind.
        MachineError: the file cannot be written.
        RunFailed: the file written does not hold the rows read.
    """
    asked = f"Parquet file {out}"
    if out.exists():
        raise RequestError(asked, "it exists already", "Remove it, or name another file.")
    if not out.parent.is_dir():
        raise RequestError(asked, f"{out.parent} is no folder", "Name a file in a folder that exists.")
    try:
        with written_whole(out) as partial:
            read = _write(rows, partial)
            written = pq.read_metadata(partial).num_rows
            if written != read:
                raise RunFailed(asked, f"{read} rows were read and {written} written", "Report this.")
    except OSError as error:
        raise MachineError(asked, f"it cannot be written ({error})", "Name a file in a folder that can be written and has room.") from error
    return Converted(read=read + sum(rows.dropped.values()), written=written, dropped=dict(rows.dropped))


def _write(rows: Scan, path: Path) -> int:
    read = 0
    with pq.ParquetWriter(path, rows.schema, compression="zstd") as writer:
        for batch in rows.batches():
            writer.write_batch(batch)
            read += batch.num_rows
    return read
