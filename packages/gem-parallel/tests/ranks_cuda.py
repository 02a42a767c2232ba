"""Run by test_storage_gpu.py, once for each GPU: every engine and layout over NCCL; saves their tables beside those of one process on the CPU.

usage: ranks_cuda.py FOLDER RANK WORLD
"""

import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import STEPS, TABLES, pack, share, torch_engine, train

from gem_core.spec import SparseOptimizer, load_object

TORCH, TORCHREC = "gem_core.builtin.embedding:TorchEmbeddings", "gem_parallel.sparse.engine:TorchRecEmbeddings"
SHARDED_2D = "gem_parallel.sparse.sharded2d:Sharded2DEmbeddings"
HOST_ROWS = ({"pattern": "tags", "sharding": "table_row_wise"}, {"pattern": "city", "sharding": "table_row_wise"})
FINE, FP16, BF16 = 1e-4, 2**-6, 2**-4
"""Largest differences, absolute and relative: sums in another order; five updates of 16-bit rows or vectors, of 8 and 11 digits."""
LAYOUTS: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "torch": (TORCH, "rowwise_adagrad", {}, FINE),
    "auto": (TORCHREC, "rowwise_adagrad", {}, FINE),
    "table_wise": (TORCHREC, "adam", {"sharding": "table_wise"}, FINE),
    "row_wise": (TORCHREC, "rowwise_adagrad", {"sharding": "row_wise"}, FINE),
    "column_wise": (TORCHREC, "adam", {"tables": ({"pattern": "item", "sharding": "column_wise"},)}, FINE),
    "data_parallel": (TORCHREC, "rowwise_adagrad", {"sharding": "data_parallel"}, FINE),
    "table_row_wise": (TORCHREC, "rowwise_adagrad", {"tables": HOST_ROWS}, FINE),
    "grid": (TORCHREC, "sgd", {"tables": ({"pattern": "city", "sharding": "grid"},)}, FINE),
    "copies": (TORCHREC, "sgd", {"replicas": 2}, FINE),
    "uvm": (TORCHREC, "rowwise_adagrad", {"sharding": "row_wise", "memory": "uvm"}, FINE),
    "uvm_cached": (TORCHREC, "rowwise_adagrad", {"sharding": "table_wise", "memory": "uvm_cached"}, FINE),
    "fp16 rows": (TORCHREC, "sgd", {"dtype": "fp16"}, FP16),
    "fp16 out, bf16 back": (TORCHREC, "sgd", {"sharding": "row_wise", "forward_comm": "fp16", "backward_comm": "bf16"}, BF16),
    "bf16 out, fp16 back": (TORCHREC, "sgd", {"sharding": "table_wise", "forward_comm": "bf16", "backward_comm": "fp16"}, BF16),
    "sharded_2d": (SHARDED_2D, "adam", {}, FINE),
    "sharded_2d, 2 replicas": (SHARDED_2D, "rowwise_adagrad", {"replicas": 2}, FINE),
    "sharded_2d, gathered when asked": (SHARDED_2D, "sgd", {"replicas": 2, "prefetch": False}, FINE),
}


def ready(engine: Any, side: torch.cuda.Stream, step: int, rank: int, world: int) -> Any:
    """A step's ids on the GPU, sent ahead on a stream of their own where the engine does that."""
    with torch.cuda.stream(side):
        ids = pack(share(step, rank, world)).to(f"cuda:{rank}")
        return engine.prefetch(ids) if hasattr(engine, "prefetch") else ids


def train_on_gpu(engine: Any, rank: int, world: int) -> None:
    side = torch.cuda.Stream()
    held = [ready(engine, side, 0, rank, world)]
    for step in range(STEPS):
        engine.set_lr(0.2 / (step + 1))
        engine.zero_grad()
        torch.cuda.current_stream().wait_stream(side)
        out = engine(held[step])
        if step + 1 < STEPS:
            held.append(ready(engine, side, step + 1, rank, world))
        parts = [(v * torch.arange(1.0, v.shape[1] + 1, device=v.device) + v**2).sum() for v in out.values()]
        (torch.stack(parts).sum() * world).backward()
        engine.step()
    torch.cuda.synchronize()


def main(folder: Path, rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved: dict[str, Any] = {}
    for layout, (load, optimizer, options, bound) in LAYOUTS.items():
        alone = torch_engine(optimizer)
        train(alone, 0, 1)  # on every rank the whole batch: the exchange averages equal gradients
        try:
            engine = load_object(load)(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device=f"cuda:{rank}", seed=3, **options)
            train_on_gpu(engine, rank, world)
            saved[layout] = (engine.export_tables(), alone.export_tables(), bound)
        except Exception:  # the others are still worth knowing; ranks fail together
            saved[layout] = traceback.format_exc()
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
