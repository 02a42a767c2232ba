"""Two public logs of Taobao: what users did with items, and display ads with user profiles and behaviour."""

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import polars as pl

from gem_data.formats.scan import scan
from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, numbers, sequence, tasks
from gem_data.known.tables import KnownTable, find, same, text, typed
from gem_data.schema.declare import Schema, Task

CHINA = timezone(timedelta(hours=8))
FIRST, AFTER = (int(datetime(2017, month, day, tzinfo=CHINA).timestamp()) for month, day in ((11, 25), (12, 4)))
KINDS = ("pv", "buy", "cart", "fav")
DAY = 86_400


def _open_behaviour(folder: Path, choices: Choices) -> dict[str, KnownTable]:
    files = find(folder, "UserBehavior.csv", "UserBehavior.csv.gz")
    read = text("user_id:int64", "item_id:int64", "category_id:int64", "behaviour", "timestamp:int64", separator=",")
    when = pl.col("timestamp")
    drop = {
        "unknown behaviour": ~pl.col("behaviour").is_in(KINDS),
        "time outside 2017-11-25 .. 2017-12-03": (when < FIRST) | (when >= AFTER),
    }
    columns = same("user_id", "item_id", "category_id", "timestamp")
    views = KnownTable(files=files, read=read, drop={**drop, "no page view": pl.col("behaviour") != "pv"}, columns=columns)
    return {"impressions": views, "events": KnownTable(files=files, read=read, drop=drop, columns=columns | same("behaviour"))}


def _behaviour_definition(_: Tables) -> dict[str, Any]:
    log = {"user": "user_id", "time": "timestamp"}
    return {
        "tables": {"impressions": log, "events": log},
        "impressions": {"table": "impressions"},
        "conversions": [{"task": "buy", "table": "events", "where": [["behaviour", "==", "buy"]], "match": ["item_id"], "within": DAY}],
        "histories": [
            {"name": "viewed", "table": "events", "where": [["behaviour", "==", "pv"]]},
            {"name": "acted", "table": "events", "where": [["behaviour", "!=", "pv"]]},
        ],
        "split": {"kind": "time", "test_fraction": 0.1},
    }


PROFILE = (
    "cms_segid",
    "cms_group_id",
    "final_gender_code",
    "age_level",
    "pvalue_level",
    "shopping_level",
    "occupation",
    "new_user_class_level",
)
AD = ("cate_id", "campaign_id", "customer", "brand", "price")


def _open_ads(folder: Path, _: Choices) -> dict[str, KnownTable]:
    clicks = typed("user:int64", "time_stamp:int64", "adgroup_id:int64", "pid", "nonclk:int8", "clk:int8")
    shown = {"user_id": pl.col("user"), "timestamp": pl.col("time_stamp"), **same("adgroup_id", "pid"), "click": pl.col("clk")}
    log = find(folder, "behavior_log.csv", "behavior_log.csv.gz")
    who = "nick" if "nick" in scan(log[0]).schema.names else "user"
    actions = typed(f"{who}:int64", "time_stamp:int64", "btag", "cate:int64", "brand:int64")
    acted = {"user_id": pl.col(who), "timestamp": pl.col("time_stamp"), **same("btag"), "cate_id": pl.col("cate"), "brand": pl.col("brand")}
    null = ("", "NULL", "null")
    return {
        "impressions": KnownTable(
            files=find(folder, "raw_sample.csv", "raw_sample.csv.gz"),
            read={"types": clicks},
            drop={"clk and nonclk agree": pl.col("clk") == pl.col("nonclk")},
            columns=shown,
        ),
        "events": KnownTable(files=log, read={"types": actions, "missing": null}, columns=acted),
        "users": KnownTable(
            files=find(folder, "user_profile.csv", "user_profile.csv.gz"),
            read={"types": typed("userid:int64", *(f"{name}:int64" for name in PROFILE))},
            columns={"user_id": pl.col("userid"), **same(*PROFILE)},
        ),
        "ads": KnownTable(
            files=find(folder, "ad_feature.csv", "ad_feature.csv.gz"),
            read={"types": typed("adgroup_id:int64", *(f"{name}:int64" for name in AD[:-1]), "price:float64"), "missing": null},
            columns=same("adgroup_id", *AD),
        ),
    }


def _ads_definition(_: Tables) -> dict[str, Any]:
    log = {"user": "user_id", "time": "timestamp"}
    return {
        "tables": {"impressions": log, "events": log, "users": {}, "ads": {}},
        "impressions": {"table": "impressions"},
        "histories": [
            {"name": "viewed", "table": "events", "where": [["btag", "==", "ipv"]]},
            {"name": "acted", "table": "events", "where": [["btag", "in", ["cart", "fav", "buy"]]]},
        ],
        "sides": [
            {"table": "users", "on": ["user_id"], "columns": list(PROFILE)},
            {"table": "ads", "on": ["adgroup_id"], "columns": list(AD)},
        ],
        "split": {"kind": "time", "test_fraction": 0.125},
    }


ITEM, CATEGORY = hashed("item_id", rows=5_000_000) + hashed("category_id", rows=20_000)
THING = [*hashed("cate_id", rows=20_000), *hashed("brand", rows=500_000)]
DATA_SETS = (
    KnownDataSet(
        name="taobao-behaviour",
        summary="100,150,807 page views, purchases, carts and favourites",
        terms="Alibaba Tianchi: research, cite",
        files=("UserBehavior.csv",),
        quirks=(
            "no header",
            "rows with times outside the nine days (even negative ones) are dropped and counted",
            "repeated rows are kept",
            "impressions are page views; `buy`: the same item within a day",
        ),
        open=_open_behaviour,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=(ITEM, CATEGORY),
            sequence=(sequence("viewed", ITEM, CATEGORY), sequence("acted", ITEM, CATEGORY, *hashed("behaviour", rows=100))),
            task=(Task(name="buy", label="buy"),),
        ),
        definition=_behaviour_definition,
    ),
    KnownDataSet(
        name="taobao-ads",
        summary="26.6 million display ad impressions with profiles, ads and 700 million behaviours",
        terms="Alibaba Tianchi: research, cite",
        files=("raw_sample.csv", "ad_feature.csv", "user_profile.csv", "behavior_log.csv"),
        quirks=(
            "the last column of user_profile.csv is called `new_user_class_level ` with a blank",
            "behavior_log.csv calls its users user or nick",
            'brand "NULL" is a missing value',
            "one impression in twenty has no profile or no ad: it is kept",
            "rows whose clk and nonclk agree are dropped and counted",
        ),
        open=_open_ads,
        schema=Schema(
            user="user_id",
            time="timestamp",
            id=(
                *hashed("adgroup_id", "campaign_id", "customer", rows=1_000_000),
                *THING,
                *hashed("pid", *PROFILE, rows=200),
                *hashed("user_id", rows=1_000_000),
            ),
            number=numbers("price"),
            sequence=(sequence("viewed", *THING), sequence("acted", *THING, *hashed("btag", rows=100))),
            task=tasks("click"),
        ),
        definition=_ads_definition,
    ),
)
