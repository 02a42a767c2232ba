"""All five packages in one run: train, evaluate, resume, spread over processes."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

Gem = Callable[..., Any]
FIVE = (
    *("--set", "embedding.engine=torchrec", "--set", "precision.recipe=bf16_islands"),
    *("--set", 'kernels.prefer=["gluon", "triton", "sdpa", "reference"]', "--set", 'parallel.strategies=["ddp"]'),
)
"""The settings that bring each sibling into a run of any recipe."""
SHORT = ("--set", "train.max_steps=12", "--set", "train.log_every=1", "--set", "data.options.rows=8192", "--set", "data.options.test_rows=2048")
LOSS_BOUND = 2e-5
"""Two processes sum the same losses and gradients in another order: relative difference of each logged loss in float32."""


def read_summary(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


def read_losses(run: Path) -> list[float]:
    """The training losses of a run's log, one a logging step."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def test_five_packages_compose_one_run(gem: Gem, tmp_path: Path) -> None:
    gem("train", "-c", "synthetic", "--out", "run", *FIVE, *SHORT)
    summary = read_summary(tmp_path / "run")
    assert {"test", "train_seconds", "eval_seconds", "rows", "samples_per_second", "mfu", "kernels", "seed", "baseline"} <= set(summary)
    assert summary["kernels"]["pooled_attention"] == "sdpa"
    figures = summary["test"]["ctr"]
    assert {"auc", "ne", "calibration", "rows"} <= set(figures)
    assert figures["rows"] == 2048
    assert summary["baseline"]["bayes"]["ne"] < figures["ne"] < 1.2
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert {"gem-core", "gem-kernels", "gem-parallel", "gem-precision", "gem-data"} <= set(json.dumps(manifest).replace('"', " ").split())
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_case_J06_evaluation_of_a_finished_run_gives_the_same_figures(gem: Gem, tmp_path: Path) -> None:
    gem("train", "-c", "synthetic", "--out", "run", *FIVE, *SHORT)
    again = json.loads(gem("eval", "run", "--json").stdout)
    trained = read_summary(tmp_path / "run")["test"]["ctr"]
    assert again["test"]["ctr"]["auc"] == pytest.approx(trained["auc"], abs=1e-12)
    assert again["test"]["ctr"]["ne"] == pytest.approx(trained["ne"], abs=1e-9)


def test_two_processes_follow_the_loss_curve_of_one(gem: Gem, torchrun: Gem, tmp_path: Path) -> None:
    words = ("train", "-c", "synthetic", *FIVE, *SHORT)
    gem(*words, "--out", "one")
    torchrun(2, *words, "--out", "two")
    one, two = read_losses(tmp_path / "one"), read_losses(tmp_path / "two")
    assert len(one) == len(two) == 12
    assert two == pytest.approx(one, rel=LOSS_BOUND)
    assert one != read_losses_of_other_seed(gem, tmp_path)


def read_losses_of_other_seed(gem: Gem, tmp_path: Path) -> list[float]:
    """The bound above means something: another seed lies outside it."""
    gem("train", "-c", "synthetic", *FIVE, *SHORT, "--seed", "7", "--out", "other")
    return read_losses(tmp_path / "other")


def test_resumed_run_is_bit_equal_to_a_straight_one(gem: Gem, tmp_path: Path) -> None:
    words = ("train", "-c", "synthetic", *FIVE, *SHORT, "--set", "train.checkpoint_every=4", "--set", "train.keep_checkpoints=9")
    gem(*words, "--out", "straight")
    gem(*words, "--out", "broken", "--set", "train.max_steps=8")
    gem("train", "-c", "synthetic", *FIVE, *SHORT, "--resume", "broken")
    assert read_losses(tmp_path / "broken")[-4:] == read_losses(tmp_path / "straight")[-4:]
    assert read_summary(tmp_path / "broken")["test"] == read_summary(tmp_path / "straight")["test"]


def test_a_checkpoint_of_one_engine_evaluates_on_the_other(gem: Gem, tmp_path: Path) -> None:
    gem("train", "-c", "synthetic", "--out", "run", *FIVE, *SHORT)
    torchrec = json.loads(gem("eval", "run", "--json").stdout)["test"]["ctr"]
    torch_engine = json.loads(gem("eval", "run", "--json", "--set", "embedding.engine=torch").stdout)["test"]["ctr"]
    assert torch_engine["ne"] == pytest.approx(torchrec["ne"], rel=1e-6)


def test_the_model_comes_within_one_percent_of_the_known_optimum(gem: Gem, tmp_path: Path) -> None:
    gem("train", "-c", "synthetic", "--out", "run")
    summary = read_summary(tmp_path / "run")
    best, reached = summary["baseline"]["bayes"], summary["test"]["ctr"]
    assert reached["ne"] <= 1.01 * best["ne"]
    assert reached["ne"] > 0.99 * best["ne"], "better than the optimum: labels leak"
    assert best["ne"] < 0.9, "there is little to learn"


def test_both_engines_start_from_the_same_weights() -> None:
    from gem_core.builtin.embedding import TorchEmbeddings
    from gem_core.spec import SparseOptimizer, TableSpec
    from gem_parallel.sparse.engine import TorchRecEmbeddings

    tables = [TableSpec(name="item", rows=50, dim=8, features=("item",), init_scale=0.1)]
    ours = TorchEmbeddings(tables, SparseOptimizer(), device="cpu", seed=3).export_tables()
    theirs = TorchRecEmbeddings(tables, SparseOptimizer(), device="cpu", seed=3).export_tables()
    assert torch.equal(ours["item"]["weight"], theirs["item"]["weight"])
    assert ours["item"]["weight"].std() > 0.01


@pytest.mark.parametrize("recipe", sorted(path.name[:-5] for path in resources.files("gem_core.recipes").iterdir() if path.name.endswith(".toml")))
def test_each_recipe_is_valid(gem: Gem, recipe: str) -> None:
    needed = ("--set", "data.options.path=.") if recipe == "criteo" else ()
    shown = json.loads(gem("config", "show", "-c", recipe, "--json", *needed).stdout)
    assert shown, recipe
