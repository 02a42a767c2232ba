"""The example of docs/data.md reads a file and makes batches."""

import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

DOCUMENT = Path(__file__).parents[3] / "docs" / "data.md"

pytestmark = pytest.mark.skipif(not DOCUMENT.exists(), reason="docs/data.md is not beside the package")


def example(name: str) -> dict[str, Any]:
    blocks = re.findall(rf"^```python\n# shop/{name}\.py\n(.*?)^```", DOCUMENT.read_text(), flags=re.M | re.S)
    assert len(blocks) == 1
    scope: dict[str, Any] = {}
    exec(compile(blocks[0], name, "exec"), scope)
    return scope


def test_the_example_gives_earlier_clicks_and_counts_every_line(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    lines = [
        "7,a,1.5,10,1",
        "7,b,,20,0",
        "9,a,2,20,1",
        "7,c,3,30,1",
        "7,a,3,30,0",
        ",a,1,5,1",
        "7,b,1,40,0",
        "9,z,1,50,1",
        "7,z,1,60,1",
        "9,a,1,70,0",
        "7,a,1,80,1",
    ]
    path.write_text("user,item,price,time,click\n" + "\n".join(lines) + "\n")
    source = example("source")["load"](str(path), history_length=2)
    assert source.ledger() == {"read": 11, "train": 8, "test": 2, "dropped: a field is missing": 1}
    batch = source.table.batch(torch.arange(10))
    offsets, times = batch.event_offsets["clicks"].offsets.tolist(), batch.event_time["clicks"].tolist()
    histories = [times[a:b] for a, b in pairwise(offsets)]
    assert histories == [[], [10], [], [10], [10], [10, 30], [20], [10, 30], [20, 50], [30, 60]]
    assert batch.ids["item"].values.tolist() == [1, 2, 1, 4, 1, 2, 3, 3, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [b.rows for b in source.batches("train", batch_size=5, seed=1)] == [5, 3]


def test_the_example_plugin_declares_the_source() -> None:
    (declared,) = example("plugin")["gem_data_sources"]()
    assert (declared.name, declared.load) == ("shop", "shop.source:load")


def test_the_checksums_in_the_document_are_those_that_are_verified() -> None:
    from gem_data.fetch import RELEASES

    text = DOCUMENT.read_text()
    for file, digest in RELEASES["ml-100k"].sha256.items():
        assert f"| `{file}` | `{digest}` |" in text
