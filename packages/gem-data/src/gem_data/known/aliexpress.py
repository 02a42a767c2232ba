"""AliExpress search: clicks and conversions of one country a file."""

from pathlib import Path
from typing import Any

import polars as pl

from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, numbers, tasks
from gem_data.known.tables import ROW, KnownTable, find, find_any, same, typed
from gem_data.schema.declare import Schema

CATEGORIES = tuple(f"categorical_{k}" for k in range(1, 17))
NUMBERS = tuple(f"numerical_{k}" for k in range(1, 64))


def _open(folder: Path, _: Choices) -> dict[str, KnownTable]:
    # Training rows first: the definition makes the rows of test.csv the test rows.
    both = [find_any(folder, name) for name in ("train.csv", "test.csv")]
    files = [*both[0], *both[1]] if all(both) else find(folder, "*.csv")
    read = {
        "types": typed("search_id:int64", *(f"{c}:int64" for c in CATEGORIES), *(f"{n}:float64" for n in NUMBERS), "click:int8", "conversion:int8")
    }
    drop = {"conversion without a click": (pl.col("conversion") == 1) & (pl.col("click") == 0)}
    columns = {"row": pl.col(ROW), **same("search_id", *CATEGORIES, *NUMBERS, "click", "conversion")}
    return {"impressions": KnownTable(files=files, read=read, drop=drop, columns=columns)}


def _definition(tables: Tables) -> dict[str, Any]:
    test_from = tables["impressions"].starts.get("test.csv")
    return {
        "tables": {"impressions": {"user": "search_id", "time": "row"}},
        "impressions": {"table": "impressions"},
        "split": {"kind": "time", **({"test_from": test_from} if test_from else {"test_fraction": 0.2})},
    }


DATA_SETS = (
    KnownDataSet(
        name="aliexpress",
        summary="search impressions of one country with click and conversion",
        terms="Li et al. 2020, Alibaba Tianchi: research, cite",
        files=("train.csv and test.csv", "or any *.csv"),
        quirks=(
            "no clock: rows are taken in the order of the files, and those of test.csv are the test rows",
            "conversions without a click are dropped and counted",
            "16 categories, 63 numbers",
        ),
        open=_open,
        schema=Schema(
            user="search_id",
            request="search_id",
            time="row",
            id=tuple(hashed(*CATEGORIES, rows=200_000)),
            number=numbers(*NUMBERS),
            task=tasks("click", "conversion", conversion="click"),
        ),
        definition=_definition,
    ),
)
