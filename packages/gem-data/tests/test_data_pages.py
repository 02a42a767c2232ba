"""What the pages on schema, formats and ids show is so."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gem_data.schema import declare
from gem_data.schema.files import KINDS, parse_schema

PAGES = Path(__file__).parents[3] / "docs" / "data"

pytestmark = pytest.mark.skipif(not PAGES.exists(), reason="docs/data is not beside the package")


def blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", (PAGES / page).read_text(), flags=re.M | re.S)


def test_the_schema_page_shows_every_key_and_is_a_schema() -> None:
    (text,) = blocks("schema.md", "toml")
    content = tomllib.loads(text)
    parse_schema(content)
    shown: dict[str, set[str]] = {kind: {key for entry in content[kind] for key in entry} for kind in KINDS}
    for kind, model in KINDS.items():
        inherited = set(declare.Id.model_fields) if kind == "multi_id" else set()
        assert set(model.model_fields) - shown[kind] <= inherited | ({"column"} if kind in ("number", "embedding") else set()), kind
    assert set(declare.Schema.model_fields) == set(content)


def test_the_ids_page_shows_what_encoders_do() -> None:
    (code,) = blocks("ids.md", "python")
    scope: dict[str, Any] = {}
    exec(compile(code, "ids.md", "exec"), scope)
    assert scope["city"].unknown == 1
