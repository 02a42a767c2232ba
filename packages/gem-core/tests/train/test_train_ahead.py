"""One batch ahead: the numbers of a run without it, each row trained once, nothing ahead across an evaluation, a checkpoint or the end."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gem_train_fakes import FakeSource
from test_train_step import learner_of, state_of, work_of

from gem_core.batch import Batch, KeyedJagged
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.config.load import LoadedConfig, load_config
from gem_core.spec import PrefetchesIds, RequestError, RunFailed
from gem_core.train import loop, step
from gem_core.train.ahead import Ahead
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.compose import compose
from gem_core.train.feed import Feed
from gem_core.train.log import read_log
from gem_core.train.step import train_step
from gem_core.train.world import World

CPU = torch.device("cpu")
Configure = Callable[..., LoadedConfig]


class Sent:
    """What the engine's ``prefetch`` gives: the ids, to be looked up once."""

    def __init__(self, ids: KeyedJagged) -> None:
        self.ids: KeyedJagged | None = ids


class Telling(TorchEmbeddings):
    """The ``torch`` engine with a ``prefetch``; tells what is done, batches by the sum of their ids."""

    told: list[tuple[str, int]]

    def prefetch(self, ids: KeyedJagged) -> Sent:
        self._tell("send", int(ids.values.sum()))
        return Sent(ids)

    def forward(self, ids: Any) -> dict[str, torch.Tensor]:
        if isinstance(ids, Sent):
            sent, ids = ids, ids.ids
            sent.ids = None
        self._tell("look up" if torch.is_grad_enabled() else "evaluate", int(ids.values.sum()))
        return super().forward(ids)

    def step(self) -> None:
        self._tell("step", 0)
        super().step()

    def table_slices(self) -> Any:
        self._tell("save", 0)
        return super().table_slices()

    def _tell(self, what: str, number: int) -> None:
        self.__dict__.setdefault("told", []).append((what, number))


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Telling]:
    """The engines of the runs of a test, all of them telling."""
    made: list[Telling] = []

    def make(*given: Any, **words: Any) -> Telling:
        made.append(Telling(*given, **words))
        return made[-1]

    monkeypatch.setattr("gem_core.builtin.embedding.TorchEmbeddings", make)
    return made


def train(loaded: LoadedConfig, resume: Path | None = None) -> None:
    """Training alone, without the last evaluation and the report."""
    run = compose(loaded, resume=resume)
    loop.train_epochs(run)
    run.close()


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]


def test_which_engines_prefetch() -> None:
    assert issubclass(Telling, PrefetchesIds)
    assert not issubclass(TorchEmbeddings, PrefetchesIds)


def test_the_next_batch_is_sent_between_forward_and_update(configure: Configure, engines: list[Telling]) -> None:
    """96 rows in batches of 16, two epochs: inside an epoch the ids of a step are sent before the step before it is over."""
    train(configure())
    told = engines[0].told[: engines[0].told.index(("save", 0))]
    assert [what for what, _ in told] == 2 * ["send", *(5 * ["look up", "send", "step"]), "look up", "step"]
    sent, looked = ([number for what, number in told if what == wanted] for wanted in ("send", "look up"))
    assert sent == looked


def test_without_ahead_a_step_is_over_before_the_next_is_read(configure: Configure, engines: list[Telling]) -> None:
    train(configure("train.ahead=false", "train.epochs=1"))
    told = [what for what, _ in engines[0].told[: engines[0].told.index(("save", 0))]]
    assert told == 6 * ["send", "look up", "step"]


def test_micro_batches_are_sent_one_ahead_and_across_steps(configure: Configure, engines: list[Telling]) -> None:
    train(configure("optim.accumulate=2", "train.epochs=1"))
    told = [what for what, _ in engines[0].told[: engines[0].told.index(("save", 0))]]
    assert told == ["send", *(2 * ["look up", "send", "look up", "send", "step"]), "look up", "send", "look up", "step"]


@pytest.mark.parametrize(("setting", "what", "length"), [("checkpoint_every", "save", 1), ("eval_every", "evaluate", 4)])
def test_nothing_is_ahead_across_a_checkpoint_or_an_evaluation(
    configure: Configure, engines: list[Telling], setting: str, what: str, length: int
) -> None:
    train(configure(f"train.{setting}=2", "train.epochs=1"))
    told = [done for done, _ in engines[0].told]
    assert told[: 6 + length + 1] == ["send", "look up", "send", "step", "look up", "step", *(length * [what]), "send"]


def test_planted_fault_a_batch_ahead_across_a_checkpoint_is_seen(configure: Configure, engines: list[Telling], monkeypatch: Any) -> None:
    """Twin of the test above."""
    monkeypatch.setattr(loop, "_pauses", lambda run, step: False)
    train(configure("train.checkpoint_every=2", "train.epochs=1"))
    assert [done for done, _ in engines[0].told][:6] != ["send", "look up", "send", "step", "look up", "step"]


