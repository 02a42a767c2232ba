"""Strict validation of options against a pydantic model."""

from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from gem_core.plugins.options import as_keywords, parse
from gem_core.spec import RequestError


class Colour(StrEnum):
    red = "red"


class Inner(BaseModel):
    rows: int = 1


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    depth: int


class Options(BaseModel):
    rows: int = 1
    rate: float = 0.5
    on: bool = False
    names: tuple[str, ...] = ()
    colour: Colour = Colour.red
    folder: Path | None = None
    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    by_name: dict[str, Inner | Open] = {}
    must: str


def test_toml_values_become_what_the_model_says() -> None:
    values = {"must": "m", "rows": 3, "rate": 1, "names": ["a"], "colour": "red", "folder": "x/y", "inner": {"rows": 4}}
    parsed = parse(Options, values, "options")
    assert (parsed.rows, parsed.rate, parsed.names, parsed.colour, parsed.folder, parsed.inner.rows) == (3, 1.0, ("a",), Colour.red, Path("x/y"), 4)


@pytest.mark.parametrize(
    ("values", "path", "hint"),
    [
        ({"rows": True}, "options.rows", "valid integer"),
        ({"rows": 1.5}, "options.rows", "valid integer"),
        ({"rate": False}, "options.rate", "valid number"),
        ({"rate": "1"}, "options.rate", "valid number"),
        ({"on": 1}, "options.on", "valid boolean"),
        ({"names": "a"}, "options.names", "valid"),
        ({"names": [1]}, "options.names.0", "valid string"),
        ({"colour": "rad"}, "options.colour", "'red'"),
        ({"inner": {"rows": True}}, "options.inner.rows", "valid integer"),
        ({"inner": {"rovs": 1}}, "options.inner.rovs", "Did you mean 'rows'"),
        ({"rowz": 1}, "options.rowz", "Did you mean 'rows'"),
        ({"many": [{"rows": 1}, {"rovs": 1}]}, "options.many.1.rovs", "Did you mean 'rows'"),
        ({"many": [{"rows": True}]}, "options.many.0.rows", "valid integer"),
        ({"by_name": {"a": {"rovs": 1}}}, "options.by_name.a.rovs", "Did you mean 'rows'"),
    ],
)
def test_case_F12_what_is_meant_as_something_else_is_refused(values: dict[str, Any], path: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(Options, {"must": "m", **values}, "options")
    assert caught.value.asked == path
    assert hint in caught.value.do


def test_a_missing_value_is_named() -> None:
    with pytest.raises(RequestError, match=r"options\.must: it is missing"):
        parse(Options, {}, "options")


def test_a_model_that_allows_other_keys_keeps_them() -> None:
    assert parse(Open, {"depth": 2, "more": 3}, "options").model_extra == {"more": 3}
    inside = parse(Options, {"must": "m", "by_name": {"a": {"depth": 2, "more": 3}}}, "options")
    assert inside.by_name["a"].model_extra == {"more": 3}


def test_keywords_of_a_function_that_takes_anything() -> None:
    def load(**options: object) -> None: ...

    assert as_keywords("x", load, {"a": 1}, {}) == {"a": 1}


def test_keywords_of_a_model_are_its_fields() -> None:
    def load(*, rows: int) -> None: ...

    assert as_keywords("x", load, Inner(rows=3), {}) == {"rows": 3}
