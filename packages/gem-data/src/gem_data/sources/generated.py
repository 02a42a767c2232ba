"""The source ``generated``: rows of ``gem_data.generate.world`` computed as they are read, in constant memory."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gem_core.batch import Batch
from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature, Shard, Task
from gem_data.collate import Events, Spans, Table
from gem_data.generate.bounds import bounds
from gem_data.generate.draws import Draws, Ints, permute
from gem_data.generate.world import Rows, World
from gem_data.options import GeneratedOptions

SPLITS = ("train", "test")


class Generated:
    """A ``gem_core.spec.data.Source`` of any size."""

    def __init__(self, options: GeneratedOptions) -> None:
        self.options = options
        self.world = World(options)

    def schema(self) -> DataSchema:
        o = self.options
        item = IdFeature(name="item", cardinality=o.items + 1)
        category = IdFeature(name="category", cardinality=o.categories + 1)
        tasks = (Task(name="ctr"), Task(name="cvr", condition="ctr"))
        return DataSchema(
            ids=(item, category, IdFeature(name="user_group", cardinality=o.groups + 1), IdFeature(name="hour", cardinality=25)),
            dense=(DenseFeature(name="number_1"), DenseFeature(name="number_2")),
            sequences=(SequenceFeature(name="history", ids=(item, category), time=True, max_length=o.history_length),),
            tasks=tasks if o.conversion else tasks[:1],
            group=True,
        )

    def rows(self, split: str) -> int:
        if split not in SPLITS:
            raise RequestError(f"split {split!r} of 'generated'", f"the splits are {', '.join(SPLITS)}", "Name one of them.")
        return self.world.split_rows(split)

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """As ``Source.batches``; the shuffle is a permutation computed place by place, so that it takes no memory."""
        rows = self.rows(split)
        if batch_size < 1 or min(seed or 0, epoch, start) < 0 or not 0 <= shard.rank < shard.world:
            so = f"batch_size {batch_size}, seed {seed}, epoch {epoch}, start {start}, rank {shard.rank} of {shard.world}"
            raise RequestError("batches of 'generated'", so, "Give a batch of one row or more, nothing negative, and a rank below the world size.")
        return self._batches(split, rows, batch_size, shard, seed, epoch, start)

    def _batches(self, split: str, rows: int, batch_size: int, shard: Shard, seed: int | None, epoch: int, start: int) -> Iterator[Batch]:
        for first in range(start * batch_size, rows, batch_size):
            count = min(batch_size, rows - first)
            low, high = (first + count * r // shard.world for r in (shard.rank, shard.rank + 1))
            index = np.arange(low, high)
            if seed is not None:
                index = permute(index, rows, Draws(seed).words("order", np.array([epoch])))
            yield self._batch(self.world.rows(split, index), count)

    def _batch(self, rows: Rows, global_rows: int) -> Batch:
        """Ids start at 1: row 0 of each table stays for unknown values."""
        spans = Spans(begin=_tensor(rows.histories.offsets[:-1][rows.request]), end=_tensor(rows.histories.offsets[1:][rows.request]))
        events = Events(
            spans=spans,
            ids={"item": _tensor(rows.histories.item + 1), "category": _tensor(rows.histories.category + 1)},
            time=_tensor(rows.histories.time),
        )
        labels = {"ctr": rows.clicked, "cvr": rows.converted}
        table = Table(
            schema=self.schema(),
            rows=rows.index.size,
            ids={name: _tensor(value + 1) for name, value in rows.visible_ids().items()},
            dense={f"number_{k + 1}": torch.from_numpy(rows.numbers[:, k : k + 1].astype(np.float32)) for k in (0, 1)},
            events={"history": events},
            labels={task.name: torch.from_numpy(labels[task.name].astype(np.float32)) for task in self.schema().tasks},
            masks={"cvr": torch.from_numpy(rows.closed)} if self.options.conversion else {},
            time=_tensor(rows.requests.time[rows.request]),
            groups=_tensor(rows.requests.user[rows.request]),
        )
        return table.batch(torch.arange(rows.index.size), global_rows)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """The best possible figures on the test rows, with histories and without; see ``generate.bounds``."""
        return bounds(self.world, "test")

    def ledger(self) -> dict[str, int]:
        return {"read": self.options.rows + self.options.test_rows, "train": self.options.rows, "test": self.options.test_rows}


def load(**options: Any) -> Generated:
    """The source for these options (``GeneratedOptions``)."""
    return Generated(GeneratedOptions(**options))


def _tensor(values: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int64))
