"""What a column probably is, by its name and the values of the first rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gem_data.ids.values import is_text


def _words(whole: str) -> re.Pattern[str]:
    return re.compile(rf"^({'|'.join(whole.split())})$", re.I)


def _last_word(words: str) -> re.Pattern[str]:
    """A name whose last word is one of these, a number at its end left aside."""
    return re.compile(rf"(^|[_.])({'|'.join(words.split())})[_.]?[0-9]*$", re.I)


TIME = _last_word("time timestamp time_stamp ts times time_ms datetime date hour")
USER = _words("user uid user_?id member_?id visitor_?id")
REQUEST = _words("request request_?id search_?id session session_?id query_?id")
ROW = _words("id index row row_?id sample_?id")
LABEL = _words("label target y (is_)?(click|clicked|clk|like|follow|comment|forward|hate|purchase|conversion|buy|finish) long_view")
IDENTITY = _last_word("[a-z]*id ids code category categorical cate brand type tag domain model campaign item movie video author")
AMOUNT = _last_word("count cnt num number numerical price age length duration score rating ctr rate ratio amount i")
INNER = {"^": 0.2, "|": 0.2, ";": 0.5, ",": 0.5, " ": 0.8}
"""Signs between the values of a text, and the share of texts with one from which on they are taken for lists."""
UNITS = {"seconds": (3e8, 4e9), "milliseconds": (3e11, 4e12), "microseconds": (3e14, 4e15)}


@dataclass(frozen=True)
class Verdict:
    """``kind`` is a part of a schema, or ``left out``; ``group`` names the sequence of a list column."""

    kind: str
    why: str
    group: str = ""


class Column:
    """A column's first rows ``[rows]`` of any Arrow type."""

    def __init__(self, name: str, values: pa.Array) -> None:
        self.name, self.type = name, values.type
        self.listed = bool(pa.types.is_list(values.type) or pa.types.is_large_list(values.type) or pa.types.is_fixed_size_list(values.type))
        self.array = values
        self.values = (values.flatten() if self.listed else values).drop_null()
        if pa.types.is_float16(self.values.type):  # older versions of pyarrow compute nothing with these
            self.values = pa.array(self.values.to_numpy(zero_copy_only=False).astype(np.float32))
        self.inner: pa.DataType = self.values.type
        self.fractional = bool(pa.types.is_floating(self.inner) or pa.types.is_decimal(self.inner))
        self.textual = is_text(self.inner)
        self.timed = bool(pa.types.is_timestamp(self.inner) or pa.types.is_date(self.inner))
        self.integral = bool(pa.types.is_integer(self.inner) or pa.types.is_boolean(self.inner))

    @property
    def usable(self) -> bool:
        """Whether a schema has a place for such values."""
        return self.fractional or self.textual or self.timed or self.integral or bool(pa.types.is_null(self.inner))

    @cached_property
    def distinct(self) -> int:
        return len(self.values.unique())

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Of the lists, 0 for a missing one."""
        return np.asarray(pc.fill_null(pc.list_value_length(self.array), 0).to_numpy(zero_copy_only=False)).astype(np.int64)

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if self.lengths.size else 0

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """The values as floats; empty if they are no numbers."""
        if not (pa.types.is_integer(self.inner) or self.fractional):
            return np.zeros(0)
        return np.asarray(self.values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def judge(columns: Mapping[str, Column]) -> dict[str, Verdict]:
    """A verdict for every column."""
    groups = _groups({name: column for name, column in columns.items() if column.listed and column.usable})
    out: dict[str, Verdict] = {}
    for name, column in columns.items():
        if not column.usable:
            out[name] = Verdict("left out", f"no feature is made of {column.type}")
            continue
        out[name] = groups.get(name) or (_list(column) if column.listed else _single(column))
    for role in ("user", "request", "time"):  # a schema has one of each
        for name in [name for name, verdict in out.items() if verdict.kind == role][1:]:
            out[name] = Verdict("left out", f"another column is the {role} already")
    labels = [name for name, verdict in out.items() if verdict.kind == "label"]
    first = next(iter(columns), None)
    if not labels and first is not None and _binary(columns[first]) and out[first].kind in ("id", "number"):
        out[first] = Verdict("label", "0 and 1 only, in the first column")
    return out


def _groups(columns: Mapping[str, Column]) -> dict[str, Verdict]:
    """List columns that are as long as each other in every row are sides of one history."""
    alike: dict[bytes, list[str]] = {}
    for name, column in columns.items():
        if np.unique(column.lengths).size > 1:
            alike.setdefault(column.lengths.tobytes(), []).append(name)
    out: dict[str, Verdict] = {}
    for names in alike.values():
        if len(names) > 1:
            group = _common(names)
            out |= {name: Verdict("sequence", f"as long in every row as {', '.join(n for n in names if n != name)}", group) for name in names}
    return out


def _common(names: list[str]) -> str:
    """The part that the names share, without the sign that ends it."""
    shared = names[0]
    for name in names[1:]:
        while not name.startswith(shared):
            shared = shared[:-1]
    return shared.rstrip("._-") or "history"


def list_name(group: str, column: str) -> str:
    """The side of a history that a column is: its name without the group's."""
    return column.removeprefix(group).lstrip("._-") or column