def test_nothing_is_read_beyond_the_last_step(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    batch = FakeSource.batch

    def counted(self: FakeSource, at: torch.Tensor) -> Batch:
        read.append(at.numel())
        return batch(self, at)

    monkeypatch.setattr(FakeSource, "batch", counted)
    train(configure("train.max_steps=3"))
    assert read == [16] * 3


@pytest.mark.parametrize("settings", [(), ("optim.accumulate=4",), ("train.checkpoint_every=4", "train.eval_every=3")])
def test_case_F14_ahead_or_not_a_run_has_the_same_bits(
    configure: Configure, engines: list[Telling], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    train(configure(*settings, "train.log_every=1", "model.options.dropout=0.3", out="ahead"))
    train(configure(*settings, "train.ahead=false", "train.log_every=1", "model.options.dropout=0.3", out="not"))
    assert losses(tmp_path / "ahead") == losses(tmp_path / "not")
    ahead, plain = (find_checkpoint(tmp_path / name).read() for name in ("ahead", "not"))
    assert torch.equal(ahead["tables"]["item"]["weight"], plain["tables"]["item"]["weight"])
    assert all(torch.equal(ahead["dense"]["model"][name], weight) for name, weight in plain["dense"]["model"].items())
    trained = [Counter(number for what, number in engine.told if what == "look up") for engine in engines]
    assert trained[0] == trained[1]


def test_a_run_that_is_cut_and_goes_on_has_the_same_bits(configure: Configure, tmp_path: Path) -> None:
    """Cut in the middle of an epoch, at its end and right after."""
    train(configure("train.log_every=1", out="straight"))
    for steps in (3, 6, 7):
        train(configure("train.log_every=1", f"train.max_steps={steps}", out=f"cut{steps}"))
        folder = tmp_path / f"cut{steps}"
        train(load_config(folder / "config.toml", ["train.max_steps=0"]), resume=folder)
        assert losses(folder) == losses(tmp_path / "straight")


# ---- the parts ----------------------------------------------------------------------------------------------------------------------------


def test_a_batch_that_was_not_prepared_is_prepared_when_it_is_taken(source: FakeSource) -> None:
    engine = Telling(learner_of(source).embeddings._tables, learner_of(source).embeddings._optimizer, device=CPU, seed=1)
    ahead, first, second = Ahead(engine, CPU), source.batch(torch.arange(3)), source.batch(torch.arange(3, 6))
    ahead.prepare(first)
    assert ahead.take(first).ids.ids.values.tolist() == first.ids.values.tolist()
    ahead.prepare(first)
    assert ahead.take(second).ids.ids.values.tolist() == second.ids.values.tolist()
    assert [what for what, _ in engine.told] == ["send"] * 3


def test_an_engine_without_prefetch_gets_the_ids(source: FakeSource) -> None:
    batch = source.batch(torch.arange(3))
    ready = Ahead(learner_of(source).embeddings, CPU).take(batch)
    assert isinstance(ready.ids, KeyedJagged)
    assert ready.host is batch


def test_a_look_at_the_next_step_does_not_take_it(source: FakeSource) -> None:
    feed = Feed(source.batches("train", batch_size=40), World(), source.schema(), flops=lambda batch: 0)
    assert feed.peek() is feed.peek()
    assert [work.rows for work in feed] == [40, 40, 16]
    assert feed.peek() is None


def test_a_bad_row_of_the_next_step_is_told_before_this_one_is_applied() -> None:
    source = FakeSource(bad_label=20)
    feed = Feed(source.batches("train", batch_size=16), World(), source.schema(), flops=lambda batch: 0)
    learner = learner_of(source)
    before = state_of(learner)
    with pytest.raises(RequestError, match=r"it holds 2\.0"):
        train_step(learner, next(iter(feed)), step=1, lr_factor=1.0, following=feed.peek)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(learner).items())


# ---- when the loss is looked at -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("updates_in_step", [True, False])
def test_a_loss_that_is_not_finite_moves_nothing(updates_in_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third micro-batch holds a NaN. Tables that change in backward may have taken the first two, never the third."""
    source = FakeSource(nan_row=9)
    learner = learner_of(source)
    monkeypatch.setattr(type(learner.embeddings), "updates_in_step", updates_in_step)
    backwards = []
    monkeypatch.setattr(torch.Tensor, "backward", lambda self: backwards.append(self.item()))
    before = state_of(learner)
    with pytest.raises(RunFailed, match=r"step 5.*non-finite value in dense feature 'x'"):
        train_step(learner, work_of(source, *torch.arange(16).split(4)), step=5, lr_factor=1.0)
    assert len(backwards) == (4 if updates_in_step else 3)  # the third one ends where it comes to the tables
    assert all(torch.equal(tensor, before[name]) for name, tensor in state_of(learner).items())


def test_ranks_agree_on_the_loss_once_a_step_where_tables_change_in_step(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    refuse = step._refuse_non_finite

    def counted(learner: Any, told: Any, batches: Any, number: int) -> None:
        asked.append(len(told))
        refuse(learner, told, batches, number)

    monkeypatch.setattr(step, "_refuse_non_finite", counted)
    learner, work = learner_of(source), work_of(source, *torch.arange(8).split(4))
    train_step(learner, work, step=1, lr_factor=1.0)
    monkeypatch.setattr(type(learner.embeddings), "updates_in_step", False)
    train_step(learner, work, step=1, lr_factor=1.0)
    assert asked == [2, 1, 1]


def test_a_batch_in_page_locked_memory_is_a_copy(source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is no such memory: what is held here is that every tensor goes through it."""
    seen: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    batch = source.batch(torch.arange(5))
    copy = batch.pin_memory()
    assert torch.equal(copy.ids.values, batch.ids.values)
    assert {id(tensor) for tensor in seen} == {id(t) for t in (batch.ids.values, batch.ids.offsets, batch.groups, *batch.labels.values())} | {
        id(t) for t in (*batch.dense.values(), *batch.weights.values())
    }
