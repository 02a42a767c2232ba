"""A model exported for scoring gives the probabilities that the run's evaluation gave, with neither run nor source."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gem_train_fakes import ITEMS, FakeSource
from torch import Tensor

from gem_core.builtin.toy import ToySource
from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins import reset_host
from gem_core.spec import DataSchema, RequestError
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.compose import compose
from gem_core.train.run import train
from gem_core.train.scoring import _SCHEMA, Scorer, export_scorer, load_scorer, schema_as_json
from gem_core.train.step import forward

ROOT = Path(__file__).parents[4]
Configure = Callable[..., LoadedConfig]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


def exported(run: Path, out: Path) -> Scorer:
    export_scorer(find_checkpoint(run), out)
    return load_scorer(out)


def evaluated(run: Path) -> dict[str, Tensor]:
    """Probabilities of the whole test split as the run itself computes them."""
    made = compose(load_config(run / "config.toml"), resume=run, training=False)
    weights = made.average
    try:
        batch = next(FakeSource().batches("test", batch_size=32))
        made.dense.eval()
        with torch.no_grad(), made.precision.forward_context("cpu"):
            if weights is None:
                logits = forward(made.dense, made.embeddings, batch, made.schema.tasks)
            else:
                with weights.in_place():
                    logits = forward(made.dense, made.embeddings, batch, made.schema.tasks)
        return {name: torch.sigmoid(value) for name, value in logits.items()}
    finally:
        made.close()


@pytest.mark.parametrize(
    "settings", [(), ("train.ema_decay=0.8", "optim.lr=0.05"), ("embedding.optimizer=adam", "precision.recipe=bf16"), ("model.options.dropout=0.5",)]
)
def test_case_E01_a_plain_model_scores_as_the_run_does(configure: Configure, tmp_path: Path, settings: tuple[str, ...]) -> None:
    train(configure(*settings))
    scorer = exported(tmp_path / "run", tmp_path / "scorer")
    expected = evaluated(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    got = scorer(next(FakeSource().batches("test", batch_size=32)))
    assert {name: got[name].tolist() for name in got} == {name: expected[name].tolist() for name in expected}
    assert [task.name for task in scorer.tasks] == ["ctr", "cvr"]
    assert all(float(p.min()) > 0 and float(p.max()) < 1 and p.std() > 0 for p in got.values())


def test_planted_fault_other_weights_score_otherwise(configure: Configure, tmp_path: Path) -> None:
    """Twin: the comparison above goes red when the tables are another run's."""
    train(configure())
    scorer = exported(tmp_path / "run", tmp_path / "scorer")
    for piece in scorer.embeddings.table_slices():
        piece.tensor.add_(0.5)
    assert scorer(next(FakeSource().batches("test", batch_size=32)))["ctr"].tolist() != evaluated(tmp_path / "run")["ctr"].tolist()


def test_ids_without_a_row_are_refused(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    scorer = exported(tmp_path / "run", tmp_path / "scorer")
    batch = next(FakeSource().batches("test", batch_size=8))
    batch.ids.values[3] = ITEMS
    with pytest.raises(RequestError, match=f"{ITEMS}"):
        scorer(batch)


def test_case_E17_exporting_changes_nothing_of_the_run(configure: Configure, tmp_path: Path) -> None:
    """Train, export in the middle with the run alive, go on: configuration and result are those of a run that was never exported."""
    straight = train(configure("train.epochs=2", out="straight"))
    train(configure("train.epochs=1"))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    loaded = configure("train.epochs=2")
    run = compose(loaded, resume=tmp_path / "run", training=False)
    try:
        dump = run.config.model_dump(mode="json")
        exported(tmp_path / "run", tmp_path / "scorer")
        assert run.config.model_dump(mode="json") == dump
    finally:
        run.close()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    assert train(loaded, resume=tmp_path / "run")["test"] == straight["test"]


@pytest.mark.parametrize("schema", [FakeSource().schema(), ToySource().schema()])
def test_a_schema_goes_through_json(schema: DataSchema) -> None:
    assert _SCHEMA.validate_python(json.loads(json.dumps(schema_as_json(schema)))) == schema


# ---- what is refused --------------------------------------------------------------------------------------------------------------------


def test_an_export_leaves_other_files_alone(configure: Configure, tmp_path: Path) -> None:
    train(configure("train.epochs=1"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    for taken in ("full", "file"):
        with pytest.raises(RequestError, match="it exists and is not empty"):
            export_scorer(find_checkpoint(tmp_path / "run"), tmp_path / taken)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_what_is_no_scorer_is_refused(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no model.json. Make one: gem checkpoint export"):
        load_scorer(tmp_path)
    train(configure("train.epochs=1"))
    exported(tmp_path / "run", tmp_path / "scorer")
    file = tmp_path / "scorer" / "model.json"
    described = json.loads(file.read_text())
    file.write_text(json.dumps({**described, "model": {"name": "probe", "options": {"hidden": 5}}}))
    with pytest.raises(RequestError, match=r"weights have other names or shapes in the installed model, the first is"):
        load_scorer(tmp_path / "scorer")
    file.write_text(json.dumps({**described, "format": 99}))
    with pytest.raises(RequestError, match="its format is 99, this version reads 1"):
        load_scorer(tmp_path / "scorer")


# ---- the documents ----------------------------------------------------------------------------------------------------------------------


def test_the_documented_lines_score_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from gem_core.cli.main import run as gem

    document = (ROOT / "docs/checkpoints.md").read_text()
    (lines,) = re.findall(r"^```python\n(.*?)^```", document, flags=re.M | re.S)
    (command,) = re.findall(r"^gem (checkpoint export .*)$", document, flags=re.M)
    monkeypatch.chdir(tmp_path)
    reset_host()
    assert gem(["train", "-c", "toy", "--out", "runs/toy", "--set", "train.max_steps=3"]) == 0
    assert gem(command.split()) == 0
    capsys.readouterr()
    (tmp_path / "score.py").write_text(lines)
    runpy.run_path("score.py")
    assert re.search(r"tensor\(\[0\.\d+", capsys.readouterr().out)
