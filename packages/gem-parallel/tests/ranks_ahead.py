"""What ranks_sharded.py does for test_ahead.py: every engine with the ids of the next batch sent ahead, and without."""

from typing import Any

import torch
from rank_batches import STEPS, TABLES, pack, share
from torch import Tensor

from gem_core.spec import SparseOptimizer, load_object

TORCHREC, SHARDED_2D = "gem_parallel.sparse.engine:TorchRecEmbeddings", "gem_parallel.sparse.sharded2d:Sharded2DEmbeddings"
MIXED = ({"pattern": "it*", "sharding": "row_wise"}, {"pattern": "city", "sharding": "data_parallel"})
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "auto": (TORCHREC, "rowwise_adagrad", {}),
    "table_wise": (TORCHREC, "rowwise_adagrad", {"sharding": "table_wise"}),
    "row_wise": (TORCHREC, "sgd", {"sharding": "row_wise"}),
    "column_wise": (TORCHREC, "sgd", {"tables": ({"pattern": "item", "sharding": "column_wise"},)}),
    "mixed": (TORCHREC, "rowwise_adagrad", {"tables": MIXED}),
    "copies": (TORCHREC, "sgd", {"replicas": 2}),
    "sharded_2d": (SHARDED_2D, "adam", {}),
    "sharded_2d, 2 replicas": (SHARDED_2D, "rowwise_adagrad", {"replicas": 2}),
    "sharded_2d, gathered when asked": (SHARDED_2D, "sgd", {"replicas": 2, "prefetch": False}),
}


def engine(name: str) -> Any:
    load, optimizer, options = ENGINES[name]
    return load_object(load)(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3, **options)


def loss_of(out: dict[str, Tensor], world: int) -> Tensor:
    return world * sum(((vectors * torch.arange(1.0, vectors.shape[1] + 1) + vectors**2).sum() for vectors in out.values()), torch.zeros(()))


def train(engine: Any, rank: int, world: int, *, ahead: bool) -> list[dict[str, Tensor]]:
    """``STEPS`` steps, twice over: the ids of a step are sent after the forward pass of the one before, and an evaluation stands between epochs."""
    outputs = []
    for _ in range(2):
        sent = None
        for step in range(STEPS):
            engine.set_lr(0.2 / (step + 1))
            engine.zero_grad()
            out = engine(pack(share(step, rank, world)) if sent is None else sent)
            sent = engine.prefetch(pack(share(step + 1, rank, world))) if ahead and step + 1 < STEPS else None
            loss_of(out, world).backward()
            engine.step()
            outputs.append({key: vectors.detach().clone() for key, vectors in out.items()})
        with torch.no_grad():
            outputs.append(engine(pack(share(4, rank, world))))
    return outputs


def shared(rank: int, world: int, *, ahead: bool) -> list[dict[str, Tensor]]:
    """Two engines over the same batches; the one that was asked first lets go of what it got before the other has looked up."""
    first, second = engine("mixed"), engine("sharded_2d")
    outputs = []
    for step in range(STEPS):
        batch = pack(share(step, rank, world))
        asked = [part.prefetch(batch) if ahead else batch for part in (first, second)]
        del batch
        outputs.append(first(asked[0]))
        asked[0] = None
        loss_of(outputs[-1], world).backward()
        first.step()
        outputs.append(second(asked[1]))
        loss_of(outputs[-1], world).backward()
        second.step()
    return [{key: vectors.detach() for key, vectors in out.items()} for out in outputs]


def everything(rank: int, world: int) -> dict[Any, Any]:
    """Outputs, tables and bytes of every engine, by its name and whether ids were sent ahead."""
    saved: dict[Any, Any] = {}
    for name in ENGINES:
        for ahead in (True, False):
            made = engine(name)
            outputs = train(made, rank, world, ahead=ahead)
            slices = {(part.table, part.name, part.start, part.column): part.tensor.clone() for part in made.table_slices()}
            saved[name, ahead] = {"outputs": outputs, "slices": slices, "updates": made.table_updates(), "sent": made.traffic.take()}
    saved["shared"] = [shared(rank, world, ahead=ahead) for ahead in (True, False)]
    return saved
