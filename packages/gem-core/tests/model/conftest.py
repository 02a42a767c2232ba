"""Small schemas, batches and a plain embedding engine for the model tests."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec import DataSchema, DenseFeature, IdFeature, SequenceFeature, TableSpec, Task

torch.set_num_threads(1)

CLICKS = SequenceFeature(
    name="clicks",
    ids=(IdFeature(name="item", cardinality=20), IdFeature(name="shop", cardinality=7)),
    dense=(DenseFeature(name="price"),),
    time=True,
    max_length=9,
)
VIEWS = SequenceFeature(name="views", ids=(IdFeature(name="page", cardinality=11),), time=True, max_length=5)
FULL = DataSchema(
    ids=(
        IdFeature(name="user", cardinality=13),
        IdFeature(name="item", cardinality=20),
        IdFeature(name="tags", cardinality=6, multi=True),
        IdFeature(name="country", cardinality=3),
    ),
    dense=(DenseFeature(name="age"), DenseFeature(name="count"), DenseFeature(name="vector", width=3)),
    sequences=(CLICKS, VIEWS),
    tasks=(Task(name="ctr"), Task(name="cvr", condition="ctr")),
)
SCHEMAS = {
    "full": FULL,
    "one_group": DataSchema(ids=FULL.ids, sequences=(CLICKS,), tasks=FULL.tasks),
    "sequences_only": DataSchema(sequences=(CLICKS, VIEWS), tasks=FULL.tasks),
    "rows_only": DataSchema(ids=FULL.ids, dense=FULL.dense, tasks=FULL.tasks),
    "numbers_only": DataSchema(dense=FULL.dense[:2], tasks=FULL.tasks[:1]),
    "vector_only": DataSchema(dense=FULL.dense[2:], tasks=FULL.tasks[:1]),
}
NOW = 1_650_000_000


def make_batch(schema: DataSchema, lengths: Iterable[Iterable[int]], seed: int = 0) -> Batch:
    """A random batch; ``lengths`` holds each row's number of events in every group of the schema."""
    wanted = [list(row) for row in lengths]
    rows, draw = len(wanted), torch.Generator().manual_seed(seed)

    def integers(high: int, count: int) -> Tensor:
        return torch.randint(0, high, (count,), generator=draw)

    columns, dense, times, offsets = {}, {}, {}, {}
    for feature in schema.ids:
        counts = integers(4, rows) if feature.multi else torch.ones(rows, dtype=torch.int64)
        columns[feature.name] = Jagged(integers(feature.cardinality, int(counts.sum())), lengths_to_offsets(counts), 0)
    for i, group in enumerate(schema.sequences):
        counts = torch.tensor([row[i] for row in wanted], dtype=torch.int64)
        start, events = lengths_to_offsets(counts), int(counts.sum())
        offsets[group.name] = Jagged(torch.empty(0), start, int(counts.max()) if rows else 0)
        for feature in group.ids:
            columns[f"{group.name}.{feature.name}"] = Jagged(integers(feature.cardinality, events), start, 0)
        for number in group.dense:
            dense[f"{group.name}.{number.name}"] = torch.randn(events, number.width, generator=draw)
        if group.time:
            times[group.name] = NOW - integers(10_000_000, events)
    return Batch(
        rows=rows,
        ids=KeyedJagged.from_columns(columns, rows),
        labels={task.name: integers(2, rows).float() for task in schema.tasks},
        dense={feature.name: 3 * torch.randn(rows, feature.width, generator=draw) for feature in schema.dense},
        event_dense=dense,
        event_time=times,
        event_offsets=offsets,
        masks={},
        weights={},
        time=NOW + integers(1000, rows),
    )


def take_rows(schema: DataSchema, batch: Batch, rows: list[int]) -> Batch:
    """The batch of only these rows, in this order."""

    def pick(column: Jagged) -> tuple[Jagged, Tensor]:
        begin, end = column.offsets[:-1], column.offsets[1:]
        index = torch.cat([torch.arange(int(begin[r]), int(end[r])) for r in rows] or [torch.empty(0, dtype=torch.int64)])
        counts = column.lengths()[rows]
        return Jagged(index, lengths_to_offsets(counts), int(counts.max()) if rows else 0), index

    columns = {}
    for key in batch.ids.keys:
        part, index = pick(batch.ids[key])
        columns[key] = Jagged(batch.ids[key].values[index], part.offsets, part.max_length)
    dense, times, offsets = {}, {}, {}
    for group in schema.sequences:
        part, index = pick(batch.event_offsets[group.name])
        offsets[group.name] = Jagged(torch.empty(0), part.offsets, part.max_length)
        dense |= {f"{group.name}.{f.name}": batch.event_dense[f"{group.name}.{f.name}"][index] for f in group.dense}
        if group.time:
            times[group.name] = batch.event_time[group.name][index]
    return Batch(
        rows=len(rows),
        ids=KeyedJagged.from_columns(columns, len(rows)),
        labels={task: label[rows] for task, label in batch.labels.items()},
        dense={name: value[rows] for name, value in batch.dense.items()},
        event_dense=dense,
        event_time=times,
        event_offsets=offsets,
        masks={},
        weights={},
        time=None if batch.time is None else batch.time[rows],
    )


class Lookup(nn.Module):
    """Plain embedding tables: what an engine gives, for CPU tests."""

    def __init__(self, tables: Iterable[TableSpec]) -> None:
        super().__init__()
        self.specs = list(tables)
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(t.rows, t.dim).uniform_(-t.init_scale, t.init_scale)) for t in self.specs)

    def forward(self, ids: KeyedJagged) -> dict[str, Tensor]:
        out = {}
        for spec, weight in zip(self.specs, self.weights):
            for key in spec.features:
                found = weight[ids[key].values]
                if spec.pooling == "mean":
                    parts = torch.tensor_split(found, ids[key].offsets[1:-1])[: ids.rows]
                    found = torch.stack([part.sum(0) / max(len(part), 1) for part in parts]) if ids.rows else found[:0]
                out[key] = found
        return out


def make_model(cls: Any, schema: DataSchema, options: Any, seed: int = 0) -> tuple[Any, Lookup]:
    """A model in evaluation mode and its tables."""
    torch.manual_seed(seed)
    return cls(schema, options).eval(), Lookup(cls.tables(schema, options))


def bce(logits: dict[str, Tensor], batch: Batch) -> Tensor:
    """Mean loss over all tasks and rows."""
    return torch.stack([nn.functional.binary_cross_entropy_with_logits(logit, batch.labels[task]) for task, logit in logits.items()]).mean()


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The helpers of this file."""
    return sys.modules[__name__]
