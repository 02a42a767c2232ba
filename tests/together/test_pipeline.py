"""One batch ahead in whole runs of every engine, on 2 and 4 ranks: each row once an epoch, and the bits of a run without it."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # ranks are started by the name of their function

from ranks_checkpoint import run
from ranks_pipeline import ENGINES, EPOCHS, ROWS, UNEVEN, WAYS, train_all

Saved = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """What each of 2 and 4 ranks trained on and got."""
    out: Saved = {}
    for world in WAYS:
        folder = tmp_path_factory.mktemp(f"pipeline{world}")
        run(train_all, world, folder)
        out[world] = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
    return out


def trained(ranks: list[dict[str, Any]], name: str) -> Counter[int]:
    return Counter(row for rank in ranks for row in rank[name]["seen"])


@pytest.mark.parametrize(("world", "way"), [(world, way) for world, ways in WAYS.items() for way in ways])
@pytest.mark.parametrize("engine", ENGINES)
def test_case_F14_each_row_is_trained_once_an_epoch(saved: Saved, world: int, engine: str, way: str) -> None:
    """Checkpoints after every third step and evaluations after every fourth fall inside epochs; one run is cut after the fourth step and goes on."""
    assert trained(saved[world], f"{engine} {way}") == dict.fromkeys(range(ROWS), EPOCHS)


@pytest.mark.parametrize("world", WAYS)
@pytest.mark.parametrize("engine", ENGINES)
def test_runs_ahead_without_and_cut_have_the_same_bits(saved: Saved, world: int, engine: str) -> None:
    for rank in saved[world]:
        plain = rank[f"{engine} False"]
        for way in WAYS[world]:
            assert rank[f"{engine} {way}"]["losses"] == plain["losses"]
            tables = rank[f"{engine} {way}"]["tables"]
            assert {name: torch.equal(tables[name], tensor) for name, tensor in plain["tables"].items()} == dict.fromkeys(tables, True)
    assert len(saved[world][0][f"{engine} False"]["losses"]) == 5 * EPOCHS


@pytest.mark.parametrize("rule", UNEVEN)
def test_case_F01_ranks_that_run_out_end_together_one_batch_ahead(saved: Saved, rule: str) -> None:
    """Batches of 12 rows a rank, the last of 2; rank 1 has only three of them."""
    for rank, batches in enumerate(UNEVEN[rule]):
        rows = [12] * 5 if rule != "pad" or rank else [12, 12, 12, 12, 2]
        for name in ("torchrec", "sharded_2d"):
            ahead, plain = (saved[2][rank]["uneven"][name, rule, ahead] for ahead in (True, False))
            assert ahead == plain
            assert len(plain[0]) == sum(rows[i % 5] for i in range(batches))
            assert len(plain[1]) == UNEVEN[rule][0]


def test_planted_fault_a_row_that_was_left_out_is_seen(saved: Saved) -> None:
    ranks = [{**rank, "torch True": {"seen": rank["torch True"]["seen"][1:]}} for rank in saved[2]]
    assert trained(ranks, "torch True") != dict.fromkeys(range(ROWS), EPOCHS)
