"""Checkpoints: complete or absent, finite, whole, and bound to the run they belong to."""

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_train_fakes import FakeSource
from torch import nn

from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.config.schema import RunConfig
from gem_core.spec import RequestError, RunFailed, SparseOptimizer, TableSpec
from gem_core.train import checkpoint
from gem_core.train.optim import adamw
from gem_core.train.world import World

STATE: dict[str, dict[str, Any]] = {"dense": {"model": {"w": torch.ones(3)}}, "tables": {"t": {"weight": torch.zeros(2, 2)}}, "trainer": {"step": 1}}


def model_and_optimizer(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    path = checkpoint.save_checkpoint(tmp_path / "checkpoints", 7, STATE, {"kernels": {"gdpa": "reference"}}, keep=2)
    saved = checkpoint.find_checkpoint(tmp_path)
    assert saved.path == path
    assert (saved.about["step"], saved.about["kernels"]) == (7, {"gdpa": "reference"})
    content = saved.read()
    assert torch.equal(content["dense"]["model"]["w"], torch.ones(3))
    assert content["trainer"] == {"step": 1}


def test_the_newest_are_kept_by_number_not_by_name(tmp_path: Path) -> None:
    for step in (2, 9, 10, 100):
        checkpoint.save_checkpoint(tmp_path / "checkpoints", step, STATE, {}, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-10", "step-100"]
    assert checkpoint.find_checkpoint(tmp_path).about["step"] == 100


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    for value in (1, 2):
        checkpoint.save_checkpoint(tmp_path / "checkpoints", 5, {**STATE, "trainer": {"step": value}}, {}, keep=2)
    assert checkpoint.find_checkpoint(tmp_path).read()["trainer"] == {"step": 2}
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["dense", "tables"])
def test_nothing_that_is_not_finite_is_written(tmp_path: Path, bad: float, part: str) -> None:
    checkpoint.save_checkpoint(tmp_path / "checkpoints", 1, STATE, {}, keep=2)
    broken = {**STATE, part: {"deep": [{"w": torch.tensor([1.0, bad])}]}}
    with pytest.raises(RunFailed, match=f"step 2: {part}/deep/0/w holds a value that is not finite"):
        checkpoint.save_checkpoint(tmp_path / "checkpoints", 2, broken, {}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_planted_fault_a_check_that_looks_at_one_level_only_would_pass(tmp_path: Path) -> None:
    """Twin: the fault above lies three levels down; a shallow check does not see it, ours does."""
    broken: dict[str, dict[str, Any]] = {"dense": {"deep": [{"w": torch.tensor([float("nan")])}]}}
    shallow = [t for t in broken["dense"].values() if isinstance(t, torch.Tensor) and not torch.isfinite(t).all()]
    assert shallow == []
    with pytest.raises(RunFailed):
        checkpoint.refuse_non_finite(broken, 1)


def test_what_a_killed_process_left_is_not_a_checkpoint_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint.save_checkpoint(folder, 1, STATE, {}, keep=2)
    for name in (".writing-step-2", ".removing-step-0", "step-x"):
        shutil.copytree(folder / "step-1", folder / name)
    assert checkpoint.find_checkpoint(tmp_path).about["step"] == 1
    checkpoint.save_checkpoint(folder, 2, STATE, {}, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2", "step-x"]


def test_no_checkpoint_and_a_newer_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no complete one"):
        checkpoint.find_checkpoint(tmp_path)
    path = checkpoint.save_checkpoint(tmp_path / "checkpoints", 1, STATE, {}, keep=1)
    about = json.loads((path / "about.json").read_text())
    (path / "about.json").write_text(json.dumps({**about, "format": checkpoint.FORMAT + 1}))
    with pytest.raises(RequestError, match="Install a newer gem-core"):
        checkpoint.find_checkpoint(tmp_path)


def test_only_plain_values_are_unpickled(tmp_path: Path) -> None:
    """A checkpoint from a stranger cannot run code."""
    path = checkpoint.save_checkpoint(tmp_path / "checkpoints", 1, STATE, {}, keep=1)
    torch.save({"f": os.getcwd}, path / "trainer.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        checkpoint.find_checkpoint(tmp_path).read()


# ---- dense state ------------------------------------------------------------------------------------------------------------------------


def test_weights_and_optimiser_go_on_to_the_bit(tmp_path: Path) -> None:
    first, optimizer = model_and_optimizer(1)
    checkpoint.save_checkpoint(tmp_path / "checkpoints", 1, {**STATE, "dense": checkpoint.dense_state(first, optimizer)}, {}, keep=1)
    second, other = model_and_optimizer(2, steps=0)
    checkpoint.restore_dense(second, checkpoint.find_checkpoint(tmp_path).read()["dense"], other)
    for model, opt in ((first, optimizer), (second, other)):
        torch.manual_seed(5)
        opt.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_case_E10_weights_alone_need_no_optimiser() -> None:
    first, optimizer = model_and_optimizer(1)
    second, _ = model_and_optimizer(2)
    checkpoint.restore_dense(second, checkpoint.dense_state(first, optimizer))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_another_model_is_refused() -> None:
    first, optimizer = model_and_optimizer(1)
    state = checkpoint.dense_state(first, optimizer)
    with pytest.raises(RequestError, match="4 weights have other names or shapes"):
        checkpoint.restore_dense(nn.Sequential(nn.Linear(3, 4)), state)
    with pytest.raises(RequestError, match=r"the first is '0.weight'"):
        checkpoint.restore_dense(nn.Sequential(nn.Linear(9, 4), nn.LayerNorm(4), nn.Linear(4, 1)), state)


def engine(name: str = "item") -> TorchEmbeddings:
    return TorchEmbeddings(
        [TableSpec(name=name, rows=5, dim=4, features=("f",), init_scale=0.1)], SparseOptimizer(), device=torch.device("cpu"), seed=len(name)
    )


def test_case_E01_tables_are_whole_and_named() -> None:
    first, second = engine(), engine()
    tables = first.export_tables()
    tables["item"]["weight"] += 1
    checkpoint.restore_tables(second, tables)
    assert torch.equal(second.export_tables()["item"]["weight"], tables["item"]["weight"])
    with pytest.raises(RequestError, match="they differ in 'item'"):
        checkpoint.restore_tables(engine("user"), tables)


# ---- random state -----------------------------------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.random(), random.gauss(0, 1)]


def test_random_states_come_from_the_seed_and_the_rank() -> None:
    drawn = []
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
        checkpoint.seed_random_state(seed, World(rank=rank, size=2))
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for other in drawn[2:] for a, b in zip(drawn[0], other, strict=True))


def test_random_states_go_on(tmp_path: Path) -> None:
    draw()
    states = checkpoint.random_state(World())
    torch.save(states, tmp_path / "random.pt")
    expected = draw()
    draw()
    checkpoint.restore_random_state(torch.load(tmp_path / "random.pt", weights_only=True), World())
    assert draw() == expected


def test_case_E04_a_rank_that_was_not_saved_keeps_its_own_state() -> None:
    states = checkpoint.random_state(World())
    torch.manual_seed(99)
    expected = float(torch.rand(()))
    torch.manual_seed(99)
    checkpoint.restore_random_state(states, World(rank=1, size=2))
    assert float(torch.rand(())) == expected


# ---- what may change --------------------------------------------------------------------------------------------------------------------


def changed(section: str, **values: Any) -> RunConfig:
    config = RunConfig()
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("run", {"seed": 2}),
        ("data", {"source": "toy"}),
        ("data", {"batch_size": 7}),
        ("model", {"options": {"dim": 3}}),
        ("embedding", {"optimizer": "sgd"}),
        ("precision", {"recipe": "bf16"}),
        ("train", {"shuffle": False}),
        ("train", {"ema_decay": 0.5}),
    ],
)
def test_what_a_resumed_run_cannot_change_is_refused(section: str, values: dict[str, Any]) -> None:
    about = {"config": RunConfig().model_dump(mode="json")}
    with pytest.raises(RequestError, match=rf"resuming with {section}\.{next(iter(values))}.*the run was started with"):
        checkpoint.check_same_run(about, changed(section, **values))


def test_what_it_may_change_is_told(caplog: pytest.LogCaptureFixture) -> None:
    about = {"config": RunConfig().model_dump(mode="json")}
    checkpoint.check_same_run(about, changed("train", epochs=9))
    checkpoint.check_same_run(about, changed("run", out="elsewhere"))
    assert [record.getMessage() for record in caplog.records] == ["resuming with train.epochs = 9; the run was started with 1"]


def test_other_data_is_refused() -> None:
    about = {"data": checkpoint.data_facts(FakeSource())}
    checkpoint.check_same_data(about, FakeSource(seed=5))
    with pytest.raises(RequestError, match="gives rows"):
        checkpoint.check_same_data(about, FakeSource(rows=48))
    source = FakeSource()
    source.schema = lambda: replace(FakeSource().schema(), group=False)  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="gives schema"):
        checkpoint.check_same_data(about, source)
