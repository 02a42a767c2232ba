"""What the first lines of a text file tell: its encoding, its separator and whether a line holds the names of the columns."""

import codecs
import csv
import re
from collections import Counter
from dataclasses import dataclass

from gem_core.spec import RequestError
from gem_data.formats.files import Location, open_bytes

SEPARATORS = ("\t", "::", ",", ";", "|", "\x01", "^", " ")
SAMPLE_BYTES = 1 << 18
SAMPLE_LINES = 200


@dataclass(frozen=True)
class Dialect:
    """``columns`` are names where no line holds them, else None; ``why`` gives the reasons."""

    encoding: str
    separator: str
    columns: tuple[str, ...] | None
    why: tuple[str, ...]


def sniff(place: Location, *, encoding: str | None = None, separator: str | None = None, columns: tuple[str, ...] | None = None) -> Dialect:
    """The dialect of a text file; what is given is taken.

    Raises:
        RequestError: the file is empty.
    """
    with open_bytes(place) as file:
        raw = bytes(file.read(SAMPLE_BYTES))
    encoding, why = (encoding, "encoding given") if encoding else _encoding(raw)
    text = raw.decode(encoding, "replace").removeprefix("\ufeff")
    whole = text.rfind("\n") + 1 or len(text)
    lines = [line for line in text[:whole].splitlines() if line.strip()][:SAMPLE_LINES]
    if not lines:
        raise RequestError(place.asked, "it is empty", "Give a file with rows.")
    separator, reason = (separator, "separator given") if separator else _separator(lines)
    if columns is None:
        columns, named = _header([_fields(line, separator) for line in lines])
        return Dialect(encoding, separator, columns, (why, reason, named))
    return Dialect(encoding, separator, columns, (why, reason, "names given"))


def _encoding(raw: bytes) -> tuple[str, str]:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16", "the first bytes are the mark of UTF-16"
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if error.start < len(raw) - 3:  # else the sample ends inside a character
            return "latin-1", f"byte {raw[error.start]:#04x} at offset {error.start} is not UTF-8: read as latin-1"
    return "utf-8", "the first bytes are UTF-8"


def _fields(line: str, separator: str) -> list[str]:
    if len(separator) == 1:
        return next(csv.reader([line], delimiter=separator), [])
    return line.split(separator)


def _separator(lines: list[str]) -> tuple[str, str]:
    """The one that most lines hold equally often, of several the one that gives the most columns."""
    best = (0.0, 0, ",")
    for candidate in SEPARATORS:
        columns, count = Counter(len(_fields(line, candidate)) for line in lines).most_common(1)[0]
        agreed = count / len(lines)
        if columns > 1 and (round(agreed, 1), columns) > best[:2]:
            best = (round(agreed, 1), columns, candidate)
    agreed, columns, separator = best
    if not columns:
        return ",", "no separator is held by most lines: one column"
    return separator, f"{separator!r} gives {columns} columns in {agreed:.0%} of the first {len(lines)} lines"


def _numeric(text: str) -> bool:
    return re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", text.strip(), re.I) is not None


def _header(rows: list[list[str]]) -> tuple[tuple[str, ...] | None, str]:
    first, rest = rows[0], rows[1:]
    for k, name in enumerate(first):
        below = [row[k] for row in rest if len(row) > k and row[k].strip()]
        if name and below and not _numeric(name) and all(map(_numeric, below)):
            return None, f"the first line holds names: {name!r} stands above numbers"
    numeric = [name for name in first if _numeric(name)]
    repeated = [name for k, name in enumerate(first) if any(len(row) > k and row[k] == name for row in rest)]
    if numeric or repeated or len(set(first)) < len(first) or "" in first:
        reason = f"{(numeric or repeated or first)[0]!r} in the first line is a value, no name"
        return tuple(f"column_{k}" for k in range(1, len(first) + 1)), f"{reason}: columns are numbered"
    return None, "the first line holds names, as no text of it occurs below"
