"""Amazon's reviews: ratings without text, in the three orders of columns and the two units of time that were published."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from gem_core.spec import RequestError
from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, sequence, tasks
from gem_data.known.tables import FILE, Change, KnownTable, find, text, typed
from gem_data.schema.declare import Schema

MILLISECONDS_FROM = 10**11
"""Seconds reach it in the year 5138; milliseconds passed it in 1973."""
ASIN = r"^(B[0-9A-Z]{9}|\d{9}[\dX])$"


def _checked(user: str, item: str, *, milliseconds: bool, year: str) -> Change:
    """Refuses files of another year: users where items should be, or the other unit of time."""

    def check(piece: pl.DataFrame) -> pl.DataFrame:
        share = piece.select(u=pl.col(user).str.contains(ASIN).mean(), i=pl.col(item).str.contains(ASIN).mean()).row(0, named=True)
        asked = f"file {piece[FILE][0]}" if piece.height else "file"
        if piece.height and (share["u"] or 0.0) > 0.5 > (share["i"] or 0.0):
            raise RequestError(
                asked, f"users and items are the other way round than in the release of {year}", "Name the release that the file is of."
            )
        late = piece.filter((pl.col("timestamp") >= MILLISECONDS_FROM) != milliseconds)
        if late.height:
            unit = "milliseconds" if milliseconds else "seconds"
            raise RequestError(
                asked, f"time {late['timestamp'][0]} is not in {unit}, as in the release of {year}", "Name the release that the file is of."
            )
        return piece

    return check


def _opener(year: str) -> Callable[[Path, Choices], dict[str, KnownTable]]:
    order = {"2014": ("user_id", "item_id"), "2018": ("item_id", "user_id")}

    def opened(folder: Path, _: Choices) -> dict[str, KnownTable]:
        if year == "2023":
            files = find(folder, "*.csv", "*.csv.gz", "*.jsonl", "*.jsonl.gz")
            read: dict[str, Any] = {"types": typed("user_id", "parent_asin", "rating:float64", "timestamp:int64")}
            item, second = "parent_asin", 1000
        else:
            files = find(folder, "*.csv", "*.csv.gz")
            read = text(*order[year], "rating:float64", "timestamp:int64", separator=",")
            item, second = "item_id", 1
        columns = {
            "user_id": pl.col("user_id"),
            "item_id": pl.col(item),
            "rating": pl.col("rating").cast(pl.Float32),
            "timestamp": pl.col("timestamp") // second,
        }
        check = _checked("user_id", item, milliseconds=second == 1000, year=year)
        return {"impressions": KnownTable(files=files, read=read, expand=check, columns=columns)}

    return opened


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "user_id", "time": "timestamp"}},
        "impressions": {"table": "impressions"},
        "positives": [{"task": "like", "where": [["rating", ">=", 4]]}],
        "histories": [
            {"name": "liked", "table": "impressions", "where": [["rating", ">=", 4]]},
            {"name": "disliked", "table": "impressions", "where": [["rating", "<", 4]]},
        ],
        "split": {"kind": "leave_last", "last": 1},
    }


ITEM = hashed("item_id", rows=1_000_000)
ORDERS = {
    "2014": "user, item, rating, time in seconds, no header; times are days, so ties are many",
    "2018": "item, user, rating, time in seconds, no header",
    "2023": "user_id, parent_asin, rating, timestamp in milliseconds, with a header; or JSON lines",
}
DATA_SETS = tuple(
    KnownDataSet(
        name=f"amazon-ratings-{year}",
        summary=f"ratings of one category, release of {year}",
        terms="McAuley Lab, UC San Diego: research, cite",
        files=("*.csv or *.csv.gz", *(("or *.jsonl, *.jsonl.gz",) if year == "2023" else ())),
        quirks=(quirk, "ids are text", "a file of another release is refused"),
        open=_opener(year),
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=tuple(ITEM),
            sequence=(sequence("liked", *ITEM), sequence("disliked", *ITEM)),
            task=tasks("like"),
        ),
        definition=_definition,
    )
    for year, quirk in ORDERS.items()
)
