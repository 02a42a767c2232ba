"""The small values of a checkpoint: random states, the check that all is finite, and what a resumed run may change."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gem_train_fakes import FakeSource

from gem_core.config.schema import RunConfig
from gem_core.spec import RequestError, RunFailed
from gem_core.train.checkpoint import restore, values
from gem_core.train.world import World


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_planted_fault_a_check_that_looks_at_one_level_only_would_pass(bad: float) -> None:
    """Twin: the fault lies three levels down; a shallow check does not see it, ours does and says where."""
    broken: dict[str, Any] = {"deep": [{"w": torch.tensor([bad])}]}
    shallow = [t for t in broken.values() if isinstance(t, torch.Tensor) and not torch.isfinite(t).all()]
    assert shallow == []
    with pytest.raises(RunFailed, match="trainer/deep/0/w holds a value that is not finite"):
        values.refuse_non_finite(broken, "trainer")


# ---- random state -----------------------------------------------------------------------------------------------------------------------


def draw() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), float(np.random.randn()), random.random(), random.gauss(0, 1)]


def test_random_states_come_from_the_seed_and_the_rank() -> None:
    drawn = []
    for seed, rank in ((1, 0), (1, 0), (1, 1), (2, 0)):
        values.seed_random_state(seed, World(rank=rank, size=2))
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert all(a != b for other in drawn[2:] for a, b in zip(drawn[0], other, strict=True))


def test_random_states_go_on(tmp_path: Path) -> None:
    draw()
    states = values.random_state(World())
    torch.save(states, tmp_path / "random.pt")
    expected = draw()
    draw()
    values.restore_random_state(torch.load(tmp_path / "random.pt", weights_only=True), World())
    assert draw() == expected


def test_case_E04_a_rank_that_was_not_saved_keeps_its_own_state() -> None:
    states = values.random_state(World())
    torch.manual_seed(99)
    expected = float(torch.rand(()))
    torch.manual_seed(99)
    values.restore_random_state(states, World(rank=1, size=2))
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
        restore.check_same_run(about, changed(section, **values))


def test_what_it_may_change_is_told(caplog: pytest.LogCaptureFixture) -> None:
    about = {"config": RunConfig().model_dump(mode="json")}
    restore.check_same_run(about, changed("train", epochs=9))
    restore.check_same_run(about, changed("run", out="elsewhere"))
    assert [record.getMessage() for record in caplog.records] == ["resuming with train.epochs = 9; the run was started with 1"]


def test_other_data_is_refused() -> None:
    about = {"data": restore.data_facts(FakeSource())}
    restore.check_same_data(about, FakeSource(seed=5))
    with pytest.raises(RequestError, match="gives rows"):
        restore.check_same_data(about, FakeSource(rows=48))
    source = FakeSource()
    source.schema = lambda: replace(FakeSource().schema(), group=False)  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="gives schema"):
        restore.check_same_data(about, source)
