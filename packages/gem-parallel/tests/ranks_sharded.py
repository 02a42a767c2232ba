"""Run by test_ranks.py, once for each rank: sharded tables and data-parallel dense layers on this rank's rows; saves what came out.

usage: ranks_sharded.py FOLDER RANK WORLD
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec import ParallelContext, RequestError, SparseOptimizer, TableSpec, Topology, load_object
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.sparse.engine import TorchRecEmbeddings

TABLES = (
    TableSpec(name="item", rows=31, dim=8, features=("item", "history.item"), init_scale=0.5),
    TableSpec(name="event.type", rows=5, dim=4, features=("history.type",), init_scale=0.5),
    TableSpec(name="tags", rows=11, dim=4, features=("tags", "more.tags"), pooling="mean", init_scale=0.5),
    TableSpec(name="city", rows=12, dim=8, features=("city",), pooling="sum", init_scale=0.5),
)
KEYS = ("tags", "item", "history.item", "history.type", "city", "more.tags")
ROWS, STEPS = 6, 5
SHARDINGS = ("auto", "table_wise", "row_wise")
OPTIMIZERS = ("rowwise_adagrad", "sgd")


def global_rows(step: int) -> list[dict[str, list[int]]]:
    g = torch.Generator().manual_seed(step)

    def ids(high: int, most: int) -> list[int]:
        return torch.randint(0, high, (int(torch.randint(0, most + 1, (1,), generator=g)),), generator=g).tolist()

    rows = [
        {"tags": ids(11, 3), "item": ids(31, 1), "history.item": ids(31, 9), "history.type": ids(5, 4), "city": ids(12, 1), "more.tags": ids(11, 2)}
        for _ in range(ROWS)
    ]
    if step == 2:  # the second rank has no id of one feature
        rows = [{**row, "history.item": row["history.item"] if i < ROWS // 2 else []} for i, row in enumerate(rows)]
    return rows


def share(step: int, rank: int, world: int) -> list[dict[str, list[int]]]:
    """This rank's rows: halves, but none at all for the second rank at step 1 and four of six at step 3."""
    cut = {1: ROWS, 3: 2}.get(step, ROWS // 2)
    low, high = (0, ROWS) if world == 1 else ((0, cut), (cut, ROWS))[rank]
    return global_rows(step)[low:high]


def pack(rows: list[dict[str, list[int]]]) -> KeyedJagged:
    columns = {}
    for key in KEYS:
        lengths = torch.tensor([len(row[key]) for row in rows], dtype=torch.int64)
        columns[key] = Jagged(torch.tensor([i for row in rows for i in row[key]]), lengths_to_offsets(lengths), 9)
    return KeyedJagged.from_columns(columns, len(rows))


def torch_engine(optimizer: str) -> Any:
    return load_object("gem_core.builtin.embedding:TorchEmbeddings")(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3)


def sharded(optimizer: str, sharding: str) -> TorchRecEmbeddings:
    return TorchRecEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3, sharding=sharding)


def train(engine: Any, rank: int, world: int) -> list[dict[str, Tensor]]:
    """Take ``STEPS`` steps on the global batches' summed loss; return this rank's outputs of each step."""
    outputs = []
    for step in range(STEPS):
        engine.set_lr(0.2 / (step + 1))
        engine.zero_grad()
        out = engine(pack(share(step, rank, world)))
        loss = sum((vectors * torch.arange(1.0, vectors.shape[1] + 1) + vectors**2).sum() for vectors in out.values())
        (loss * world).backward()
        engine.step()
        outputs.append({key: vectors.detach().clone() for key, vectors in out.items()})
    return outputs


class Dense(nn.Module):
    """A dense part that leaves out a layer and most look-ups on a rank without rows, and has a layer that nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.history, self.unused = nn.Linear(24, 1), nn.Linear(8, 1), nn.Linear(2, 2)
        self.slot = object()  # stands for a kernel slot: a plain attribute
        self.register_buffer("drawn", torch.rand(3))

    def forward(self, embedded: dict[str, Tensor]) -> Tensor:
        pooled = torch.cat([embedded["tags"], embedded["city"], embedded["more.tags"], embedded["city"]], 1)
        total = self.head(pooled).square().sum()
        if not pooled.shape[0]:
            return total
        return total + self.history(embedded["history.item"]).square().sum() + sum(vectors.sum() for vectors in embedded.values())


def train_both(rank: int, world: int, engine: Any) -> dict[str, Tensor]:
    """Train the dense part (``ddp``) together with the tables; return every weight."""
    torch.manual_seed(rank)  # ranks start apart; ddp's broadcast makes them equal
    model = Dense()
    slot = model.slot
    strategy = DataParallel()
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    dense = strategy.apply(model, context)
    assert (dense is model) == (world == 1)
    assert next(m for m in dense.modules() if isinstance(m, Dense)).slot is slot
    assert strategy.describe() == {"strategy": "ddp", "world": world}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        engine.zero_grad()
        (dense(engine(pack(share(step, rank, world)))) * world).backward()
        optimizer.step()
        engine.step()
        with torch.no_grad():  # evaluation of unequal numbers of batches, as ranks have
            for _ in range(rank):
                dense({key: torch.zeros(2, dim) for key, dim in (("tags", 4), ("city", 8), ("more.tags", 4), ("history.item", 8))})
    trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return trained | {f"table {name}": tensors["weight"] for name, tensors in engine.export_tables().items()}


def bad_id(rank: int) -> str:
    batch = pack(global_rows(0))
    batch.values[-1] = 11 + rank
    try:
        sharded("sgd", "auto")(batch)
    except RequestError as error:
        return str(error)
    return "no error"


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved: dict[str, Any] = {"places": {}, "tables": {}, "outputs": {}, "held": {}}
    for sharding in SHARDINGS:
        for name in OPTIMIZERS:
            engine = sharded(name, sharding)
            saved["outputs"][sharding, name] = train(engine, rank, world)
            saved["tables"][sharding, name] = engine.export_tables()
            saved["places"][sharding] = engine.places
            saved["held"][sharding] = [(piece.table, piece.start, piece.rows.stop) for piece in engine._slices]

    source = torch_engine("rowwise_adagrad")
    train(source, 0, 1)  # every rank the whole batch: exchange averages equal gradients
    moved = sharded("rowwise_adagrad", "auto")
    moved.import_tables(source.export_tables())
    back = torch_engine("rowwise_adagrad")
    back.import_tables(moved.export_tables())
    saved["moved"], saved["back"], saved["source"] = moved.export_tables(), back.export_tables(), source.export_tables()

    saved["dense and torchrec"] = train_both(rank, world, sharded("rowwise_adagrad", "auto"))
    saved["dense and torch"] = train_both(rank, world, torch_engine("rowwise_adagrad"))
    saved["bad id"] = bad_id(rank)
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
