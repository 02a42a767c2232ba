"""Which rows are held out: the kinds of split, and the SQL condition that a row is a test row."""

import warnings
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction as Ratio
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(strict=True, gt=0, lt=1)]


class SplitOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TimeSplit(SplitOptions):
    """Test rows are those from one moment on.

    Args:
        test_from: that moment, in seconds; or else
        test_fraction: share of rows: the moment is the time of row ``ceil((1 - test_fraction) n)`` in the order of time, counted from 0;
            rows of that very second are all test rows.
            rows of that very second are all test rows.
    """

    kind: Literal["time"]
    test_from: Annotated[int, Field(strict=True)] | None = None
    test_fraction: Fraction | None = None

    @model_validator(mode="after")
    def _one(self) -> "TimeSplit":
        if (self.test_from is None) == (self.test_fraction is None):
            raise ValueError("give either test_from or test_fraction")
        return self


class UserFractionSplit(SplitOptions):
    """Of a user's ``n`` rows in the order of (time, row), those at position ``ceil(train_fraction n)`` and later are test rows."""

    kind: Literal["user_fraction"]
    train_fraction: Fraction


class LeaveLastSplit(SplitOptions):
    """The last ``last`` rows of each user are test rows; a user with no more rows than that has no training row."""

    kind: Literal["leave_last"]
    last: Annotated[int, Field(strict=True, ge=1)] = 1


class HashSplit(SplitOptions):
    """Whole requests (or users) are test rows, drawn by a stable hash of their id."""

    kind: Literal["hash"]
    by: Literal["request", "user"] = "request"
    test_fraction: Fraction
    seed: Annotated[int, Field(strict=True, ge=0)] = 0


Split = Annotated[TimeSplit | UserFractionSplit | LeaveLastSplit | HashSplit, Field(discriminator="kind")]


def ratio(value: float) -> Ratio:
    """The fraction as it was written: 0.1 is 1/10, which no float is."""
    return Ratio(Decimal(repr(value)))


def hash_below(text: str, share: float) -> str:
    """SQL: the MD5 of ``text`` (a SQL expression), as a number in [0, 1), lies below ``share``. MD5 is the one hash that every engine has."""
    below = ratio(share)
    threshold = below.numerator * 16**15 // below.denominator
    return f"substr(md5({text}), 1, 15) < '{threshold:015x}'"


def test_condition(split: Split) -> str:
    """SQL over columns ``gem_user, gem_request, gem_time, gem_order, gem_row`` and the counted ``gem_position`` (from 0) and ``gem_user_rows``.

    ``TimeSplit.test_fraction`` must have been turned into ``test_from``.
    """
    match split:
        case TimeSplit(test_from=at):
            return f"gem_time >= {at}"
        case UserFractionSplit(train_fraction=fraction):
            f = ratio(fraction)  # p >= ceil(f n) and p >= f n say the same of whole p
            return f"gem_position * {f.denominator} >= gem_user_rows * {f.numerator}"
        case LeaveLastSplit(last=last):
            return f"gem_position >= gem_user_rows - {last}"
        case HashSplit(by=by, test_fraction=share, seed=seed):
            # Engines differ on joining a text with nothing; a row without a request is drawn by itself.
            key = f"COALESCE(CAST(gem_{by} AS STRING), concat('row ', CAST(gem_row AS STRING)))"
            return hash_below(f"concat('{seed}:', {key})", share)


class SplitWarning(UserWarning):
    """Figures on a split mean little."""


class OneClassSplit(SplitWarning):
    """A split has labels of one class only, so that AUC and NE are undefined on it."""


class ColdSplit(SplitWarning):
    """More than half of the test rows have a user, or an id, that no training row has."""


def warn_about(data: Mapping[str, Any]) -> None:
    """Warn of splits on which figures mean little, from the content of ``data.json``."""
    for split, tasks in data["labels"].items():
        for task, counts in tasks.items():
            if counts["positive"] in (0, counts["observed"]):
                held = f"{counts['positive']} positives in {counts['observed']} labels of {task!r}"
                warnings.warn(f"the {split} split has {held}; AUC and NE are undefined on it", OneClassSplit, stacklevel=3)
    rows = data["ledger"]["test"]
    for what, cold in data["cold"].items():
        if 2 * cold > rows:
            held = "a user" if what == "_user" else f"an id of {what!r}"
            text = f"{cold} of {rows} test rows have {held} that no training row has; the test measures cold starts"
            warnings.warn(text, ColdSplit, stacklevel=3)
