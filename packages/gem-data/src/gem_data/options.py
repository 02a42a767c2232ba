"""Options of the sources, validated when a configuration is read; imports no data library."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Strict, because pydantic otherwise takes `true` for the number 1.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Ml100kOptions(Options):
    """Options of ``ml-100k``."""

    path: Path | None = Field(None, description="folder with ml-100k.inter, .user and .item; by default the cache of `gem data fetch`")
    history_length: Count = Field(50, description="most recent events kept of each history")
    history_rule: Literal["strict", "order"] = Field(
        "strict", description="strict: events with an earlier timestamp; order: events that come earlier in stable time order, ties included"
    )
    item_statistics: Literal["past", "crossfit"] = Field(
        "past",
        description="numbers about the film. past: ratings with an earlier timestamp (training rows only, for a training row); "
        "crossfit: training rows of any time, other users' only",
    )


class CriteoOrcOptions(Options):
    """Options of ``criteo-orc``."""

    path: Path = Field(description="folder with part-N.orc files")
    train_parts: tuple[Natural, ...] | None = Field(None, description="the N of the files to train on; by default all but the test files")
    test_parts: tuple[Natural, ...] | None = Field(None, description="the N of the files to test on; by default the highest")
    min_count: Count = Field(20, description="ids seen in fewer training rows share row 0 with unknown ones")
    hash_rows: Natural = Field(0, description="0: a vocabulary for each column; N: hash the ids of each column into N rows")
    unknown: Literal["row0", "error"] = Field("row0", description="ids outside the vocabulary: row 0, or an error that names the first one")


class SyntheticOptions(Options):
    """Options of ``synthetic``."""

    rows: Count = Field(150_000, description="training rows")
    test_rows: Count = Field(20_000, description="test rows")
    seed: Natural = Field(1, description="seed of the generator")
    users: Count = Field(5_000, description="users, each with one event log")
    groups: Count = Field(6, description="user groups")
    items: Count = Field(50, description="items, drawn by Zipf's law")
    categories: Count = Field(4, description="categories of items")
    zipf: Annotated[Real, Field(ge=0.0)] = Field(1.05, description="exponent of item popularity; 0 is uniform")
    mean_events: Annotated[Real, Field(ge=0.0)] = Field(8.0, description="mean length of a user's event log; lengths are heavy-tailed")
    history_length: Count = Field(12, description="most recent events kept of each history")
    base_logit: Real = Field(-1.2, description="log odds of a click before any effect")
    temperature: Annotated[Real, Field(gt=0.0)] = Field(1.0, description="divides every effect: larger is noisier")
    conversion: bool = Field(False, description="add the task cvr, observed where ctr is positive")
