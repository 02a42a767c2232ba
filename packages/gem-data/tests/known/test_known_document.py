"""docs/data/known.md names every known data set, its tables and its choices."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from gem_data.known.registry import KNOWN

DOCUMENT = Path(__file__).parents[4] / "docs" / "data" / "known.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="docs/data/known.md is not beside the package")


def rows() -> dict[str, tuple[str, str]]:
    """``{name: (tables, text)}`` of the table of data sets; ``-2018`` continues the name before it."""
    out: dict[str, tuple[str, str]] = {}
    for names, tables, text in re.findall(r"^\| (`[a-z].*?) \| ([a-z_, ]+) \| (.*) \|$", DOCUMENT.read_text(), flags=re.M):
        first = ""
        for name in re.findall(r"`(.*?)`", names):
            first = f"{first.rsplit('-', 1)[0]}{name}" if name.startswith("-") else name
            out[first] = (tables, text)
    return out


@pytest.mark.parametrize("name", list(KNOWN))
def test_the_document_describes_the_data_set(name: str, sample: Callable[[str], Path]) -> None:
    tables, text = rows()[name]
    found = list(KNOWN[name].tables(sample(name)))
    assert sorted(tables.split(", ")) == sorted([*found, *(["users"] if name == "recbole" else [])])  # the sample has no users
    assert all(choice in text for choice in KNOWN[name].choices)


def test_the_document_describes_no_other() -> None:
    assert sorted(rows()) == sorted(KNOWN)
