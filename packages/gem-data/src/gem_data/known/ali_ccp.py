"""Ali-CCP: click and purchase of Taobao recommendations, with the features of a request in a file of their own.

A row's features are one field of text: features are separated by the byte 1, a feature's field and id by 2, id and value by 3.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl

from gem_core.spec import RequestError
from gem_data.known.dataset import Choices, KnownDataSet, MultiId, Tables, hashed, numbers, tasks
from gem_data.known.tables import FILE, ROW, Change, KnownTable, find, same, taken_apart, text
from gem_data.schema.declare import Schema

COMMON_ONE = ("101", "121", "122", "124", "125", "126", "127", "128", "129")
COMMON_MANY = ("109_14", "110_14", "127_14", "150_14")
OWN_ONE = ("205", "206", "207", "216", "508", "509", "702", "301")
OWN_MANY = ("210", "853")
VALUED = ("508", "509", "702")
POLICIES = ("drop", "keep", "mask")


def parse_features(column: str, count: str, one: Iterable[str], many: Iterable[str]) -> Change:
    """Adds columns made from ``column``: each field of ``one`` as its id (missing where absent), each of ``many`` as the list of its ids and, as
    ``FIELD.value``, the list of their values; ``FIELD.value`` is one number for the fields that pair a user's with an item's (``VALUED``).

    Of a field of ``one`` that occurs twice the first id counts. The number of features is compared with ``count``.
    """

    def parse(piece: pl.DataFrame) -> pl.DataFrame:
        rows = piece.with_row_index("at")
        parts = taken_apart(rows.select("at", part=pl.col(column).str.split("\x01")), ["part"]).filter(pl.col("part") != "")
        _check_counts(rows, parts, count)
        split = pl.col("part").str.split_exact("\x02", 1).struct
        rest = pl.col("rest").str.split_exact("\x03", 1).struct
        parts = parts.with_columns(split.field("field_0").alias("field"), split.field("field_1").alias("rest"))
        parts = parts.with_columns(rest.field("field_0").cast(pl.Int64).alias("id"), rest.field("field_1").cast(pl.Float32).alias("value"))
        out = rows
        for field in (*one, *many):
            pick = (pl.col("id"), pl.col("value")) if field in many else (pl.col("id").first(), pl.col("value").first())
            found = parts.filter(pl.col("field") == field).group_by("at").agg(pick[0].alias(field), pick[1].alias(f"{field}.value"))
            out = out.join(found, on="at", how="left", maintain_order="left")
            if field in many:
                out = out.with_columns(
                    pl.col(field).fill_null(pl.lit([], pl.List(pl.Int64))), pl.col(f"{field}.value").fill_null(pl.lit([], pl.List(pl.Float32)))
                )
        return out.drop("at")

    return parse


def _check_counts(rows: pl.DataFrame, parts: pl.DataFrame, count: str) -> None:
    found = rows.join(parts.group_by("at").len(), on="at", how="left", maintain_order="left")
    wrong = found.filter(pl.col("len").fill_null(0) != pl.col(count))
    if wrong.height:
        first = wrong.row(0, named=True)
        so = f"row {first['at'] + 1} of a piece announces {first[count]} features and has {first['len'] or 0}"
        raise RequestError(f"file {first[FILE]}", so, "Check that the file is whole and its control characters are untouched.")


def _open(folder: Path, choices: Choices) -> dict[str, KnownTable]:
    clickless = (pl.col("purchase") == 1) & (pl.col("click") == 0)
    policy = choices["purchase_without_click"]
    purchase = pl.when(clickless).then(None).otherwise(pl.col("purchase")) if policy == "mask" else pl.col("purchase")
    skeleton = text("sample_id:int64", "click:int8", "purchase:int8", "common_id", "count:int64", "features", separator=",", quote=False)
    # A request has hundreds of features, a row of the skeleton about ten: fewer rows at once keep the memory the same.
    common = text("common_id", "count:int64", "features", separator=",", quote=False, batch_rows=4096)
    own = {**same(*OWN_ONE, *(f"{field}.value" for field in VALUED)), **_many(OWN_MANY)}
    return {
        "impressions": KnownTable(
            files=_both(folder, "sample_skeleton"),
            read=skeleton,
            expand=parse_features("features", "count", OWN_ONE, OWN_MANY),
            drop={"purchase without a click": clickless} if policy == "drop" else {},
            columns={"row": pl.col(ROW), **same("sample_id", "common_id", "click"), "purchase": purchase.cast(pl.Int8), **own},
        ),
        "common": KnownTable(
            files=_both(folder, "common_features"),
            read=common,
            expand=parse_features("features", "count", COMMON_ONE, COMMON_MANY),
            columns={**same("common_id", *COMMON_ONE), **_many(COMMON_MANY)},
        ),
    }


def _both(folder: Path, name: str) -> list[Path]:
    """The training file, then the test file; each also in the folder that its archive makes."""
    return [path for part in ("train", "test") for path in find(folder, f"{name}_{part}.csv*", f"sample_{part}/{name}_{part}.csv*")]


def _many(fields: Iterable[str]) -> dict[str, pl.Expr]:
    return {name: pl.col(name) for field in fields for name in (field, f"{field}.value")}


def _definition(tables: Tables) -> dict[str, Any]:
    starts = tables["impressions"].starts
    test_from = next(start for name, start in starts.items() if name.startswith("sample_skeleton_test"))
    taken = [*COMMON_ONE, *_many(COMMON_MANY)]
    return {
        "tables": {"impressions": {"user": "common_id", "time": "row"}, "common": {}},
        "impressions": {"table": "impressions"},
        "sides": [{"table": "common", "on": ["common_id"], "columns": taken}],
        "split": {"kind": "time", "test_from": test_from},
    }


DATA_SETS = (
    KnownDataSet(
        name="ali-ccp",
        summary="84 million recommended items with click and purchase",
        terms="Ma et al. 2018, Alibaba Tianchi: research, cite",
        files=(
            "sample_skeleton_train.csv, sample_skeleton_test.csv",
            "common_features_train.csv, common_features_test.csv",
            "also in sample_train/ and sample_test/",
        ),
        quirks=(
            "features inside a field, between the bytes 1, 2 and 3",
            "a request's features are joined by their index; rows without a match are kept",
            "purchases without a click: dropped and counted, or kept, or masked (`purchase_without_click`)",
            "no clock: rows are taken in the order of the files, and those of the test file are the test rows",
        ),
        open=_open,
        schema=Schema(
            user="common_id",
            time="row",
            id=tuple(hashed(*COMMON_ONE, *OWN_ONE, rows=500_000)),
            multi_id=tuple(MultiId(name=f, encode="hash", rows=500_000, weights=f"{f}.value") for f in (*COMMON_MANY, *OWN_MANY)),
            number=numbers(*(f"{field}.value" for field in VALUED)),
            task=tasks("click", "purchase", purchase="click"),
        ),
        definition=_definition,
        choices={"purchase_without_click": POLICIES},
    ),
)
