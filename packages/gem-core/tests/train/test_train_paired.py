"""Paired steps: the same rows once high and once low, without a trace in the run, and what a recipe may make of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_paired_fakes import Rounds
from gem_train_fakes import FakeSource, Probe, ProbeOptions
from gem_train_ranks import run_ranks
from torch import Tensor, nn

from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.builtin.precision import Fp32
from gem_core.config.load import LoadedConfig
from gem_core.spec import ChangingPrecision, RunFailed, SparseOptimizer
from gem_core.train.checkpoint.saved import checkpoints, find_checkpoint
from gem_core.train.compose import compose
from gem_core.train.feed import Feed, Work
from gem_core.train.folder import read_manifest
from gem_core.train.log import read_log
from gem_core.train.metrics import StreamMetrics, log_losses
from gem_core.train.optim import adamw
from gem_core.train.run import evaluate_run, train
from gem_core.train.step import Learner, StepResult, train_step
from gem_core.train.world import World

Configure = Callable[..., LoadedConfig]
ROUNDS = "precision.recipe=rounds"


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gem_core.train.run.write_report", lambda folder: folder)


class Counting(Probe):
    """Keeps running statistics in buffers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


def learner_of(precision: Any, model: type[Probe] = Counting, dropout: float = 0.5) -> Learner:
    torch.manual_seed(7)
    schema, options = FakeSource().schema(), ProbeOptions(dropout=dropout)
    probe = model(schema, options)
    precision.prepare(probe, "cpu")
    return Learner(
        world=World(),
        tasks=schema.tasks,
        model=probe,
        dense=probe,
        embeddings=TorchEmbeddings(Probe.tables(schema, options), SparseOptimizer(name="sgd", lr=0.1), device=torch.device("cpu"), seed=3),
        precision=precision,
        optimizer=adamw(probe, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        dense_lr=0.1,
        sparse_lr=0.1,
        clip_norm=0.0,
        average=None,
        stream=StreamMetrics(schema.tasks, torch.device("cpu")),
    )


def work_of(micro: int = 2) -> Work:
    source = FakeSource()
    feed = Feed(
        iter([source.batch(torch.arange(16 * i, 16 * i + 16)) for i in range(micro)]), World(), source.schema(), flops=lambda b: 1, accumulate=micro
    )
    return next(iter(feed))


def step(learner: Learner, number: int = 1, *, paired: bool) -> StepResult:
    torch.manual_seed(number)
    return train_step(learner, work_of(), step=number, lr_factor=1.0, paired=paired)


def state_of(learner: Learner) -> dict[str, Tensor]:
    return {**learner.model.state_dict(), **{name: t["weight"] for name, t in learner.embeddings.export_tables().items()}}


def test_a_pair_is_the_sums_of_both_forwards_with_the_weights_before_the_step() -> None:
    """Against plain forwards of a learner in the same state, with the same dropout."""
    precision = Rounds()
    pairs = step(learner_of(precision, Probe), paired=True).pairs
    assert pairs is not None
    assert pairs.shape == (2, 2, 4)
    for side, low in enumerate((False, True)):
        other = Rounds()
        twin = learner_of(other, Probe)
        other.low = low
        torch.manual_seed(1)
        want = torch.zeros(4, dtype=torch.float64)
        for batch in work_of().batches:
            x = twin.model(batch, twin.embeddings(batch.ids))["ctr"].double().detach()
            y, w = batch.labels["ctr"].double(), batch.weights["ctr"].double()
            want += torch.stack([w.sum(), (w * y).sum(), (w * x.sigmoid()).sum(), (w * log_losses(x, y)).sum()])
        assert torch.allclose(pairs[side, 0], want, rtol=1e-6)
    assert not torch.allclose(pairs[0, 0], pairs[1, 0], rtol=1e-4)  # rounding to whole numbers does show


@pytest.mark.parametrize("rest", ["fp32", "bf16"])
def test_pairs_leave_no_trace(rest: str) -> None:
    """Weights, running statistics, tables and dropout of later steps are those of a run without pairs, to the bit; under autocast too."""
    with_pairs, without = (learner_of(Rounds(rest=rest)) for _ in range(2))
    for number in (1, 2, 3):
        step(with_pairs, number, paired=True)
        step(without, number, paired=False)
    one, two = state_of(with_pairs), state_of(without)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []
    assert with_pairs.stream.read(World(), close_window=False) == without.stream.read(World(), close_window=False)


def test_random_state_after_a_pair_is_that_of_a_step_without() -> None:
    ends = []
    for paired in (True, False):
        step(learner_of(Rounds()), paired=paired)
        ends.append(torch.rand(3))
    assert torch.equal(ends[0], ends[1])


@pytest.mark.parametrize("fault", ["random state", "buffers"])
def test_planted_faults_leave_a_trace(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "random state":

        @contextmanager
        def kept(devices: Any) -> Iterator[None]:
            yield

        monkeypatch.setattr(torch.random, "fork_rng", kept)
    else:
        monkeypatch.setattr(Counting, "buffers", lambda self, recurse=True: iter(()))
    with_pairs, without = (learner_of(Rounds()) for _ in range(2))
    step(with_pairs, paired=True)
    step(without, paired=False)
    one, two = state_of(with_pairs), state_of(without)
    assert [name for name in one if not torch.equal(one[name], two[name])]


def test_a_recipe_without_the_methods_has_no_pairs() -> None:
    learner = learner_of(Fp32())
    assert learner.changing is None
    assert step(learner, paired=False).pairs is None
    assert isinstance(Rounds(), ChangingPrecision)


# ---- whole runs -------------------------------------------------------------------------------------------------------------------------


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in read_log(folder) if record["event"] == name]


def test_pairs_come_when_the_recipe_says_and_reach_the_log(configure: Configure, tmp_path: Path) -> None:
    train(configure(ROUNDS, "precision.options.every=3"))
    records = events(tmp_path / "run", "precision")
    assert [r["step"] for r in records] == [3, 6, 9, 12]
    for record in records:
        assert record["ranks"] == 1.0
        assert record["told"]
        assert record["loss"][0] != record["loss"][1]
    assert read_manifest(tmp_path / "run")["precision_events"] == []


def test_news_reach_the_manifest_and_a_resumed_and_an_evaluated_run(configure: Configure, tmp_path: Path) -> None:
    """The layer falls back at step 4. What is resumed from step 6 has it high without another pair, and so has an evaluation."""
    words = (ROUNDS, "precision.options.every=2", "precision.options.falls=4", "train.checkpoint_every=6")
    train(configure(*words))
    whole = find_checkpoint(tmp_path / "run").read()
    manifest = read_manifest(tmp_path / "run")
    assert {d["module"]: d["format"] for d in manifest["precision"]}["first"] == "fp32"
    assert [(e["step"], e["say"]) for e in manifest["precision_events"]] == [(4, "first is high")]

    half = configure(*words, "train.max_steps=6", out="half")
    train(half)
    run = compose(configure(*words, out="half"), resume=tmp_path / "half")
    try:
        assert isinstance(run.precision, Rounds)
        assert not run.precision.low
        assert run.manifest["precision_events"][0]["step"] == 4
        assert {d.module: d.format for d in run.decisions}["first"] == "fp32"
    finally:
        run.close()
    train(configure(*words, out="half"), resume=tmp_path / "half")
    again = find_checkpoint(tmp_path / "half").read()
    assert [n for n, t in whole["dense"]["model"].items() if not torch.equal(t, again["dense"]["model"][n])] == []
    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Rounds.load_state_dict
        patch.setattr(Rounds, "load_state_dict", lambda self, state: (original(self, state), seen.append(self.low))[0])
        evaluate_run(tmp_path / "half")
        assert seen == [False]
        evaluate_run(tmp_path / "half", ["precision.recipe=fp32", "precision.options={}"])  # the state is the other recipe's


def test_events_after_the_checkpoint_are_not_kept(configure: Configure, tmp_path: Path) -> None:
    words = (ROUNDS, "precision.options.falls=4", "train.checkpoint_every=3", "train.keep_checkpoints=5")
    train(configure(*words, "train.max_steps=5"))
    for path in checkpoints(tmp_path / "run" / "checkpoints")[1:]:
        path.rename(tmp_path / path.name)
    run = compose(configure(*words), resume=tmp_path / "run")
    try:
        assert run.progress.step == 3
        assert run.manifest["precision_events"] == []
    finally:
        run.close()


def test_a_recipe_may_end_the_run_and_its_checkpoint_is_kept(configure: Configure, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="training step 4: first is too low"):
        train(configure(ROUNDS, "precision.options.stops=4"))
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-4"]
    assert "first is too low" in events(tmp_path / "run", "failed")[0]["error"]


def test_what_is_read_ahead_does_not_get_into_the_checkpoint_of_an_ended_run(configure: Configure, tmp_path: Path) -> None:
    """It is the checkpoint that the run would have written at that step anyway."""
    with pytest.raises(RunFailed):
        train(configure(ROUNDS, "precision.options.stops=4"))
    train(configure(ROUNDS, "train.max_steps=4", out="asked"))
    ended, asked = (find_checkpoint(tmp_path / name).read() for name in ("run", "asked"))
    assert [n for n, t in ended["dense"]["model"].items() if not torch.equal(t, asked["dense"]["model"][n])] == []
    assert ended["trainer"]["progress"]["next_batch"] == asked["trainer"]["progress"]["next_batch"]
    assert ended["trainer"]["data"] == asked["trainer"]["data"]


def test_ranks_add_their_pairs_up(recipe: str, configure: Configure, tmp_path: Path) -> None:
    """Two ranks see the figures of one, and both end the run where one of them is told to."""
    train(configure(ROUNDS, "train.max_steps=2", out="one"))
    words = f"train -c {recipe} --out {tmp_path / 'two'} --set {ROUNDS} --set precision.options.stops=2 --set parallel.strategies=['fake-ddp']"
    ranks = run_ranks(2, tmp_path, words)
    assert ranks.codes == [1, 1], ranks.err
    assert all("first is too low" in err for err in ranks.err)
    one, two = (events(tmp_path / name, "precision") for name in ("one", "two"))
    assert [r["ranks"] for r in two] == [2.0, 2.0]
    for a, b in zip(one, two, strict=True):
        assert b["weight"] == a["weight"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
