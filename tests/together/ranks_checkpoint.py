"""Ranks of test_checkpoint.py: save tables from one layout, load them into every other."""

import itertools
import multiprocessing
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_core.spec import Embeddings, SparseOptimizer, TableSpec, load_object, table_state
from gem_core.train.checkpoint.pieces import table_pieces
from gem_core.train.checkpoint.restore import restore_tables
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.checkpoint.saver import Content, write_checkpoint

LIMIT = 240
UPDATES = 7
TABLES = (
    TableSpec(name="item", rows=11, dim=8, features=("item", "history"), init_scale=0.1),
    TableSpec(name="city", rows=2, dim=4, features=("city",), pooling="mean", init_scale=0.1),
    TableSpec(name="user.id", rows=5, dim=8, features=("user",), pooling="sum", init_scale=0.1),
)
ENGINES = {
    "torch": "gem_core.builtin.embedding:TorchEmbeddings",
    "torchrec": "gem_parallel.sparse.engine:TorchRecEmbeddings",
    "sharded_2d": "gem_parallel.sparse.sharded2d:Sharded2DEmbeddings",
}
COLUMNS = {"sharding": "table_wise", "tables": ({"pattern": "item", "sharding": "column_wise"},)}
LAYOUTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "rowwise_adagrad": {
        "torch": ("torch", {}),
        "table_wise": ("torchrec", {"sharding": "table_wise"}),
        "row_wise": ("torchrec", {"sharding": "row_wise", "tables": ({"pattern": "city", "sharding": "table_wise"},)}),  # city: 2 rows
        "data_parallel": ("torchrec", {"sharding": "data_parallel"}),
        "sharded_2d": ("sharded_2d", {}),
        "sharded_2d of 2 replicas": ("sharded_2d", {"replicas": 2}),
    },
    "sgd": {"torch": ("torch", {}), "column_wise": ("torchrec", COLUMNS), "sharded_2d": ("sharded_2d", {})},
    "adam": {"torch": ("torch", {}), "sharded_2d": ("sharded_2d", {})},
}
"""Layouts by optimiser. fbgemm has Adam on CUDA only, and columns apart with row-wise AdaGrad would need several states a row."""


def build(rule: str, layout: str, world: int) -> Embeddings:
    engine, options = LAYOUTS[rule][layout]
    options = {key: value for key, value in options.items() if key != "replicas" or world % value == 0}
    made: Embeddings = load_object(ENGINES[engine])(TABLES, SparseOptimizer(name=rule), device="cpu", seed=world, **options)
    return made


def whole(rule: str) -> dict[str, Tensor]:
    """What every tensor of every table holds, by ``tables/TABLE/TENSOR``."""
    torch.manual_seed(0)
    shapes = {f"tables/{table.name}/{name}": shape for table in TABLES for name, shape in table_state(table, SparseOptimizer(name=rule)).items()}
    return {name: torch.rand(shape) + 0.5 for name, shape in shapes.items() if shape}


def box(piece: Any) -> tuple[slice, ...]:
    """Where a slice lies in its whole tensor."""
    return tuple(slice(first, first + n) for first, n in zip((piece.start, piece.column), piece.tensor.shape))


def save_all(folder: Path, rank: int, world: int) -> None:
    for rule, layouts in LAYOUTS.items():
        values = whole(rule)
        for layout in layouts:
            engine = build(rule, layout, world)
            for piece in engine.table_slices():
                piece.tensor.copy_(values[f"tables/{piece.table}/{piece.name}"][box(piece)])
            pieces = table_pieces([piece for piece in engine.table_slices() if piece.saves])
            content = Content(step=1, pieces=pieces, trainer={"updates": UPDATES}, about={})
            write_checkpoint(folder / rule / f"{layout} on {world}", content, keep=1, rank=rank)


def load_all(folder: Path, rank: int, world: int) -> None:
    """Every checkpoint into every layout; each rank compares what it keeps, to the bit."""
    for rule, layouts in LAYOUTS.items():
        values = whole(rule)
        for layout in layouts:
            engine = build(rule, layout, world)
            for path in sorted((folder / rule).iterdir()):
                for piece in engine.table_slices():
                    piece.tensor.fill_(torch.nan)
                saved = find_checkpoint(path / "step-1")
                restore_tables(engine, saved, updates=saved.trainer()["updates"])
                assert engine.table_updates() == UPDATES
                for piece in engine.table_slices():
                    expected = values[f"tables/{piece.table}/{piece.name}"][box(piece)]
                    assert torch.equal(piece.tensor.cpu(), expected), f"{path.name} into {layout} on {world}: {piece.table} {piece.name}, rank {rank}"
                with (folder / f"loaded{rank}.txt").open("a") as file:
                    file.write(f"{rule}: {path.name} into {layout} on {world}\n")


WORK = {"save": save_all, "load": load_all}
_port = itertools.count(1)


def run(work: str, world: int, folder: Path) -> None:
    """Do one of ``WORK`` on so many ranks, which a fork server starts.

    Raises:
        AssertionError: a rank failed or hung; what it wrote is shown.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_checkpoint", "gem_parallel.sparse.engine", "gem_parallel.sparse.sharded2d"])
    store = folder / f"store{next(_port)}"
    errors = [folder / f"error{rank}.txt" for rank in range(world)]
    processes = [context.Process(target=_rank, args=(work, rank, world, folder, store, errors[rank])) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, "\n".join(path.read_text()[-3000:] for path in errors if path.exists())


def _rank(work: str, rank: int, world: int, folder: Path, store: Path, error: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    try:
        if world > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        WORK[work](folder, rank, world)
        if world > 1:
            dist.barrier()
    except BaseException:
        error.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # without the teardown of torchrec's groups
