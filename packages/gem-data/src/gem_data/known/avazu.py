"""Avazu's click-through rate challenge."""

from pathlib import Path
from typing import Any

import polars as pl

from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, sequence, tasks
from gem_data.known.tables import KnownTable, find, same, typed
from gem_data.schema.declare import Schema

SITE = ("site_id", "site_domain", "site_category", "app_id", "app_domain", "app_category", "device_id", "device_ip", "device_model")
CODES = ("C1", "banner_pos", "device_type", "device_conn_type", "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21")
NO_DEVICE = "a99f214a"
"""The device_id of more than four rows in five: none was known."""


def _open(folder: Path, _: Choices) -> dict[str, KnownTable]:
    device = pl.when(pl.col("device_id") == NO_DEVICE).then(pl.col("device_ip") + "/" + pl.col("device_model")).otherwise(pl.col("device_id"))
    hour = pl.lit("20") + pl.col("hour") + pl.lit("00")
    columns = {
        # 20 digits do not fit a signed word, and some future file may not fit an unsigned one.
        **same("id", "click"),
        "user_id": device,
        "timestamp": hour.str.to_datetime("%Y%m%d%H%M").dt.epoch("s"),
        **same(*SITE),
        **{name: pl.col(name).replace(-1, None) if name == "C20" else pl.col(name) for name in CODES},
    }
    read = {"types": typed("id", "click:int8", "hour", *SITE, *(f"{name}:int64" for name in CODES)), "format": "csv"}
    return {"impressions": KnownTable(files=find(folder, "train.gz", "train.csv", "train"), read=read, columns=columns)}


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "user_id", "time": "timestamp"}},
        "impressions": {"table": "impressions"},
        "histories": [{"name": "shown", "table": "impressions"}],
        "split": {"kind": "time", "test_fraction": 0.1},
    }


FEATURES = hashed(*SITE, *CODES, rows=1_000_000)
DATA_SETS = (
    KnownDataSet(
        name="avazu",
        summary="40,428,967 mobile ad impressions of 10 days",
        terms="Avazu, through Kaggle: competition rules",
        files=("train.gz", "or train.csv", "or train"),
        quirks=(
            "ids of 20 digits are text",
            "`hour` is YYMMDDHH; timestamps are the start of the hour, read as UTC",
            "C20 = -1 is a missing value",
            f"users are devices; where device_id is {NO_DEVICE} (unknown), address and model together",
        ),
        open=_open,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=tuple(FEATURES),
            sequence=(sequence("shown", *(f for f in FEATURES if f.name in ("site_id", "app_id", "C14"))),),
            task=tasks("click"),
        ),
        definition=_definition,
    ),
)
