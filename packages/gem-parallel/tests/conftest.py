"""Batches, the engines under test and ranks as processes."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec import Embeddings, SparseOptimizer, TableSpec, load_object

torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))  # scripts that run on ranks import from beside them, and tests read the scripts


LOADS = {"torch": "gem_core.builtin.embedding:TorchEmbeddings", "torchrec": "gem_parallel.sparse.engine:TorchRecEmbeddings"}
"""Both engines as they are declared; core's is reached through its name only, as a user reaches it."""


def build(engine: str, tables: tuple[TableSpec, ...], optimizer: str = "rowwise_adagrad", *, seed: int = 1, device: str = "cpu") -> Any:
    return load_object(LOADS[engine])(tables, SparseOptimizer(name=optimizer, lr=0.1), device=device, seed=seed)


@pytest.fixture
def engine() -> Callable[..., Embeddings]:
    return build


def pack(columns: dict[str, list[list[int]]]) -> KeyedJagged:
    rows = len(next(iter(columns.values())))
    packed = {}
    for key, lists in columns.items():
        lengths = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
        packed[key] = Jagged(torch.tensor([i for ids in lists for i in ids], dtype=torch.int64), lengths_to_offsets(lengths), 0)
    return KeyedJagged.from_columns(packed, rows)


@pytest.fixture
def keyed() -> Callable[[dict[str, list[list[int]]]], KeyedJagged]:
    """A batch from lists: ``{feature: [ids of each row]}``."""
    return pack


def launch(script: Path, folder: Path, world: int) -> list[dict[str, Any]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(script), str(folder)]
    ranks = [
        subprocess.Popen([*words, str(r), str(world)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for r in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(output[-4000:] for output in outputs)
    return [torch.load(folder / f"rank{r}.pt") for r in range(world)]


@pytest.fixture(scope="session")
def on_ranks() -> Callable[[Path, Path, int], list[dict[str, Any]]]:
    """Run ``script FOLDER RANK WORLD`` on every rank and return what each saved as ``FOLDER/rankR.pt``; a rank that fails or hangs fails the test."""
    return launch


@pytest.fixture(scope="session")
def sharded_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """What each rank of ranks_sharded.py saved, by the number of ranks; started once each."""

    @cache
    def started(world: int) -> list[dict[str, Any]]:
        return launch(Path(__file__).with_name("ranks_sharded.py"), tmp_path_factory.mktemp(f"sharded{world}"), world)

    return started
