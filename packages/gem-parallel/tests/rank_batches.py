"""Tables, global batches and ranks' shares that the scripts run on ranks have in common."""

from typing import Any

import torch
from torch import Tensor

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec import SparseOptimizer, TableSpec, load_object

TABLES = (
    TableSpec(name="item", rows=31, dim=8, features=("item", "history.item"), init_scale=0.5),
    TableSpec(name="event.type", rows=5, dim=4, features=("history.type",), init_scale=0.5),
    TableSpec(name="tags", rows=11, dim=4, features=("tags", "more.tags"), pooling="mean", init_scale=0.5),
    TableSpec(name="city", rows=12, dim=8, features=("city",), pooling="sum", init_scale=0.5),
)
KEYS = ("tags", "item", "history.item", "history.type", "city", "more.tags")
ROWS, STEPS = 6, 5


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
    """This rank's rows: even parts, but at step 1 the first rank has them all, and at step 3 the first two rows, the last rank having the rest."""
    cuts = {1: [0, *[ROWS] * world], 3: [0, *[2] * (world - 1), ROWS]}.get(step, [ROWS * r // world for r in range(world + 1)])
    return global_rows(step)[cuts[rank] : cuts[rank + 1]]


def pack(rows: list[dict[str, list[int]]]) -> KeyedJagged:
    columns = {}
    for key in KEYS:
        lengths = torch.tensor([len(row[key]) for row in rows], dtype=torch.int64)
        columns[key] = Jagged(torch.tensor([i for row in rows for i in row[key]]), lengths_to_offsets(lengths), 9)
    return KeyedJagged.from_columns(columns, len(rows))


def torch_engine(optimizer: str) -> Any:
    return load_object("gem_core.builtin.embedding:TorchEmbeddings")(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3)


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
