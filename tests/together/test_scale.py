"""``gem bench scale`` on four ranks: the layout with everything sharded, of the recipe with large tables made small."""

import csv
import json
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # commands are read as those of documents are

from test_documents import ROOT, parsed

from gem_core.config.load import load_config
from gem_core.train.compose import preview

SCRIPT = runpy.run_path(str(ROOT / "packages/gem-parallel/benchmarks/scale.py"))
SHRUNK = {"items": 500, "categories": 50, "rows": 600, "test_rows": 60, "users": 50, "groups": 5, "history_length": 4}
MODEL = ("model.options.layers=1", "model.options.dim=16", "model.options.sequence.dim=16", "precision.recipe=fp32", "data.batch_size=32")
SETS = tuple(word for value in (*(f"data.options.{name}={value}" for name, value in SHRUNK.items()), *MODEL) for word in ("--set", value))
COMMON = ("bench", "scale", "-c", "embedding-heavy", "--device", "cpu", "--machine", "h200", "--steps", "1", "--out", "runs", *SETS)


def test_four_ranks_of_experts_and_fully_sharded_tables(gem: Callable[..., Any], tmp_path: Path) -> None:
    """The run of one rank is kept by the second call, which shows each axis of the layout at work."""
    place = tmp_path / "runs/ranks-4/fsdp-experts-sharded2d"
    one = gem(*COMMON, "--gpus", "1", "--layout", "fsdp-experts-sharded2d", "--json", CUDA_VISIBLE_DEVICES="")
    (base,) = json.loads(one.stdout)
    assert (base["ranks"], base["status"], base["scaling_ratio"]) == (1, "ran", 1.0)
    began = (tmp_path / "runs/ranks-1/fsdp-experts-sharded2d/log.txt").stat().st_mtime_ns
    gem(*COMMON, "--gpus", "2,4", "--layout", "fsdp-experts-sharded2d", "--plot", "scale.svg", CUDA_VISIBLE_DEVICES="")
    assert (tmp_path / "runs/ranks-1/fsdp-experts-sharded2d/log.txt").stat().st_mtime_ns == began
    rows = list(csv.DictReader((tmp_path / "runs/results.csv").open()))
    assert [row["ranks"] for row in rows] == ["1", "2", "4"]
    four = rows[2]
    assert all(float(row["predicted_ms"]) > 0 for row in rows)
    assert 0 < float(four["exposed_ms"]) < float(four["ms"]) * 1.5
    parts = json.loads((place / "result.json").read_text())["figures"]["parts"]
    for name in ("experts: activations", "dense: weights of layers.0.ensemble.experts", "tables: answer", "tables: gradients to owner"):
        assert f"exchange: {name}" in parts
    assert "<svg" in (tmp_path / "scale.svg").read_text()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_script_for_several_ranks_asks_for_what_gem_takes(device: str, tmp_path: Path) -> None:
    asked = SCRIPT["commands"](device, [1, 2, 4], 20, tmp_path)
    scale = [f"scale-{device}-{recipe}-{scaling}" for scaling in ("weak", "strong") for recipe in SCRIPT["RECIPES"]]
    assert list(asked) == [f"comm-{device}-2", f"comm-{device}-4", *scale]
    for words in asked.values():
        parsed(shlex.join(words[words.index("gem_core") + 1 :]))


@pytest.mark.parametrize("recipe", SCRIPT["SMALL"])
def test_the_script_makes_recipes_small_enough_for_cores(recipe: str, tmp_path: Path) -> None:
    run = preview(load_config(recipe, [*SCRIPT["SMALL"][recipe], "run.device=cpu", f"run.out={str(tmp_path / 'run')!r}"]))
    assert sum(p.numel() for p in run.model.parameters()) < 20e6
    assert sum(table.rows * table.dim * 4 for table in run.tables) < 200e6
    assert len(run.config.model.options["experts"]) % 2 == 0, "pairs of ranks share them out"
