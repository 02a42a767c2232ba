"""Sources with a cursor: each row is trained once an epoch, also when a run is cut and goes on with another number of ranks."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gem_train_fakes
import pytest
import torch
from gem_train_ranks import run_ranks

from gem_core.config.load import load_config
from gem_core.spec import RequestError, ResumableSource
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.checkpoint.store import file_sha256
from gem_core.train.run import train

ROWS = 90  # 16 a step: the last step is short


def told(file: Path) -> Counter[tuple[int, int]]:
    return Counter((int(epoch), int(row)) for epoch, row in (line.split() for line in file.read_text().splitlines()))


def each_once(epochs: int) -> Counter[tuple[int, int]]:
    return Counter((epoch, row) for epoch in range(epochs) for row in range(ROWS))


def overrides(file: Path, *more: str) -> list[str]:
    return ["data.source=fake-resumable", f"data.options.told={file}", f"data.options.rows={ROWS}", *more]


def test_which_sources_are_resumable(tmp_path: Path) -> None:
    assert isinstance(gem_train_fakes.ResumableFake(str(tmp_path / "told")), ResumableSource)
    assert not isinstance(gem_train_fakes.FakeSource(), ResumableSource)


@pytest.mark.parametrize(("steps", "accumulate"), [(1, 1), (5, 1), (6, 1), (7, 1), (2, 3)])
def test_a_cut_run_trains_each_row_once_an_epoch(configure: Callable[..., Any], tmp_path: Path, steps: int, accumulate: int) -> None:
    file = tmp_path / "told"
    given = overrides(file, f"optim.accumulate={accumulate}")
    train(configure(*given, f"train.max_steps={steps}"))
    assert sum(told(file).values()) < 2 * ROWS
    train(load_config(tmp_path / "run" / "config.toml", ["train.max_steps=0"]), resume=tmp_path / "run")
    assert told(file) == each_once(2)


def test_a_checkpoint_without_a_cursor_is_refused(configure: Callable[..., Any], tmp_path: Path) -> None:
    train(configure(*overrides(tmp_path / "told"), "train.max_steps=2"))
    saved = find_checkpoint(tmp_path / "run")
    assert saved.trainer()["data"][0]["done"]
    trainer = saved.path / "trainer.pt"
    torch.save({**saved.trainer(), "data": None}, trainer)
    saved.about["files"]["trainer.pt"] = {"sha256": file_sha256(trainer), "bytes": trainer.stat().st_size}
    (saved.path / "about.json").write_text(json.dumps(saved.about))
    with pytest.raises(RequestError, match="holds no cursor of the data source"):
        train(load_config(tmp_path / "run" / "config.toml", ["train.max_steps=0"]), resume=tmp_path / "run")


def test_case_E04_a_killed_run_goes_on_with_another_number_of_ranks_and_sees_each_row_once(recipe: str, tmp_path: Path) -> None:
    """One rank for 4 steps, two ranks until the second epoch, one rank to the end."""
    file, out = tmp_path / "told", tmp_path / "run"
    sets = " ".join(f"--set {value}" for value in overrides(file, "train.max_steps=4"))
    ddp, alone = "--set parallel.strategies=['fake-ddp']", "--set parallel.strategies=['single']"
    for size, command in (
        (1, f"train -c {recipe} --out {out} {sets}"),
        (2, f"train --set train.max_steps=9 --resume {out} {ddp}"),
        (1, f"train --set train.max_steps=0 --resume {out} {alone}"),
    ):
        ranks = run_ranks(size, tmp_path, command)
        assert ranks.codes == [0] * size, ranks.err
    assert told(file) == each_once(2)
