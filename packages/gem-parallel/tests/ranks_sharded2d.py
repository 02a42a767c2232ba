"""Run by test_sharded2d.py, once for each rank: the ``sharded_2d`` engine in every grid of this many ranks; saves what came out.

usage: ranks_sharded2d.py FOLDER RANK WORLD
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import TABLES, global_rows, pack, share, torch_engine, train

from gem_core.spec import RequestError, SparseOptimizer
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings

OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")


def engine(optimizer: str, replicas: int, *, prefetch: bool = True) -> Sharded2DEmbeddings:
    return Sharded2DEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3, replicas=replicas, prefetch=prefetch)


def accumulated(engine: Any, rank: int, world: int) -> dict[str, dict[str, torch.Tensor]]:
    """One update from two micro-batches, with an evaluation between them."""
    for step in (0, 1):
        out = engine(pack(share(step, rank, world)))
        (sum((vectors**2).sum() for vectors in out.values()) * world).backward()
        with torch.no_grad():
            engine(pack(share(4, rank, world)))
    engine.step()
    return engine.export_tables()  # type: ignore[no-any-return]


def refused(replicas: int) -> str:
    try:
        engine("sgd", replicas)
    except RequestError as error:
        return str(error)
    return "no error"


def bad_id(rank: int) -> str:
    batch = pack(global_rows(0))
    batch.values[-1] = 11 + rank
    try:
        engine("sgd", 1)(batch)
    except RequestError as error:
        return str(error)
    return "no error"


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved: dict[str, Any] = {"outputs": {}, "tables": {}, "held": {}, "kept": {}, "traffic": {}, "accumulated": {}}
    for replicas in (n for n in range(1, world + 1) if world % n == 0):
        for name in OPTIMIZERS:
            for prefetch in (True, False):
                tables = engine(name, replicas, prefetch=prefetch)
                saved["outputs"][replicas, name, prefetch] = train(tables, rank, world)
                saved["tables"][replicas, name, prefetch] = tables.export_tables()
        counted = engine("sgd", replicas, prefetch=False)
        out = counted(pack(share(0, rank, world)))
        sum(vectors.sum() for vectors in out.values()).backward()
        counted.step()
        saved["traffic"][replicas] = counted.traffic.take()
        saved["held"][replicas] = [(piece.table, piece.start, piece.rows.stop) for piece in counted._slices]
        saved["kept"][replicas] = sum(bank.weight.numel() for bank in counted._banks)
        saved["accumulated"][replicas] = accumulated(engine("rowwise_adagrad", replicas), rank, world)

    source = torch_engine("adam")
    train(source, 0, 1)  # every rank the whole batch: exchange averages equal gradients
    moved = engine("adam", world)
    moved(pack(share(0, rank, world)))
    moved.step()  # leaves a gathering of the old weights under way
    moved.import_tables(source.export_tables())
    saved["moved"], saved["source"] = moved.export_tables(), source.export_tables()
    saved["first look-up after import"] = moved(pack(global_rows(0)))
    saved["wanted after import"] = source(pack(global_rows(0)))
    saved["refused"] = refused(3)
    saved["bad id"] = bad_id(rank)
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
