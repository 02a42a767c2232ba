"""A small plugin for the trainer's tests: a source and a model whose every number is known, and data parallelism by torch's DDP."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from gem_core.batch import Batch, Jagged, KeyedJagged, epoch_batches
from gem_core.spec import (
    DataSchema,
    DataSource,
    DenseFeature,
    IdFeature,
    KernelRequest,
    ModelSpec,
    ParallelContext,
    ParallelStrategy,
    PrecisionRecipe,
    Shard,
    TableSpec,
    Task,
    hookimpl,
)

ITEMS, WIDTH, DIM = 20, 3, 4


class ProbeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    hidden: int = 8
    dropout: float = 0.0


class Probe(nn.Module):
    """Two linear layers over a pooled item vector and three numbers. ``seen`` counts the rows of every forward pass."""

    scale: Tensor

    def __init__(self, schema: DataSchema, options: ProbeOptions) -> None:
        super().__init__()
        self.tasks = [task.name for task in schema.tasks]
        self.first = nn.Linear(WIDTH + DIM, options.hidden)
        self.norm = nn.LayerNorm(options.hidden)
        self.drop = nn.Dropout(options.dropout)
        self.last = nn.Linear(options.hidden, len(self.tasks))
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)
        self.seen: list[int] = []

    @classmethod
    def tables(cls, schema: DataSchema, options: ProbeOptions) -> Sequence[TableSpec]:
        return [TableSpec(name="item", rows=ITEMS, dim=DIM, features=("item",), pooling="sum", init_scale=0.1)]

    def forward(self, batch: Batch, embedded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.seen.append(batch.rows)
        x = torch.cat([embedded["item"], self.scale * batch.dense["x"]], dim=1)
        out = self.last(self.drop(torch.nn.functional.gelu(self.norm(self.first(x)))))
        return {name: out[:, i] for i, name in enumerate(self.tasks)}

    def kernel_requests(self, *, device: str, dtype: str, arch: int | None, backward: bool) -> Sequence[KernelRequest]:
        return []

    def flops(self, batch: Batch) -> int:
        return 2 * batch.rows * (self.first.weight.numel() + self.last.weight.numel())


class FakeSource:
    """Generated rows. One item id, three numbers, tasks ``ctr`` and ``cvr`` (under a click), a group of five rows each.

    Args:
        rows: of the training split; the test split has a third.
        seed: of the data.
        shares: ``{rank: batches}``: ranks read so many batches of ``batch_size`` rows each instead of a share of the global ones.
        nan_row: a training row whose number is NaN; -1 for none.
        bad_label: a training row whose label is 2; -1 for none.
        one_class: whether no test row is positive.
    """

    def __init__(
        self,
        rows: int = 96,
        seed: int = 0,
        shares: Mapping[str, int] | None = None,
        nan_row: int = -1,
        bad_label: int = -1,
        one_class: bool = False,
    ) -> None:
        made = torch.Generator().manual_seed(seed)
        self.shares = {int(rank): count for rank, count in (shares or {}).items()}
        total = rows + rows // 3
        self.split = {"train": torch.arange(rows), "test": torch.arange(rows, total)}
        self.item = torch.randint(1, ITEMS, (total,), generator=made)
        self.x = torch.randn(total, WIDTH, generator=made)
        score = self.x.sum(1) + (self.item % 3 - 1).float()
        self.ctr = (score + torch.randn(total, generator=made) > 0).float()
        self.cvr = (self.ctr * (score + torch.randn(total, generator=made) > 1)).float()
        if one_class:
            self.ctr[rows:] = self.cvr[rows:] = 0.0
        if nan_row >= 0:
            self.x[nan_row] = float("nan")
        if bad_label >= 0:
            self.ctr[bad_label] = 2.0

    def schema(self) -> DataSchema:
        return DataSchema(
            ids=(IdFeature(name="item", cardinality=ITEMS),),
            dense=(DenseFeature(name="x", width=WIDTH),),
            tasks=(Task(name="ctr"), Task(name="cvr", condition="ctr", weight=0.5)),
            group=True,
        )

    def rows(self, split: str) -> int:
        return self.split[split].numel()

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        if split == "train" and self.shares:
            begin = sum(self.shares[rank] for rank in range(shard.rank)) * batch_size
            for i in range(start, self.shares[shard.rank]):
                yield self.batch(torch.arange(begin + i * batch_size, begin + (i + 1) * batch_size))
            return
        index = self.split[split]
        for at, _ in epoch_batches(index.numel(), batch_size=batch_size, shard=shard, seed=seed, epoch=epoch, start=start):
            yield self.batch(index[at])

    def batch(self, at: Tensor) -> Batch:
        rows = at.numel()
        column = Jagged(self.item[at], torch.arange(rows + 1), 1 if rows else 0)
        return Batch(
            rows=rows,
            ids=KeyedJagged.from_columns({"item": column}, rows),
            labels={"ctr": self.ctr[at], "cvr": self.cvr[at]},
            dense={"x": self.x[at]},
            event_dense={},
            event_time={},
            event_offsets={},
            masks={},
            weights={"ctr": 1.0 + (at % 4).float()},
            groups=at // 5,
        )

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        return {"constant": {"ctr": {"auc": 0.5, "ne": 1.0}}}

    def ledger(self) -> dict[str, int]:
        kept = {split: self.rows(split) for split in self.split}
        return {"read": sum(kept.values()), **kept}


class ResumableFake(FakeSource):
    """Rows are dealt to ranks one by one from those that are left; what was trained is appended to ``told`` as lines ``epoch row``."""

    def __init__(self, told: str, **options: Any) -> None:
        super().__init__(**options)
        self.told = Path(told)
        self.epoch, self.done = 0, set[int]()

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        assert start == 0
        if split == "train":
            self.epoch, self.done = epoch, self.done if epoch == self.epoch else set()
        gone = self.done if split == "train" else set()
        left = torch.tensor([row for row in self.split[split].tolist() if row not in gone], dtype=torch.int64)
        for at, _ in epoch_batches(left.numel(), batch_size=batch_size, shard=shard, seed=seed, epoch=epoch):
            yield replace(self.batch(left[at]), origin=left[at])

    def trained(self, batches: Sequence[Batch]) -> None:
        rows = [row for batch in batches if batch.origin is not None for row in batch.origin.tolist()]
        self.done.update(rows)
        with self.told.open("a") as file:
            file.writelines(f"{self.epoch} {row}\n" for row in rows)

    def cursor(self) -> Mapping[str, Any]:
        return {"epoch": self.epoch, "done": sorted(self.done)}

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        self.epoch, self.done = states[0]["epoch"], {row for state in states for row in state["done"]}


class Ddp:
    """Data parallelism by torch's own wrapper."""

    def apply(self, module: Any, context: ParallelContext) -> Any:
        return nn.parallel.DistributedDataParallel(module)

    def describe(self) -> Mapping[str, Any]:
        return {"strategy": "fake ddp"}


@hookimpl
def gem_data_sources() -> Sequence[DataSource]:
    return [
        DataSource(name="fake", summary="known rows", load="gem_train_fakes:FakeSource"),
        DataSource(name="fake-resumable", summary="known rows and a cursor", load="gem_train_fakes:ResumableFake"),
    ]


@hookimpl
def gem_models() -> Sequence[ModelSpec]:
    return [ModelSpec(name="probe", summary="two layers", load="gem_train_fakes:Probe", options="gem_train_fakes:ProbeOptions")]


@hookimpl
def gem_precision_recipes() -> Sequence[PrecisionRecipe]:
    return [PrecisionRecipe(name="rounds", summary="whole numbers", load="gem_paired_fakes:Rounds")]


@hookimpl
def gem_parallel_strategies() -> Sequence[ParallelStrategy]:
    return [
        ParallelStrategy(name="fake-ddp", stage="dense", summary="torch DDP", load="gem_train_fakes:Ddp"),
        ParallelStrategy(
            name="fake-exchange", stage="dense", summary="pairs", load="gem_ledger_fakes:Exchange", options="gem_ledger_fakes:ExchangeOptions"
        ),
    ]
