"""Ranks of test_checkpoint.py: save tables from one layout, load them into every other."""

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gem_core.spec import Embeddings, RunFailed, SparseOptimizer, TableSpec, load_object, table_state
from gem_core.train.checkpoint.pieces import dense_pieces, table_pieces
from gem_core.train.checkpoint.restore import model_tensors, optimizer_tensors, restore_dense, restore_tables
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_core.train.checkpoint.saver import Content, Saver, write_checkpoint
from gem_core.train.optim import adamw
from gem_core.train.world import World

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
HOST_ROWS = {"sharding": "table_wise", "tables": ({"pattern": "user*", "sharding": "table_row_wise"},)}
CUDA_LAYOUTS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "rowwise_adagrad": {
        "table_row_wise": ("torchrec", HOST_ROWS),
        "uvm": ("torchrec", {"sharding": "table_wise", "memory": "uvm"}),
        "uvm_cached": ("torchrec", {"sharding": "table_wise", "memory": "uvm_cached"}),
    },
    "sgd": {"grid": ("torchrec", {"sharding": "table_wise", "tables": ({"pattern": "user*", "sharding": "grid"},)})},
    "adam": {"table_wise": ("torchrec", {"sharding": "table_wise"}), "column_wise": ("torchrec", COLUMNS)},
}
"""What is there on GPUs beside ``LAYOUTS``."""


def layouts_of(rule: str, device: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """The layouts of an optimiser that the device has."""
    return LAYOUTS[rule] | (CUDA_LAYOUTS[rule] if device == "cuda" else {})


def build(rule: str, layout: str, world: int, device: str) -> Embeddings:
    engine, options = layouts_of(rule, device)[layout]
    options = {key: value for key, value in options.items() if key != "replicas" or world % value == 0}
    made: Embeddings = load_object(ENGINES[engine])(TABLES, SparseOptimizer(name=rule), device=device, seed=world, **options)
    return made


def whole(rule: str) -> dict[str, Tensor]:
    """What every tensor of every table holds, by ``tables/TABLE/TENSOR``."""
    torch.manual_seed(0)
    shapes = {f"tables/{table.name}/{name}": shape for table in TABLES for name, shape in table_state(table, SparseOptimizer(name=rule)).items()}
    return {name: torch.rand(shape) + 0.5 for name, shape in shapes.items() if shape}


def box(piece: Any) -> tuple[slice, ...]:
    """Where a slice lies in its whole tensor."""
    return tuple(slice(first, first + n) for first, n in zip((piece.start, piece.column), piece.tensor.shape))


def save_all(folder: Path, rank: int, world: int, device: str) -> None:
    for rule in LAYOUTS:
        values = whole(rule)
        for layout in layouts_of(rule, device):
            engine = build(rule, layout, world, device)
            for piece in engine.table_slices():
                piece.tensor.copy_(values[f"tables/{piece.table}/{piece.name}"][box(piece)])
            pieces = table_pieces([piece for piece in engine.table_slices() if piece.saves])
            assert layout != "torch" or bool(pieces) == (rank == 0), "every rank keeps the whole tables; one saves them"
            content = Content(step=1, pieces=pieces, trainer={"updates": UPDATES}, about={})
            write_checkpoint(folder / rule / f"{layout} on {world}{'' if device == 'cpu' else ' GPUs'}", content, keep=1, rank=rank)


def load_all(folder: Path, rank: int, world: int, device: str) -> None:
    """Every checkpoint into every layout; each rank compares what it keeps, to the bit."""
    for rule in LAYOUTS:
        values = whole(rule)
        for layout in layouts_of(rule, device):
            engine = build(rule, layout, world, device)
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


def dense(world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that has made one step, its parameters sharded over the ranks where there are several; 3 rows over 4 ranks leave one without any."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = adamw(model, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    model(torch.ones(4, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def dense_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return model_tensors(model) | optimizer_tensors(model, optimizer)


def save_dense(folder: Path, rank: int, world: int, device: str) -> None:
    pieces = dense_pieces(dense_tensors(*dense(world, seed=1)), leads=rank == 0)
    write_checkpoint(folder / f"dense{world}", Content(step=1, pieces=pieces, trainer={}, about={}), keep=1, rank=rank)


def load_dense(folder: Path, rank: int, world: int, device: str) -> None:
    """The checkpoints of 1, 2 and 4 ranks into a model that stands elsewhere; whole tensors equal the saved ones to the bit."""
    for path in sorted(folder.glob("dense*")):
        saved = find_checkpoint(path / "step-1")
        model, optimizer = dense(world, seed=2)
        restore_dense(model, saved, optimizer)
        found = dense_tensors(model, optimizer)
        assert set(found) == set(saved.index)
        assert any(isinstance(tensor, DTensor) for tensor in found.values()) == (world > 1)
        for name, tensor in found.items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            assert torch.equal(whole, saved.tensor(name)), f"{path.name} on {world}: {name}, rank {rank}"


def save_spoiled(folder: Path, rank: int, world: int, device: str) -> None:
    """The last rank's rows hold a NaN: every rank learns of it from the next save, and nothing is published."""
    saver = Saver(folder / "spoiled", World(rank, world), keep=2, told=lambda step, path: None)
    engine = build("sgd", "sharded_2d", world, device)

    def content(step: int) -> Content:
        return Content(step=step, pieces=table_pieces(engine.table_slices()), trainer={}, about={})

    saver.save(content(1), background=True)
    saver.wait()
    if rank == world - 1:
        engine.table_slices()[0].tensor[0, 0] = torch.nan
    saver.save(content(2), background=True)
    try:
        saver.save(content(3), background=True)
    except RunFailed as error:
        (folder / f"told{rank}.txt").write_text(str(error))
    saver.close()


Work = Callable[[Path, int, int, str], None]
"""What a rank does: folder, rank, number of ranks, device."""
_port = itertools.count(1)


def run(work: Work, world: int, folder: Path, device: str = "cpu") -> None:
    """Do this on so many ranks, which a fork server starts; with ``cuda`` each has a GPU of its own.

    Raises:
        AssertionError: a rank failed or hung; what it wrote is shown.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_checkpoint", "torch._dynamo", "gem_parallel.sparse.engine", "gem_parallel.sparse.sharded2d"])
    store = folder / f"store{next(_port)}"
    errors = [folder / f"error{rank}.txt" for rank in range(world)]
    processes = [context.Process(target=_rank, args=(work, rank, world, folder, store, errors[rank], device)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world, "\n".join(path.read_text()[-3000:] for path in errors if path.exists())


def _rank(work: Work, rank: int, world: int, folder: Path, store: Path, error: Path, device: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        if world > 1:
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
        work(folder, rank, world, device)
        if world > 1:
            dist.barrier()
    except BaseException:
        error.write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # without the teardown of torchrec's groups
