"""Checkpoints between all engines, layouts and numbers of ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks are started by the name of their function

import ranks_checkpoint
from ranks_checkpoint import LAYOUTS, run

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same tables from every layout on every number of ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for world in WORLDS:
        run(ranks_checkpoint.save_all, world, folder)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_case_E01_E02_every_layout_loads_every_other_to_the_bit(saved: Path, world: int) -> None:
    run(ranks_checkpoint.load_all, world, saved)
    loaded = [(saved / f"loaded{rank}.txt").read_text().splitlines() for rank in range(world)]
    for lines in loaded:
        here = [line for line in lines if line.endswith(f" on {world}")]
        assert len(set(here)) == sum(len(WORLDS) * len(layouts) ** 2 for layouts in LAYOUTS.values())


def test_planted_fault_a_wrong_row_is_seen(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: the comparison on the ranks goes red when one value of the expectation is another."""
    whole = ranks_checkpoint.whole

    def other(rule: str) -> dict[str, object]:
        values = whole(rule)
        values["tables/item/weight"][9, 7] += 1e-6
        return values

    monkeypatch.setattr(ranks_checkpoint, "whole", other)
    with pytest.raises(AssertionError, match="item weight"):
        ranks_checkpoint.load_all(saved, 0, 1, "cpu")


def test_case_E02_dense_weights_and_optimiser_move_between_shardings(tmp_path: Path) -> None:
    for world in WORLDS:
        run(ranks_checkpoint.save_dense, world, tmp_path)
    for world in WORLDS:
        run(ranks_checkpoint.load_dense, world, tmp_path)


def test_all_ranks_learn_that_one_has_a_nan(tmp_path: Path) -> None:
    run(ranks_checkpoint.save_spoiled, 2, tmp_path)
    told = [(tmp_path / f"told{rank}.txt").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "the checkpoint of step 2: tables/city/weight holds a value that is not finite" in told[0]
    assert [path.name for path in (tmp_path / "spoiled").iterdir()] == ["step-1"]
