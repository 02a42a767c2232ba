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
        run("save", world, folder)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_case_E01_E02_every_layout_loads_every_other_to_the_bit(saved: Path, world: int) -> None:
    run("load", world, saved)
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
        ranks_checkpoint.load_all(saved, 0, 1)
