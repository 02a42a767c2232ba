"""Run by test_embedding_ranks.py, once for each rank: trains the ``torch`` engine on this rank's rows and saves what came out.

usage: ranks_embedding.py FOLDER RANK WORLD
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.builtin.embedding import TorchEmbeddings
from gem_core.spec import RequestError, SparseOptimizer, TableSpec

TABLES = (
    TableSpec(name="item", rows=30, dim=8, features=("item", "history.item"), init_scale=0.5),
    TableSpec(name="tags", rows=11, dim=4, features=("tags",), pooling="mean", init_scale=0.5),
    TableSpec(name="unused.on.most.steps", rows=5, dim=3, features=("rare",), pooling="sum", init_scale=0.5),
)
ROWS, STEPS = 6, 4
SHARES = {1: [(0, 6)], 2: [(0, 6), (6, 6)]}
"""Rows of the global batch that each rank takes at the second step; the other steps are halved."""


def global_columns(step: int) -> list[dict[str, list[int]]]:
    """The rows of one global batch: ids of each feature."""
    g = torch.Generator().manual_seed(step)

    def ids(high: int, most: int) -> list[int]:
        return torch.randint(0, high, (int(torch.randint(0, most + 1, (1,), generator=g)),), generator=g).tolist()

    return [{"item": ids(30, 1), "history.item": ids(30, 9), "tags": ids(11, 3), "rare": ids(5, 1) if step == 2 else []} for _ in range(ROWS)]


def pack(rows: list[dict[str, list[int]]]) -> KeyedJagged:
    columns = {}
    for table in TABLES:
        for key in table.features:
            lengths = torch.tensor([len(row[key]) for row in rows], dtype=torch.int64)
            columns[key] = Jagged(torch.tensor([i for row in rows for i in row[key]]), lengths_to_offsets(lengths), 9)
    return KeyedJagged.from_columns(columns, len(rows))


def share(step: int, rank: int, world: int) -> tuple[int, int]:
    if step == 1:
        return SHARES[world][rank]
    return ROWS * rank // world, ROWS * (rank + 1) // world


def train(rank: int, world: int, optimizer: str) -> dict[str, dict[str, torch.Tensor]]:
    engine = TorchEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.3), device="cpu", seed=3)
    for step in range(STEPS):
        low, high = share(step, rank, world)
        engine.set_lr(0.3 / (step + 1))
        engine.zero_grad()
        out = engine(pack(global_columns(step)[low:high]))
        # the sum over the global batch; ranks are averaged, hence the factor
        loss = sum((vectors * torch.arange(1.0, vectors.shape[1] + 1) + vectors**2).sum() for vectors in out.values())
        (loss * world).backward()
        engine.step()
    engine.step()  # nothing at all to exchange
    return engine.export_tables()


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    results = {name: train(rank, world, name) for name in ("rowwise_adagrad", "sgd", "adam")}
    bad = pack(global_columns(0))
    bad.values[0] = 99
    try:
        TorchEmbeddings(TABLES, SparseOptimizer(), device="cpu", seed=3)(bad)
    except RequestError as error:
        torch.save({"tables": results, "error": str(error)}, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
