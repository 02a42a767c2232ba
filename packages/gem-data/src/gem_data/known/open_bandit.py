"""Open Bandit: fashion ads shown by a known policy, with the probability of each choice."""

from pathlib import Path
from typing import Any

import polars as pl

from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, numbers, tasks
from gem_data.known.tables import KnownTable, find, same
from gem_data.schema.declare import Schema

CAMPAIGNS = {"all": 80, "men": 34, "women": 46}
USER = tuple(f"user_feature_{k}" for k in range(4))
CONTEXT = tuple(f"item_feature_{k}" for k in range(4))


def _open(folder: Path, choices: Choices) -> dict[str, KnownTable]:
    campaign, policy = choices["campaign"], choices["policy"]
    place = folder / policy / campaign if (folder / policy / campaign).is_dir() else folder
    affinity = [f"user-item_affinity_{k}" for k in range(CAMPAIGNS[campaign])]
    # The first column has no name, so the line with the names is read as a row and dropped.
    names = ["index", "timestamp", "item_id", "position", "click", "propensity_score", *USER, *affinity]
    when = pl.col("timestamp").str.to_datetime("%Y-%m-%d %H:%M:%S%.f%#z", time_unit="us", time_zone="UTC")
    columns = {
        "timestamp": when.dt.epoch("s"),
        "timestamp_us": when.dt.epoch("us"),
        "user_id": pl.concat_str(USER, separator="/"),
        "item_id": pl.col("item_id").cast(pl.Int64),
        "position": pl.col("position").cast(pl.Int64),
        "click": pl.col("click").cast(pl.Int8),
        "propensity": pl.col("propensity_score").cast(pl.Float64),
        **same(*USER),
        "affinity": pl.concat_list([pl.col(name).cast(pl.Float32) for name in affinity]),
    }
    context = ["index", "item_id", *CONTEXT]
    return {
        "impressions": KnownTable(
            files=find(place, f"{campaign}.csv"),
            read={"header": names, "types": dict.fromkeys(names, "string")},
            drop={"line with the names": pl.col("timestamp") == "timestamp"},
            columns=columns,
        ),
        "items": KnownTable(
            files=find(place, "item_context.csv"),
            read={"header": context, "types": dict.fromkeys(context, "string")},
            drop={"line with the names": pl.col("item_id") == "item_id"},
            columns={"item_id": pl.col("item_id").cast(pl.Int64), CONTEXT[0]: pl.col(CONTEXT[0]).cast(pl.Float64), **same(*CONTEXT[1:])},
        ),
    }


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "user_id", "time": "timestamp_us", "unit": "us"}, "items": {}},
        "impressions": {"table": "impressions"},
        "sides": [{"table": "items", "on": ["item_id"], "columns": list(CONTEXT)}],
        "split": {"kind": "time", "test_fraction": 0.2},
    }


DATA_SETS = (
    KnownDataSet(
        name="open-bandit",
        summary="fashion ads of ZOZOTOWN with the probability that the policy showed each",
        terms="Saito et al. 2021, CC BY 4.0",
        files=("POLICY/CAMPAIGN/CAMPAIGN.csv and item_context.csv", "or those two in the folder itself"),
        quirks=(
            "the first column has no name",
            "times are ISO texts with microseconds, UTC",
            "no user: the four user features together stand for one",
            "0.5 % clicks",
        ),
        open=_open,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=tuple(hashed("item_id", "position", *USER, *CONTEXT[1:], rows=1000)),
            number=numbers(CONTEXT[0]),
            task=tasks("click"),
        ),
        definition=_definition,
        choices={"campaign": tuple(CAMPAIGNS), "policy": ("random", "bts")},
    ),
)
