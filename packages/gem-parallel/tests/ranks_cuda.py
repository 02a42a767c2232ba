"""Run by test_storage_gpu.py, once for each GPU: layouts that torchrec has on CUDA only; saves their tables beside those of one process.

usage: ranks_cuda.py FOLDER RANK WORLD
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import STEPS, TABLES, pack, share, torch_engine, train

from gem_core.spec import SparseOptimizer
from gem_parallel.sparse.engine import TorchRecEmbeddings

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "host rows": (
        "rowwise_adagrad",
        {"tables": ({"pattern": "tags", "sharding": "table_row_wise"}, {"pattern": "city", "sharding": "table_row_wise"})},
    ),
    "grid": ("sgd", {"tables": ({"pattern": "city", "sharding": "grid"},)}),
    "rows": ("rowwise_adagrad", {"sharding": "row_wise"}),
    "columns": ("adam", {"tables": ({"pattern": "item", "sharding": "column_wise"},)}),
    "copies": ("sgd", {"replicas": 2}),
}


def train_on_gpu(engine: Any, rank: int, world: int) -> None:
    for step in range(STEPS):
        engine.set_lr(0.2 / (step + 1))
        engine.zero_grad()
        out = engine(pack(share(step, rank, world)).to(f"cuda:{rank}"))
        loss = sum((v * torch.arange(1.0, v.shape[1] + 1, device=v.device) + v**2).sum() for v in out.values())
        (loss * world).backward()
        engine.step()


def main(folder: Path, rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved = {}
    for layout, (optimizer, options) in LAYOUTS.items():
        engine = TorchRecEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device=f"cuda:{rank}", seed=3, **options)
        train_on_gpu(engine, rank, world)
        alone = torch_engine(optimizer)
        train(alone, 0, 1)
        saved[layout] = (engine.export_tables(), alone.export_tables())
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