def _list(column: Column) -> Verdict:
    if not len(column.values):
        return Verdict("left out", "no list holds a value")
    if column.timed:
        return Verdict("left out", "lists of times, beside no other list of the same lengths")
    if not column.fractional:
        return Verdict("multi_id", f"lists of up to {column.longest} {column.inner}")
    if np.unique(column.lengths).size == 1:
        return Verdict("embedding", f"{column.longest} floats in every row")
    return Verdict("left out", "lists of floats of different lengths, beside no other list of the same lengths")


def _single(column: Column) -> Verdict:
    name = column.name
    if not column.distinct:
        return Verdict("left out", "no value")
    if reason := times_of(column):
        return Verdict("time", reason)
    if column.distinct == 1:
        return Verdict("left out", "one value only")
    if USER.search(name):
        return Verdict("user", "its name")
    if REQUEST.search(name):
        return Verdict("request", "its name")
    if LABEL.search(name) and _binary(column):
        return Verdict("label", "its name, and 0 and 1 only")
    if _binary(column):
        return Verdict("id", "two values; declare it as a task if it is a label")
    return _text(column) if column.textual else _number(column)


def _binary(column: Column) -> bool:
    if pa.types.is_boolean(column.inner):
        return True
    return bool(column.numbers.size) and set(np.unique(column.numbers)) == {0.0, 1.0}


def times_of(column: Column) -> str:
    """Why the column is a time, with its unit; empty if it is none."""
    if column.timed:
        return f"its type, {column.inner}"
    numbers = column.numbers
    if column.fractional and not TIME.search(column.name):
        return ""
    middle = float(np.median(numbers)) if numbers.size else 0.0
    for unit, (low, high) in UNITS.items():
        if low <= middle <= high and (TIME.search(column.name) or (numbers.min() > low and numbers.max() < high and column.distinct > 20)):
            return f"its values are {unit} since 1970"
    if TIME.search(column.name):
        if column.textual:
            return f"its name; values such as {column.values[0].as_py()!r}"
        if numbers.size and middle > 1e5:
            return f"its name; values such as {column.values[0].as_py()}"
    return ""


def _text(column: Column) -> Verdict:
    if column.distinct == len(column.array) > 20:
        return Verdict("left out", "every row has another text")
    for separator, share in INNER.items():
        if pc.mean(pc.greater(pc.count_substring(column.values, separator), 0)).as_py() >= share:
            return Verdict("left out", f"lists joined by {separator!r}? convert with --list '{column.name}={separator}'")
    return Verdict("id", f"{column.distinct} different texts")


def _number(column: Column) -> Verdict:
    if column.fractional:
        return Verdict("number", "floats")
    if column.distinct == len(column.array) > 20 and ROW.search(column.name):
        return Verdict("left out", "its name, and every row has another value")
    if column.type == pa.uint64():
        return Verdict("id", "integers beyond 2^63")
    if IDENTITY.search(column.name):
        return Verdict("id", f"its name; {column.distinct} different integers")
    numbers = column.numbers
    if AMOUNT.search(column.name):
        return Verdict("number", "its name")
    if numbers.min() < -1:
        return Verdict("number", f"integers down to {int(numbers.min())}")
    if numbers.max() > 20 * max(float(np.median(numbers)), 1.0):
        return Verdict("number", "integers, most of them far below the largest, as counts are")
    return Verdict("id", f"{column.distinct} different integers")
