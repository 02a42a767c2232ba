"""docs/configuration.md lists every key with its default, docs/environment.md every variable, docs/compatibility.md every row."""

import re
from pathlib import Path

import pytest

from gem_core.cli.checks import VARIABLES
from gem_core.cli.native import TRIPLES
from gem_core.config.schema import RunConfig
from gem_core.config.show import as_toml

ROOT = Path(__file__).parents[4]
SOURCES = sorted((ROOT / "packages").glob("*/src/**/*.py"))


def tables() -> str:
    """The part of docs/configuration.md that the schema determines."""
    lines = []
    for name, field in RunConfig.model_fields.items():
        section = type(field.default)
        lines += [f"### `[{name}]`", "", "| key | default | meaning |", "|---|---|---|"]
        defaults = section().model_dump(mode="json")
        for key, item in section.model_fields.items():
            lines.append(f"| `{key}` | `{as_toml(defaults[key])}` | {item.description} |")
        lines.append("")
    return "\n".join(lines)


def test_configuration_is_documented_key_by_key() -> None:
    assert tables() in (ROOT / "docs/configuration.md").read_text(), f"docs/configuration.md should hold:\n\n{tables()}"


def test_planted_wrong_default_is_seen() -> None:
    assert tables().replace("`1024`", "`1025`") not in (ROOT / "docs/configuration.md").read_text()


def read_variables() -> set[str]:
    """Every ``GEM_...`` name in a string of a source file."""
    return {name for path in SOURCES for name in re.findall(r"\"(GEM_[A-Z_]+)\"", path.read_text())}


def test_every_variable_is_documented() -> None:
    document = (ROOT / "docs/environment.md").read_text()
    missing = [name for name in sorted(read_variables() | set(VARIABLES)) if f"`{name}`" not in document]
    assert missing == []


def test_the_scan_sees_variables() -> None:
    assert {"GEM_KERNELS", "GEM_PLUGINS_BLOCK"} <= read_variables()


@pytest.mark.parametrize("triple", TRIPLES)
def test_the_table_of_releases_is_the_doctors(triple) -> None:
    row = rf"^\| {re.escape(triple.torch)} \| {triple.fbgemm} \| {triple.torchrec} \| {re.escape(triple.triton)} \| {'yes' if triple.tried else 'no'}"
    assert re.search(row, (ROOT / "docs/compatibility.md").read_text(), flags=re.M)
