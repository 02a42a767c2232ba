"""The ``torch`` engine on two gloo ranks: replicas stay equal, and equal one process on the global batch."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("ranks_embedding.py")
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")


def run(folder: Path, world: int) -> list[dict[str, Any]]:
    """What each rank saved; fails with the ranks' output if one does not end well in time."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(SCRIPT), str(folder)]
    ranks = [
        subprocess.Popen([*words, str(r), str(world)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
    return [torch.load(folder / f"rank{r}.pt") for r in range(world)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_ranks_equal_one_process_on_the_global_batch(saved: list[dict[str, Any]], optimizer: str) -> None:
    alone, pair = runpy.run_path(str(SCRIPT))["train"](0, 1, optimizer), saved[0]["tables"][optimizer]
    assert set(alone) == {"item", "tags", "unused.on.most.steps"}
    for table, tensors in alone.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(pair[table][name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, where=f"{table}.{name}": f"{where}: {text}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replicas_are_bit_equal(saved: list[dict[str, Any]], optimizer: str) -> None:
    first, second = (rank["tables"][optimizer] for rank in saved)
    assert all(torch.equal(first[table][name], second[table][name]) for table in first for name in first[table])


def test_case_B02_a_rank_without_rows_takes_part(saved: list[dict[str, Any]]) -> None:
    """Rank 1 has no row at the second step (its ids are torch's empty float32 tensors); both ranks ended, with all updates counted."""
    assert all(int(rank["tables"]["adam"]["item"]["step"]) == 5 for rank in saved)
    assert torch.equal(saved[0]["tables"]["adam"]["item"]["weight"], saved[1]["tables"]["adam"]["item"]["weight"])


def test_a_bad_id_names_feature_and_table_on_every_rank(saved: list[dict[str, Any]]) -> None:
    for rank in saved:
        assert "99" in rank["error"]
        assert "'item'" in rank["error"]


def test_the_comparison_sees_a_planted_fault(saved: list[dict[str, Any]]) -> None:
    """What a rank learns without the exchange, from its own half of the rows, must not pass for the global batch."""
    half = runpy.run_path(str(SCRIPT))["train"](0, 2, "sgd")
    assert not torch.allclose(half["item"]["weight"], saved[0]["tables"]["sgd"]["item"]["weight"], rtol=1e-5, atol=1e-6)
