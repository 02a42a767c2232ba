"""Run by test_ranks.py, test_layouts.py and test_ahead.py, once for each rank; saves what came out.

Sharded tables, and on two ranks dense layers beside them.

usage: ranks_sharded.py FOLDER RANK WORLD
"""

import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import ranks_ahead
import torch
import torch.distributed as dist
from rank_batches import STEPS, TABLES, global_rows, pack, share, torch_engine, train
from torch import Tensor, nn

from gem_core.spec import ParallelContext, RequestError, SparseOptimizer, Topology
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.options import TableRule
from gem_parallel.sparse.placement import Cluster, Place, place, wishes
from gem_parallel.sparse.planfile import write_plan

SHARDINGS = ("auto", "table_wise", "row_wise", "data_parallel")
OPTIMIZERS = ("rowwise_adagrad", "sgd")
COLUMNS = ({"pattern": "item", "sharding": "column_wise"}, {"pattern": "c*", "sharding": "column_wise"})
MIXED = ({"pattern": "it*", "sharding": "row_wise"}, {"pattern": "city", "sharding": "data_parallel"}, {"pattern": "*", "sharding": "table_wise"})
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "columns": ("sgd", {"tables": COLUMNS}),
    "mixed": ("rowwise_adagrad", {"tables": MIXED}),
    "planned": ("rowwise_adagrad", {"plan": "plan.toml"}),
    "copies": ("sgd", {"sharding": "row_wise", "replicas": 2}),
    "scaled copies": ("rowwise_adagrad", {"replicas": 2, "tables": ({"pattern": "city", "sharding": "data_parallel"},)}),
    "fp16 rows": ("sgd", {"dtype": "fp16"}),
    "16-bit wire": ("sgd", {"sharding": "row_wise", "forward_comm": "fp16", "backward_comm": "bf16"}),
    "bf16 wire": ("sgd", {"sharding": "table_wise", "forward_comm": "bf16", "backward_comm": "fp16"}),
}
"""Optimiser and options by name."""
MEASURED: dict[str, tuple[str, dict[str, Any]]] = {
    "table_wise": ("rowwise_adagrad", {"sharding": "table_wise"}),
    "row_wise": ("rowwise_adagrad", {"sharding": "row_wise", "dtype": "fp16"}),
}
"""Layouts whose bytes are counted beside two of ``LAYOUTS``."""


def sharded(optimizer: str, sharding: str = "auto", **options: Any) -> TorchRecEmbeddings:
    return TorchRecEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3, sharding=sharding, **options)


def plain(places: dict[str, Place]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (placed.sharding, placed.ranks) for name, placed in places.items()}


def layouts(folder: Path, rank: int, world: int) -> dict[str, Any]:
    """Train with every layout; outputs, tables, what is held and bytes sent."""
    cluster, wanted = Cluster(world=world, local=world, device="cpu"), wishes(TABLES, "auto", "device", [TableRule(**rule) for rule in MIXED])
    places = place(TABLES, wanted, SparseOptimizer(), cluster)
    (folder / f"plan{rank}.toml").write_text(write_plan(places, TABLES, cluster))
    saved = {}
    for name, (optimizer, options) in LAYOUTS.items():
        if "plan" in options:
            options = {"plan": str(folder / f"plan{rank}.toml")}
        engine = sharded(optimizer, **options)
        outputs = train(engine, rank, world)
        held = [
            (part.table, part.start, part.start + part.tensor.shape[0], part.column, part.tensor.shape[1])
            for part in engine.table_slices()
            if part.saves and part.name == "weight"
        ]
        saved[name] = {
            "outputs": outputs,
            "tables": engine.export_tables(),
            "held": held,
            "places": plain(engine.places),
            "sent": engine.traffic.take(),
        }
        moved = torch_engine(optimizer)
        moved.import_tables(saved[name]["tables"])
        again = sharded(optimizer, **options)
        again.import_tables(moved.export_tables())
        saved[name]["again"] = again.export_tables()
    saved["refused"] = refused(world)
    return saved


def measured(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Bytes that torchrec sends in one step, by layout; every rank looks up the same rows, so that averages over ranks are exact."""
    counted: dict[str, dict[str, int]] = {}
    whole, phase = dist.all_to_all_single, ["vectors"]

    def counting(*given: Any, **words: Any) -> Any:
        values, splits = words.get("input", given[1] if len(given) > 1 else None), words.get("input_split_sizes")
        splits = given[3] if len(given) > 3 else splits
        if splits is not None:  # without: the counts that come first
            row = values[:1].numel() * values.element_size()
            sent[phase[0] if values.is_floating_point() else "ids"] += (sum(splits) - splits[rank]) * row
        return whole(*given, **words)

    dist.all_to_all_single = counting  # type: ignore[assignment]
    for name, (optimizer, options) in {**MEASURED, "mixed": LAYOUTS["mixed"], "columns": LAYOUTS["columns"]}.items():
        engine = sharded(optimizer, **options)
        sent = counted[name] = Counter()
        phase[0] = "vectors"
        out = engine(pack(global_rows(0)))
        phase[0] = "gradients"
        torch.stack([vectors.sum() for vectors in out.values()]).sum().backward()
        engine.step()
        counted[name] = dict(sent) | engine.traffic.take()
        counted[name]["held"] = sum(t.numel() * t.element_size() for piece in engine._slices for t in piece.tensors.values())
    dist.all_to_all_single = whole
    return counted


def refused(world: int) -> dict[str, str]:
    out = {}
    asked = {
        "host rows": {"tables": ({"pattern": "city", "sharding": "table_row_wise"},)},
        "grid": {"tables": ({"pattern": "item", "sharding": "grid"},)},
        "columns": {"sharding": "column_wise"},
        "planner": {"sharding": "planner"},
        "replicas": {"replicas": 3},
        "copies in 16 bits": {"sharding": "data_parallel", "dtype": "fp16"},
    }
    for name, options in asked.items():
        try:
            sharded("rowwise_adagrad", **options)
        except RequestError as error:
            out[name] = str(error)
    return out


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


def whole(rank: int, world: int) -> dict[str, Any]:
    """Layouts of all tables with both optimisers, tables that move, and dense layers."""
    saved: dict[str, Any] = {"places": {}, "tables": {}, "outputs": {}, "held": {}}
    for sharding in SHARDINGS:
        for name in OPTIMIZERS:
            engine = sharded(name, sharding)
            saved["outputs"][sharding, name] = train(engine, rank, world)
            saved["tables"][sharding, name] = engine.export_tables()
            saved["places"][sharding] = plain(engine.places)
            saved["held"][sharding] = [(piece.table, piece.start, piece.rows.stop) for piece in engine._slices if piece.saves]

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
    return saved


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved: dict[str, Any] = {"layouts": layouts(folder, rank, world)}
    saved["measured"] = measured(rank, world)
    saved["ahead"] = ranks_ahead.everything(rank, world)
    if world == 2:
        saved |= whole(rank, world)
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
