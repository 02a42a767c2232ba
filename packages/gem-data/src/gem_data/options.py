"""Options of the sources, validated when a configuration is read; imports no data library."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


class GeneratedOptions(Options):
    """Options of ``generated`` and of ``gem data generate``."""

    rows: Count = Field(1_000_000, description="training rows")
    test_rows: Count = Field(100_000, description="test rows, all later than the training rows")
    seed: Natural = Field(1, description="seed of everything")
    users: Count = Field(100_000, description="users; each has one event log, from which all his histories are cut")
    groups: Count = Field(6, description="user groups")
    items: Count = Field(10_000, description="items, a multiple of categories")
    categories: Annotated[Count, Field(ge=4, le=1000)] = Field(20, description="categories of items")
    zipf: Annotated[Real, Field(ge=0.0, le=4.0)] = Field(1.05, description="exponent of item popularity within a category; 0 is uniform")
    candidates: Count = Field(1, description="rows of one request: they share user, time and history")
    mean_events: Annotated[Real, Field(ge=0.0)] = Field(100.0, description="mean events of a user's log before the cap")
    tail: Annotated[Real, Field(gt=1.0, le=10.0)] = Field(1.2, description="Pareto exponent of log lengths; below 2 their variance is infinite")
    max_events: Annotated[Count, Field(le=200_000)] = Field(200_000, description="longest log")
    history_length: Annotated[Count, Field(le=200_000)] = Field(100, description="most recent events of a history")
    days: Annotated[Count, Field(le=3650)] = Field(60, description="days that the logs cover; training rows from 30 %, test rows from 85 % of them")
    interest_days: Count = Field(15, description="days after which every user's interest is drawn anew")
    interest: Annotated[Real, Field(ge=0.0, lt=1.0)] = Field(
        0.6, description="share of events that follow the interest; the others are of any category"
    )
    follow_up: Annotated[Real, Field(ge=0.0, le=1.0)] = Field(
        0.5, description="weight of what follows from the last event; the rest is the interest's"
    )
    match: Real = Field(3.0, description="log odds added when the candidate is what the history asks for; 0 hides nothing in histories")
    base_logit: Real = Field(-2.5, description="log odds of a click before any effect")
    drift: Real = Field(0.5, description="radians by which item effects turn over the days of the logs")
    conversion: bool = Field(True, description="add the task cvr, observed where ctr is positive")
    delay_days: Annotated[Real, Field(gt=0.0)] = Field(1.5, description="typical mean delay from click to conversion")
    window_days: Annotated[Real, Field(gt=0.0)] = Field(7.0, description="conversions within this time of the click count")

    @model_validator(mode="after")
    def _whole_categories(self) -> Self:
        if self.items % self.categories:
            raise ValueError(f"items = {self.items} is no multiple of categories = {self.categories}")
        return self


class SequenceShape(Options):
    """A kind of events of ``workload``, and how many a row has."""

    name: str = Field("history", min_length=1, description="name of the sequence")
    lengths: Literal["fixed", "uniform", "zipf", "lognormal"] = Field(
        "lognormal",
        description="fixed: longest; uniform: shortest to longest; zipf: P(n) as n ** -exponent from 1, cut at longest; "
        "lognormal: of this mean and sigma, cut at shortest and longest",
    )
    shortest: Natural = Field(0, description="fewest events of a row")
    longest: Count = Field(1_000, description="most events of a row")
    mean: Annotated[Real, Field(gt=0.0)] = Field(100.0, description="lognormal: mean before the cuts")
    sigma: Annotated[Real, Field(ge=0.0, le=4.0)] = Field(1.0, description="lognormal: standard deviation of the logarithm")
    exponent: Annotated[Real, Field(gt=1.0, le=10.0)] = Field(1.2, description="zipf: how fast long rows become rare")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is more than longest = {self.longest}")
        return self


class WorkloadOptions(Options):
    """Options of ``workload``."""

    rows: Count = Field(1_048_576, description="training rows")
    test_rows: Count = Field(4_096, description="test rows")
    seed: Natural = Field(1, description="seed of everything")
    sequences: tuple[SequenceShape, ...] = Field(
        default_factory=lambda: (SequenceShape.model_validate({}),), min_length=1, description="the kinds of events"
    )
    items: Count = Field(100_000, description="items, a multiple of categories; their table has a row more")
    categories: Annotated[Count, Field(ge=2)] = Field(50, description="categories of items")
    users: Count = Field(10_000, description="users, drawn uniformly")
    numbers: Annotated[Count, Field(ge=2)] = Field(4, description="numbers of a row; the first two matter")
    interest: Annotated[Real, Field(ge=0.0, le=1.0)] = Field(0.6, description="share of events in the category that a row is interested in")
    match: Real = Field(2.0, description="log odds added where the candidate is in that category and the row has events")
    base_logit: Real = Field(-1.5, description="log odds of a click before any effect")
    balance: Literal["none", "lpt"] = Field("none", description="lpt: rows of a window are dealt out so that each batch has as many events of a kind")
    window: Count = Field(8, description="global batches whose rows lpt deals out together")
    workers: Natural = Field(1, description="threads that make batches before they are asked for; 0 makes them in the training thread")

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if self.items % self.categories:
            raise ValueError(f"items = {self.items} is no multiple of categories = {self.categories}")
        names = [shape.name for shape in self.sequences]
        if len(set(names)) < len(names):
            raise ValueError(f"two sequences share a name: {', '.join(names)}")
        return self


class FilesOptions(Options):
    """Options of ``files``."""

    path: Path = Field(description="folder with schema.toml: a prepared one, or your own files")
    train: tuple[str, ...] = Field((), description="patterns of the training files in the folder; by default those that data.json lists")
    test: tuple[str, ...] = Field((), description="patterns of the test files in the folder; by default those that data.json lists")
    window: Count = Field(16_384, description="rows that each rank holds to shuffle; memory is about two windows and one row group")
    workers: Natural = Field(1, description="threads that gather batches, beside those that read; 0 does all in the training thread")
    batch_tokens: Natural = Field(0, description="cost of a rank's training batch, in tokens by default; 0: batches have batch_size rows")
    balance: Literal["none", "bbs", "lpt", "cost"] = Field(
        "none",
        description="bbs: sub-batches of 128 rows, heavy with light; lpt: row by row, heaviest first, and even in each history too; "
        "cost: batch_tokens each, of any number of rows",
    )
    cost: tuple[Real, Real, Real] = Field(
        (1.0, 0.0, 0.0), description="a, b, c of a row's cost: a sum L + b sum L^2 + c over the lengths L of its histories"
    )

    @model_validator(mode="after")
    def _together(self) -> "FilesOptions":
        if (self.balance == "cost") != (self.batch_tokens > 0) and self.balance != "none":
            raise ValueError("balance 'cost' needs batch_tokens, the cost of a batch; 'bbs' and 'lpt' have batches of batch_size rows and take none")
        return self
