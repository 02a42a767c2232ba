"""The real parts of core together: the generated source, the three models, torch tables. No sibling is loaded."""

import json
from pathlib import Path
from typing import Any

import gem_train_fakes
import pytest
import torch
from gem_train_ranks import run_ranks

from gem_core.config.load import LoadedConfig, load_config
from gem_core.train import loop
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.log import read_log
from gem_core.train.run import evaluate_run, train
from gem_core.train.step import train_step

FEATURES = "features = {embedding_dim = 8}"
MODELS = {
    "gem": f"dim = 8, layers = 1, tokens = 4, x_sum = 2, sequence = {{dim = 8, heads = 2, seeds = 2, queries = 1}}, {FEATURES}",
    "hstu": f"dim = 8, heads = 2, layers = 1, {FEATURES}",
    "dlrm": f"dim = 8, {FEATURES}",
}
SETTINGS = """
[run]
device = "cpu"
[data]
source = "toy"
batch_size = 64
options = {{rows = 200}}
[model]
name = "{name}"
options = {{{options}}}
[train]
epochs = 2
log_every = 1
"""

CURVE = 1e-4
"""Largest relative difference of the loss curves of one and two processes: sums of float32 in another order, through the whole model."""


@pytest.fixture(autouse=True)
def core_alone(plugins: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


def written(tmp_path: Path, name: str = "gem") -> Path:
    file = tmp_path / f"{name}.toml"
    file.write_text(SETTINGS.format(name=name, options=MODELS[name]))
    return file


def configured(tmp_path: Path, out: str, *overrides: str, name: str = "gem") -> LoadedConfig:
    return load_config(written(tmp_path, name), [f'run.out="{tmp_path / out}"', *overrides])


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_core_trains_and_learns(tmp_path: Path, name: str) -> None:
    summary = train(configured(tmp_path, "run", "train.epochs=4", "optim.lr=0.01", name=name))
    curve = losses(tmp_path / "run")
    assert sum(curve[-4:]) < sum(curve[:4])
    assert summary["test"].keys() == {"ctr", "cvr"}
    assert summary["test"]["ctr"]["rows"] == 50
    assert summary["test"]["ctr"]["group_auc"]["groups_used"] > 0
    assert summary["mfu"] > 0
    assert set(summary["kernels"].values()) <= {"reference"}
    assert evaluate_run(tmp_path / "run")["test"] == summary["test"]


def test_the_manifest_names_the_rule_of_every_kernel(tmp_path: Path) -> None:
    train(configured(tmp_path, "run", "train.max_steps=1", 'kernels.use={gdpa="reference"}'))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    rules = {row["op"]: row["rule"] for row in manifest["kernels"]}
    assert rules["gdpa"] == "kernels.use"
    assert rules["jagged_attention"].startswith("prefer")
    assert all(row["request"]["dtype"] == "fp32" for row in manifest["kernels"])


def test_bf16_trains_and_asks_for_bf16_kernels(tmp_path: Path) -> None:
    summary = train(configured(tmp_path, "run", "precision.recipe=bf16", "train.epochs=1"))
    plain = train(configured(tmp_path, "plain", "train.epochs=1"))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert {row["request"]["dtype"] for row in manifest["kernels"]} == {"bf16"}
    assert summary["peak"]["dtype"] == "bf16"
    assert summary["test"]["ctr"]["ne"] == pytest.approx(plain["test"]["ctr"]["ne"], rel=0.02)


def test_a_killed_run_of_the_real_model_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ("train.checkpoint_every=2", "model.options.dropout=0.2")
    straight = train(configured(tmp_path, "straight", *settings))

    def deadly(*args: Any, step: int, **keywords: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return train_step(*args, step=step, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", deadly)
        with pytest.raises(KeyboardInterrupt):
            train(configured(tmp_path, "killed", *settings))
    resumed = train(configured(tmp_path, "killed", *settings), resume=tmp_path / "killed")
    assert resumed["test"] == straight["test"]
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight")
    one, two = (find_checkpoint(tmp_path / name).read() for name in ("killed", "straight"))
    assert all(torch.equal(t, two["dense"]["model"][name]) for name, t in one["dense"]["model"].items())
    assert all(torch.equal(t, two["tables"][table][key]) for table, state in one["tables"].items() for key, t in state.items())


def test_two_processes_follow_the_loss_curve_of_one(tmp_path: Path) -> None:
    """The last batch of an epoch has 8 rows; ``pad`` and ``stop`` are the same here, as both ranks have as many batches."""
    file = written(tmp_path)
    one = run_ranks(1, tmp_path, f"train -c {file} --out {tmp_path}/one")
    two = run_ranks(2, tmp_path, f"train -c {file} --out {tmp_path}/two --set parallel.strategies=['fake-ddp']")
    assert one.codes + two.codes == [0, 0, 0], one.err + two.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=CURVE)
    first, second = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert second["test"]["ctr"]["auc"] == pytest.approx(first["test"]["ctr"]["auc"], abs=0.01)
    assert second["train_flops"] == first["train_flops"]
    assert second["rows"] == first["rows"] == 400


def test_planted_fault_a_rank_that_averages_its_own_rows_goes_red() -> None:
    """Twin of the curve above: a loss over a rank's own rows instead of all rows is another curve on an uneven last batch."""
    batch = gem_train_fakes.FakeSource().batch(torch.arange(10))
    parts = [gem_train_fakes.FakeSource().batch(torch.arange(a, b)) for a, b in ((0, 3), (3, 10))]
    means = [float((b.labels["ctr"] * b.weights["ctr"]).sum() / b.weights["ctr"].sum()) for b in (batch, *parts)]
    assert abs(means[0] - (means[1] + means[2]) / 2) > CURVE


def test_the_shipped_toy_recipe_composes(tmp_path: Path) -> None:
    from gem_core.train.compose import compose

    run = compose(load_config("toy", [f'run.out="{tmp_path / "toy"}"', "run.device=cpu"]))
    run.close()
    assert run.total_steps > 0
    assert set(run.kernels) == {"add_norm", "gdpa", "jagged_attention", "norm_linear", "pooled_attention"}
