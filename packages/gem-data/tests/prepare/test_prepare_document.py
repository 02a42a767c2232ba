"""The definition that docs/data/prepare.md shows is the example's, and the figures that docs/data/ledger.md shows are its."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gem_data.audit import audit
from gem_data.prepare import prepare

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.skipif(not (ROOT / "examples" / "prepare").exists(), reason="the repository's examples are not beside the package")


def test_the_document_shows_the_definition_of_the_example() -> None:
    (shown,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs/data/prepare.md").read_text(), flags=re.M | re.S)
    assert shown == (ROOT / "examples/prepare/definition.toml").read_text()


def test_the_example_gives_the_account_that_the_document_shows(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "examples/prepare/make_shop.py"), str(tmp_path / "shop")], check=True)
    data = prepare(tmp_path / "shop/definition.toml", tmp_path / "out")
    assert audit(tmp_path / "out") == data
    shown = (ROOT / "docs/data/ledger.md").read_text()
    for ledger in (data["ledger"], data["users"], *data["events"].values()):
        assert re.search(rf"\b{ledger['read']:,}\b", shown)
        for part, count in ledger.items():
            assert part == "read" or re.search(rf" {part} +{count:,}$", shown, flags=re.M), part
    assert data["leakage"]["clicks"] > 0
    assert data["leakage"]["buys"] > 0
    assert 0 < data["calibration"]["kept"] < data["calibration"]["negatives"]
