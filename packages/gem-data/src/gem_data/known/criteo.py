"""Criteo's display advertising challenge and its terabyte of click logs: one tab-separated form."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from gem_core.spec import RequestError
from gem_data.known.dataset import Choices, KnownDataSet, Tables, hashed, numbers, tasks
from gem_data.known.tables import FILE, ROW, KnownTable, find, text, whole
from gem_data.schema.declare import Schema

NUMBERS = tuple(f"I{k}" for k in range(1, 14))
DAY_FILE = re.compile(r"day_\d+(\.gz)?$")
CATEGORIES = tuple(f"C{k}" for k in range(1, 27))


def _train(folder: Path) -> list[Path]:
    return find(folder, "train.txt", "train.txt.gz")


def _days(folder: Path) -> list[Path]:
    """Each day once, packed or not."""
    files = [path for path in find(folder, "day_[0-9]*") if DAY_FILE.match(path.name)]
    names = [path.name.removesuffix(".gz") for path in files]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RequestError(f"data set in {folder}", f"{twice[0]} is there twice, packed and unpacked", "Keep one of them.")
    return files


def _opener(found: Callable[[Path], list[Path]]) -> Callable[[Path, Choices], dict[str, KnownTable]]:
    def opened(folder: Path, _: Choices) -> dict[str, KnownTable]:
        # Floats, because some copies write counts as 260.0; the count of the canonical table is exact or refused.
        read = text("click:int8", *(f"{name}:float64" for name in NUMBERS), *CATEGORIES, separator="\t", quote=False, format="csv")
        columns = {
            # There is no clock and no user: the files are in the order of time, and each row is its own user.
            "row": pl.col(ROW),
            "day": pl.col(FILE).str.extract(r"^day_(\d+)").cast(pl.Int32),
            "click": pl.col("click"),
            **{name: whole(name) for name in NUMBERS},
            **{name: pl.col(name).str.to_integer(base=16).cast(pl.Int64) for name in CATEGORIES},
        }
        return {"impressions": KnownTable(files=found(folder), read=read, columns=columns)}

    return opened


def _definition(_: Tables) -> dict[str, Any]:
    return {
        "tables": {"impressions": {"user": "row", "time": "row"}},
        "impressions": {"table": "impressions"},
        "split": {"kind": "time", "test_fraction": 1 / 7},
    }


def _schema(rows: int) -> Schema:
    return Schema(time="row", id=tuple(hashed(*CATEGORIES, rows=rows)), number=numbers(*NUMBERS), task=tasks("click"))


QUIRKS = (
    "no header",
    "blanks are missing values, not zeros",
    "counts below zero are kept",
    "categories are hexadecimal numbers",
    "rows are in the order of time; there is no clock and no user, so `row` stands for both",
    "a last line without a newline counts",
)
DATA_SETS = (
    KnownDataSet(
        name="criteo-kaggle",
        summary="45,840,617 ad impressions of 7 days",
        terms="Criteo AI Lab: non-commercial research",
        files=("train.txt", "or train.txt.gz"),
        quirks=QUIRKS,
        open=_opener(_train),
        schema=_schema(1_000_000),
        definition=_definition,
    ),
    KnownDataSet(
        name="criteo-1tb",
        summary="4.37 billion ad impressions of 24 days",
        terms="Criteo AI Lab: non-commercial research",
        files=("day_0 .. day_23", "or day_0.gz .. day_23.gz"),
        quirks=(*QUIRKS, "days are read by their number: day_2 before day_10"),
        open=_opener(_days),
        schema=_schema(10_000_000),
        definition=lambda rows: _definition(rows) | {"split": {"kind": "time", "test_fraction": 1 / 24}},
    ),
)
