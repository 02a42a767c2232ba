"""ORC files whose columns are lists of at most one value, an empty list meaning that the value is missing; plain columns are read too."""

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from gem_core.spec import RequestError


def read_orc(path: Path, columns: Sequence[str]) -> pl.DataFrame:
    """The named columns, one value or null a row; further columns of the file are not read. All stripes are loaded.

    Raises:
        RequestError: the file is no ORC file, lacks a column, or a list holds more than one value.
    """
    from pyarrow import ArrowInvalid, orc

    asked = f"ORC file {path}"
    try:
        file = orc.ORCFile(path)
    except (ArrowInvalid, OSError) as error:
        raise RequestError(asked, f"it cannot be read ({error})", "Check the path and that the file is whole.") from error
    missing = [name for name in columns if name not in file.schema.names]
    if missing:
        raise RequestError(asked, f"it lacks the columns {', '.join(missing)}", "Give files that hold them.")
    frame = pl.from_arrow(file.read(columns=list(columns)))
    assert isinstance(frame, pl.DataFrame)
    return pl.DataFrame([_scalars(asked, frame.get_column(name)) for name in columns])


def _scalars(asked: str, column: pl.Series) -> pl.Series:
    if isinstance(column.dtype, pl.Categorical):
        return column.cast(pl.String)
    if not isinstance(column.dtype, pl.List):
        return column
    lengths = column.list.len().fill_null(0)
    if (lengths > 1).any():
        row = int((lengths > 1).arg_max() or 0)
        raise RequestError(asked, f"column {column.name!r} holds {lengths[row]} values in row {row}", "Give at most one value a row.")
    return column.list.get(0, null_on_oob=True)
