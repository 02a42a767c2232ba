"""A source over a table in memory: splits, batches, ledger, unknown-id counts."""

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gem_core.batch import Batch, epoch_batches
from gem_core.spec import DataSchema, RequestError, Shard
from gem_data.collate import Table
from gem_data.ledger import Ledger
from gem_data.splits import OneClassSplit

SPLITS = ("train", "test")


class TableSource:
    """A ``gem_core.spec.data.Source`` whose rows lie in memory.

    Args:
        name: the source's name, for messages.
        table: the rows of both splits.
        splits: ``{"train": index, "test": index}``, int64 row numbers in the source's own order.
        ledger: the account of the rows read; the kept rows are entered here.

    Raises:
        RequestError: the ledger does not add up, or a split has no row.
    """

    def __init__(self, name: str, table: Table, splits: Mapping[str, Tensor], ledger: Ledger) -> None:
        self.name = name
        self.table = table
        self._splits = {split: splits[split] for split in SPLITS}
        for split, index in self._splits.items():
            ledger.keep(split, index.numel())
        self._ledger = ledger.counts()
        for split, index in self._splits.items():
            self._check_split(split, index)

    def _check_split(self, split: str, index: Tensor) -> None:
        if not index.numel():
            raise RequestError(
                f"data source {self.name!r}", f"its {split} split has no row; the ledger is {self._ledger}", "Check the path and the options."
            )
        for task in self.table.schema.tasks:
            seen = self.observed(task.name)[index]
            labels = self.table.labels[task.name][index][seen]
            positives = int(labels.sum())
            if positives in (0, labels.numel()):
                held = f"{positives} positives in {labels.numel()} labels of {task.name!r}"
                text = f"{self.name}: the {split} split has {held}; AUC and NE are undefined on it"
                warnings.warn(text, OneClassSplit, stacklevel=3)

    def observed(self, task: str) -> Tensor:
        """``[rows]`` bool over the whole table: the label is not masked and the task's condition holds."""
        condition = {t.name: t.condition for t in self.table.schema.tasks}[task]
        seen = self.table.masks.get(task, torch.ones(self.table.rows, dtype=torch.bool))
        return seen if condition is None else seen & self.observed(condition) & (self.table.labels[condition] == 1)

    def schema(self) -> DataSchema:
        return self.table.schema

    def rows(self, split: str) -> int:
        return self.index(split).numel()

    def index(self, split: str) -> Tensor:
        """The table's row numbers of a split."""
        if split not in self._splits:
            raise RequestError(f"split {split!r} of {self.name!r}", f"the splits are {', '.join(SPLITS)}", "Name one of them.")
        return self._splits[split]

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        index = self.index(split)
        steps = epoch_batches(index.numel(), batch_size=batch_size, shard=shard, seed=seed, epoch=epoch, start=start)
        return (self.table.batch(index.index_select(0, at), global_rows) for at, global_rows in steps)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        return {}

    def ledger(self) -> dict[str, int]:
        return dict(self._ledger)

    def unknown_ids(self, split: str) -> dict[str, int]:
        """Rows of the split whose single-valued id is 0, the row of unknown and missing values, by feature; features without any are left out."""
        index = self.index(split)
        counts = {name: int((values[index] == 0).sum()) for name, values in self.table.ids.items()}
        return {name: count for name, count in counts.items() if count}
