"""``gem train`` and ``gem eval`` as a person types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gem_core.cli.main import run as gem
from gem_core.cli.train import closing, configuration, metric_rows
from gem_core.spec import RequestError
from gem_core.train.metrics import task_metrics


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


def test_train_then_eval_then_resume(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    assert gem(["train", "-c", recipe, "--set", "train.epochs=1", "--seed", "4", "--out", str(out)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["TASK", "MODEL", "AUC", "NE", "CALIBRATION", "ROWS"]
    assert table[1].split()[:3] == ["ctr", "this", "run"]
    assert table[2].split() == ["constant", "0.5000", "1.0000", "-"]
    assert table[-1] == f"report: {out / 'report.html'}"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["seed"], summary["steps"]) == (4, 6)

    assert gem(["eval", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"] == summary["test"]
    assert gem(["eval", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[1] == table[1]

    scored = tmp_path / "scored"
    assert gem(["eval", str(out), "--predictions", str(scored)]) == 0
    with np.load(scored) as rows:
        for task, metrics in summary["test"].items():
            logit, label, weight = (torch.from_numpy(rows[f"{task}/{name}"]) for name in ("logit", "label", "weight"))
            assert task_metrics(logit, label, weights=weight).ne == pytest.approx(metrics["ne"], rel=1e-12)
            assert int((weight > 0).sum()) == metrics["rows"]

    assert gem(["train", "--resume", str(out), "--set", "train.epochs=2"]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 12


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["train"], 2, "no configuration is named"),
        (["train", "-c", "no-such-recipe"], 2, "neither a file nor a recipe"),
        (["train", "-c", "RECIPE", "--set", "optim.lrr=1"], 2, "Did you mean 'lr'"),
        (["train", "-c", "RECIPE", "--set", "data.options.bad_label=3"], 2, "gem: label 'ctr'\n  it holds 2.0"),
        (["train", "-c", "RECIPE", "--set", "data.options.nan_row=3"], 1, "dense feature 'x'"),
        (["train", "-c", "RECIPE", "--resume", "nowhere"], 2, "no manifest.json of a run"),
        (["eval", "nowhere"], 2, "no manifest.json of a run"),
    ],
)
def test_exit_codes(recipe: str, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gem([recipe if word == "RECIPE" else word for word in words]) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_a_missing_gpu_has_exit_code_three(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gem(["train", "-c", recipe, "--set", "run.device=cuda"]) == 3


def test_short_options_win_over_set(recipe: str) -> None:
    loaded = configuration(recipe, ["run.seed=1", "run.out=elsewhere"], resume=None, seed=7, out='odd "name"')
    assert (loaded.config.run.seed, loaded.config.run.out) == (7, 'odd "name"')
    assert loaded.origins["run.seed"] == "--set"


def test_a_resumed_run_stays_in_its_folder(recipe: str, finished_run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished_run, tmp_path / "run")
    named = configuration(recipe, [], resume=folder, seed=None, out=str(folder))
    own = configuration(None, [], resume=folder, seed=None, out=None)
    assert named.config.run.out == own.config.run.out == str(folder)
    assert (named.config.precision.recipe, own.config.precision.recipe) == ("fp32", "bf16")
    with pytest.raises(RequestError, match="goes on in its own folder"):
        configuration(recipe, [], resume=folder, seed=None, out="elsewhere")


def test_the_table_has_a_line_for_each_task_and_baseline() -> None:
    test = {"a": {"auc": 0.75, "ne": None, "calibration": 1.0, "rows": 5}, "b": {"auc": 0.5, "ne": 1.0, "calibration": 1.0, "rows": 2}}
    rows = metric_rows(test, {"known": {"a": {"auc": 0.7, "ne": 0.9}}})
    assert rows == [
        ("a", "this run", "0.7500", "-", "1.0000", "5"),
        ("", "known", "0.7000", "0.9000", "-", ""),
        ("b", "this run", "0.5000", "1.0000", "1.0000", "2"),
    ]


def test_what_stands_under_the_table() -> None:
    summary = {
        "test": {"ctr": {"reasons": {"auc": "one class: no positive row"}}},
        "stopped": "rank 1 ran out",
        "samples_per_second": 50.0,
        "mfu": 0.25,
        "peak": {"source": "a measurement"},
        "rows": 100,
        "train_seconds": 2.0,
        "eval_seconds": 0.5,
    }
    assert closing(summary, Path("runs/x")).splitlines() == [
        "ctr auc: one class: no positive row",
        "stopped: rank 1 ran out",
        "100 rows in 2.0 s (50 samples/s, MFU 25.00 % of a measurement), evaluation 0.5 s",
        "report: runs/x/report.html",
    ]


def test_help_needs_no_torch() -> None:
    check = "import sys; from gem_core.cli.main import run; run(['train', '--help']); run(['eval', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0
