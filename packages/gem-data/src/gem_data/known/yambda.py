"""Yambda: listens and likes of a music service, one row an event (flat) or one row a user (sequential)."""

from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa

from gem_data.formats.scan import scan
from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, numbers, sequence, tasks
from gem_data.known.tables import FILE, KnownTable, find, find_any, taken_apart
from gem_data.schema.declare import Schema

KINDS = {"listens": "listen", "likes": "like", "dislikes": "dislike", "unlikes": "unlike", "undislikes": "undislike"}
LISTEN = {"is_organic": pl.Int8(), "played_ratio_pct": pl.Float32(), "track_length_seconds": pl.Float32()}
USERS_AT_ONCE = 1024
"""Of sequential files, whose rows hold thousands of events each."""


def _events(piece: pl.DataFrame) -> pl.DataFrame:
    """One row an event, with every column; what a file lacks is missing, and its name tells the kind of event."""
    lists = [name for name, kind in piece.schema.items() if isinstance(kind, pl.List)]
    if lists:
        piece = taken_apart(piece, lists)
    if "event_type" not in piece.columns:
        piece = piece.with_columns(event_type=pl.col(FILE).str.strip_suffix(".parquet").replace_strict(KINDS))
    return piece.with_columns(pl.lit(None, kind).alias(name) for name, kind in LISTEN.items() if name not in piece.columns)


def _open(folder: Path, _: Choices) -> dict[str, KnownTable]:
    files = find_any(folder, "multi_event.parquet") or [path for name in KINDS for path in find_any(folder, f"{name}.parquet")]
    heard = [path for path in files if path.stem in ("multi_event", "listens")] or find(folder, "multi_event.parquet", "listens.parquet")
    columns = {
        "user_id": pl.col("uid").cast(pl.Int64),
        "item_id": pl.col("item_id").cast(pl.Int64),
        "timestamp": pl.col("timestamp").cast(pl.Int64),
        "event_type": pl.col("event_type").cast(pl.String),
        **{name: pl.col(name).cast(kind) for name, kind in LISTEN.items()},
    }
    nested = any(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in scan(heard[0]).schema.types)
    read = {"batch_rows": USERS_AT_ONCE} if nested else {}
    listens = {"no listen": pl.col("event_type").cast(pl.String) != "listen"}
    return {
        "impressions": KnownTable(files=heard, read=read, expand=_events, drop=listens, columns=columns),
        "events": KnownTable(files=files, read=read, expand=_events, columns=columns),
    }


def _definition(_: Tables) -> dict[str, Any]:
    log = {"user": "user_id", "time": "timestamp"}
    return {
        "tables": {"impressions": log, "events": log},
        "impressions": {"table": "impressions"},
        "positives": [{"task": "listened", "where": [["played_ratio_pct", ">=", 50.0]]}],
        "histories": [
            {"name": "heard", "table": "impressions"},
            {"name": "liked", "table": "events", "where": [["event_type", "==", "like"]]},
        ],
        "split": {"kind": "time", "test_fraction": 0.01},
    }


ITEM = hashed("item_id", rows=10_000_000)
DATA_SETS = (
    KnownDataSet(
        name="yambda",
        summary="4.79 billion listens and likes of music, also as 50M and 500M",
        terms="Yandex, Apache-2.0",
        files=("multi_event.parquet", "or listens.parquet and any of likes, dislikes, unlikes, undislikes", "of flat/ or sequential/"),
        quirks=(
            "played_ratio_pct above 100 is a replay and is kept",
            "times in steps of five seconds: ties are many",
            "sequential files are taken apart, one row an event",
        ),
        open=_open,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=(*ITEM, *hashed("is_organic", rows=10)),
            number=numbers("track_length_seconds"),
            sequence=(sequence("heard", *ITEM, *hashed("is_organic", rows=10), length=500), sequence("liked", *ITEM)),
            task=tasks("listened"),
        ),
        definition=_definition,
    ),
)
