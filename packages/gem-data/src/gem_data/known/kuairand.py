"""KuaiRand: short videos with a dozen kinds of feedback, two periods of ordinary traffic and one of random traffic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from gem_data.formats.scan import scan
from gem_data.known.dataset import Choices, KnownDataSet, MultiId, Tables, hashed, numbers, sequence, tasks
from gem_data.known.tables import KnownTable, find, find_any, same, typed
from gem_data.schema.declare import Schema

FEEDBACK = {"is_click": 1, "is_like": 2, "is_follow": 4, "is_comment": 8, "is_forward": 16, "is_hate": 32, "long_view": 64, "is_profile_enter": 128}
"""The bit of each kind of feedback in ``action``, as recsys-examples and generative-recommenders number them."""
LOG = typed(
    *(f"{name}:int64" for name in ("user_id", "video_id", "date", "hourmin", "time_ms", *FEEDBACK)),
    *(f"{name}:int64" for name in ("play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time", "is_rand", "tab")),
)
RANGES = ("follow_user_num_range", "fans_user_num_range", "friend_user_num_range", "register_days_range")
USER = ("user_active_degree", "is_live_streamer", "is_video_author", *RANGES)
VIDEO = ("author_id", "video_type", "upload_type", "music_id")


def _log(files: list[Path]) -> KnownTable:
    bits = sum((pl.col(name).cast(pl.Int64) * bit for name, bit in FEEDBACK.items()), start=pl.lit(0, pl.Int64))
    renamed = {"item_id": pl.col("video_id"), "timestamp": pl.col("time_ms") // 1000, "action": bits}
    kept = same("user_id", "time_ms", "date", "hourmin", "play_time_ms", "duration_ms", "profile_stay_time", "comment_stay_time", "tab", "is_rand")
    flags = {name: pl.col(name).cast(pl.Int8) for name in FEEDBACK}
    return KnownTable(files=files, read={"types": LOG}, columns=kept | renamed | flags)


def _statistics(files: list[Path]) -> KnownTable:
    """Fifty-odd numbers about each video, all as floats, whatever they are."""
    names = [name for name in scan(files[0]).schema.names if name != "video_id"]
    read = {"types": {"video_id": "int64", **dict.fromkeys(names, "float64")}}
    return KnownTable(files=files, read=read, columns={"item_id": pl.col("video_id"), **same(*names)})


EXTRA = {"random": ("log_random_4_22_to_5_08", _log), "item_statistics": ("video_features_statistic", _statistics)}
"""Tables that the definition does without: they are read where their files are there."""


def _opener(size: str) -> Callable[[Path, Choices], dict[str, KnownTable]]:
    def opened(folder: Path, _: Choices) -> dict[str, KnownTable]:
        # One after the other: who appears in one period only keeps his rows. Every part of both periods is needed.
        periods = [
            find(folder, f"log_standard_{days}_{size}.csv", f"log_standard_{days}_{size}_part*.csv") for days in ("4_08_to_4_21", "4_22_to_5_08")
        ]
        extra = {name: find_any(folder, f"{file}_{size}.csv", f"{file}_{size}_part*.csv") for name, (file, _) in EXTRA.items()}
        users = {"types": typed("user_id:int64", *USER)}
        videos = typed("video_id:int64", "author_id:int64", "video_type", "upload_dt", "upload_type", "video_duration:float64", "music_id", "tag")
        tags = pl.col("tag").fill_null("").str.split(",").list.eval(pl.element().str.strip_chars().replace("", None).drop_nulls())
        plain = same("author_id", "video_type", "upload_dt", "upload_type", "video_duration", "music_id")
        return {
            "impressions": _log([file for period in periods for file in period]),
            "users": KnownTable(files=find(folder, f"user_features_{size}.csv"), read=users, columns=same("user_id", *USER)),
            "items": KnownTable(
                files=find(folder, f"video_features_basic_{size}.csv"),
                read={"types": videos},
                columns={"item_id": pl.col("video_id"), **plain, "tags": tags},
            ),
            **{name: EXTRA[name][1](files) for name, files in extra.items() if files},
        }

    return opened


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "user_id", "time": "time_ms", "unit": "ms"}, "users": {}, "items": {}},
        "impressions": {"table": "impressions"},
        "histories": [
            {"name": "seen", "table": "impressions"},
            {"name": "clicked", "table": "impressions", "where": [["is_click", "==", 1]]},
        ],
        "sides": [
            {"table": "users", "on": ["user_id"], "columns": list(USER)},
            {"table": "items", "on": ["item_id"], "columns": [*VIDEO, "video_duration", "tags"]},
        ],
        "split": {"kind": "time", "test_fraction": 0.1},
    }


def _schema(items: int) -> Schema:
    item = hashed("item_id", rows=items)
    return Schema(
        user="user_id",
        time="timestamp",
        id=(*item, *hashed("author_id", "music_id", rows=items), *hashed("tab", "video_type", "upload_type", *USER, rows=1000)),
        multi_id=(MultiId(name="tags", encode="hash", rows=1000),),
        number=numbers("video_duration"),
        sequence=(sequence("seen", *item, *hashed("action", rows=1000), length=500), sequence("clicked", *item)),
        task=tasks("is_click", "is_like", "long_view"),
    )


DATA_SETS = tuple(
    KnownDataSet(
        name=f"kuairand-{size}",
        summary=f"KuaiRand-{size.upper() if size != 'pure' else 'Pure'}: {events} shown videos with twelve kinds of feedback, and random traffic",
        terms="Gao et al. 2022, CC BY-SA 4.0; cite, do not pass samples on",
        files=(
            f"log_standard_*_{size}*.csv (both periods)",
            f"user_features_{size}.csv",
            f"video_features_basic_{size}.csv",
            f"where there: log_random_*_{size}*.csv, video_features_statistic_{size}*.csv",
        ),
        quirks=(
            "users of one period only are kept",
            "labels packed into `action`",
            "milliseconds; dates are UTC+8",
            "ranges are text",
            "`tag` is a quoted list",
            "play time may exceed the duration",
        ),
        open=_opener(size),
        schema=_schema(items),
        definition=_definition,
    )
    for size, events, items in (("pure", "1.4 million", 20_000), ("1k", "11.7 million", 4_000_000), ("27k", "322 million", 32_000_000))
)
