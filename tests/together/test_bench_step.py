"""The recipes of ``gem bench step`` with all five packages: every rung composes at full size, and a shrunk one trains."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_core.bench.ladder import RUNGS, climb
from gem_core.config.load import load_config, recipes
from gem_core.train.compose import preview

Gem = Callable[..., Any]
NAMES = sorted(name for name in recipes() if "-h200" in name)
SMALL = {
    "gem": (
        *("model.options.dim=16", "model.options.layers=1", "model.options.x_sum=2", "model.options.tokens=4"),
        *("model.options.sequence.dim=16", "model.options.sequence.heads=2", 'model.options.experts=[{kind="wukong", rank=2, hidden=[8]}]'),
        'data.options.sequences=[{name="views", longest=20}, {name="clicks", longest=9}, {name="buys", longest=5}]',
    ),
    "hstu": (
        *("model.options.dim=16", "model.options.heads=2", "model.options.layers=2"),
        'data.options.sequences=[{name="history", lengths="zipf", longest=30}]',
    ),
}
"""What makes a recipe of a family small enough for a CPU; the rest of it stays."""
DATA = ("data.batch_size=16", "data.options.rows=64", "data.options.items=500", "data.options.users=50", "model.options.features.embedding_dim=8")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen as on a GPU where their interpreter can run them; nothing is computed here."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_the_recipes_are_those_of_the_documents() -> None:
    assert NAMES == ["gem-h200-1024", "gem-h200-512", "hstu-h200", "hstu-h200-512", "hstu-h200-fixed"]


@pytest.mark.parametrize("name", NAMES)
def test_every_rung_of_a_recipe_composes_at_full_size(interpreted: None, name: str, tmp_path: Path) -> None:
    placed = list(climb(name, ["run.device=cpu", f"run.out={str(tmp_path / 'run')!r}"]))
    assert [p.rung for p in placed] == list(RUNGS)
    reasons = {p.rung.name: p.reasons for p in placed if p.reasons}
    assert list(reasons) == ["graphed", "fp8"]
    assert reasons["graphed"] == ("the run computes on cpu",)
    assert "its products need the FP8 tensor cores of Hopper (sm90), this is cpu" in reasons["fp8"][0]
    top, low = placed[-3].loaded.config, placed[0].loaded.config
    assert (low.data.options["balance"], low.data.options["workers"], low.train.ahead, low.compile.blocks) == ("none", 0, False, "off")
    assert (top.data.options["balance"], top.data.options["workers"], top.train.ahead, top.compile.blocks) == ("lpt", 2, True, "default")


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_sizes_that_its_comment_says(name: str, tmp_path: Path) -> None:
    run = preview(load_config(name, ["run.device=cpu", f"run.out={str(tmp_path / 'run')!r}"]))
    tables = sum(table.rows * table.dim * 4 for table in run.tables) / 1e9
    parameters = sum(p.numel() for p in run.model.parameters()) / 1e9
    wanted = {
        "gem-h200-1024": (11.3, 0.72),
        "gem-h200-512": (11.3, 0.22),
        "hstu-h200": (3.1, 0.064),
        "hstu-h200-fixed": (3.1, 0.064),
        "hstu-h200-512": (3.1, 0.016),
    }
    assert (tables, parameters) == pytest.approx(wanted[name], rel=0.05)
    assert getattr(run.model, "longest", 0) == {"hstu-h200": 4099, "hstu-h200-fixed": 4099, "hstu-h200-512": 1400}.get(name, 0)
    first = next(run.source.batches("train", batch_size=run.config.data.batch_size, seed=1))
    events = sum(int(span.offsets[-1]) for span in first.event_offsets.values())
    about = {"hstu-h200": 161e3, "hstu-h200-fixed": 131e3}.get(name, 717e3)
    assert events == pytest.approx(about, rel=0.1)


@pytest.mark.parametrize(("name", "wanted"), [("gem-h200-512", ("padded", "bucketed", "balanced", "overlapped")), ("hstu-h200", ("bucketed",))])
def test_a_small_version_of_a_recipe_is_measured(gem: Gem, name: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    sets = [word for override in (*SMALL[name.partition("-")[0]], *DATA) for word in ("--set", override)]
    rungs = [word for rung in wanted for word in ("--rung", rung)]
    gem("bench", "step", "--recipe", name, *sets, *rungs, "--steps", "2", "--warmup", "1", "--csv", "rows.csv", OMP_NUM_THREADS="1")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["rung"] for row in rows] == list(wanted)
    assert all(float(row["samples_per_s"]) > 0 and row["note"] == "" for row in rows)
    if len(rows) > 1:
        assert rows[2]["ne"] == rows[3]["ne"]  # the same batches, read ahead or not
        assert float(rows[0]["ne"]) == pytest.approx(float(rows[1]["ne"]), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gem-h200-512", "hstu-h200"])
def test_every_rung_of_a_small_version_runs_on_a_gpu(gem: Gem, name: str, tmp_path: Path) -> None:
    """Heads stay 128 wide, so that kernels are those of the full size."""
    family = name.partition("-")[0]
    width = "model.options.sequence" if family == "gem" else "model.options"
    wide = ("model.options.dim=128", f"{width}.dim=128", f"{width}.heads=1", "data.batch_size=64", "data.options.rows=4096")
    sets = [word for override in (*SMALL[family], *DATA, *wide) for word in ("--set", override)]
    gem("bench", "step", "--recipe", name, *sets, "--steps", "4", "--warmup", "2", "--csv", "rows.csv")
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["rung"] for row in rows] == [rung.name for rung in RUNGS]
    assert {row["rung"]: row["note"] for row in rows if row["note"] and row["rung"] not in ("graphed", "fp8")} == {}
    assert "capacities recorded" in next(row["note"] for row in rows if row["rung"] == "graphed")
    assert all(float(row["peak_gib"]) > 0 for row in rows[:-1])
    losses = [float(row["ne"]) for row in rows[:5]]
    assert losses == pytest.approx([losses[0]] * 5, rel=0.02)  # the same batches in 16 bits, by other kernels
