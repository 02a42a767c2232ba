"""A small generated data set with every kind of feature, so that core trains and is tested without any other package.

Users like some categories of items, click what they like, and convert more when an item is cheap. The logs hold empty histories, multi-ids, numbers,
vectors, events with times, weights, and a conversion label that is seen only after a click.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged, epoch_batches, range_index
from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature, Shard, Task

USERS, ITEMS, CATEGORIES, TAGS, ACTIONS, LONGEST = 40, 60, 6, 12, 3, 12
DAY = 86_400
START = 1_700_000_000

_ITEM = IdFeature(name="item", cardinality=ITEMS + 1, table="item")
SCHEMA = DataSchema(
    ids=(IdFeature(name="user", cardinality=USERS + 1), _ITEM, IdFeature(name="tags", cardinality=TAGS + 1, multi=True)),
    dense=(DenseFeature(name="price"), DenseFeature(name="picture", width=4)),
    sequences=(
        SequenceFeature(
            name="views",
            ids=(_ITEM, IdFeature(name="action", cardinality=ACTIONS + 1)),
            dense=(DenseFeature(name="dwell"),),
            time=True,
            max_length=LONGEST,
        ),
        SequenceFeature(name="buys", ids=(_ITEM,), time=True, max_length=LONGEST // 2),
    ),
    tasks=(Task(name="ctr"), Task(name="cvr", condition="ctr")),
    group=True,
)


class ToySource:
    """The source ``toy``.

    Args:
        rows: training rows; the test split has a quarter of it.
        seed: seed of the generator.

    Raises:
        RequestError: fewer than 8 rows.
    """

    def __init__(self, rows: int = 1536, seed: int = 0) -> None:
        if rows < 8:
            raise RequestError("data.options.rows", f"it is {rows}", "Give 8 or more: the test split has a quarter of it.")
        self._rows = {"train": rows, "test": rows // 4}
        self._columns = _Columns(rows + rows // 4, torch.Generator().manual_seed(seed))

    def schema(self) -> DataSchema:
        return SCHEMA

    def rows(self, split: str) -> int:
        if split not in self._rows:
            raise RequestError(f"split {split!r}", "there is no such split", "Use 'train' or 'test'.")
        return self._rows[split]

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        first = 0 if split == "train" else self._rows["train"]
        for index, together in epoch_batches(self.rows(split), batch_size=batch_size, shard=shard, seed=seed, epoch=epoch, start=start):
            yield self._columns.batch(index + first, together)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        return {}

    def ledger(self) -> dict[str, int]:
        return {"read": sum(self._rows.values()), **self._rows}


class _Columns:
    """All rows, training ones first."""

    def __init__(self, rows: int, draw: torch.Generator) -> None:
        self.user = torch.randint(1, USERS + 1, (rows,), generator=draw)
        self.item = torch.randint(1, ITEMS + 1, (rows,), generator=draw)
        self.tags = _draw_jagged(rows, 3, TAGS, draw)
        self.price = torch.randn(rows, 1, generator=draw)
        self.picture = torch.randn(rows, 4, generator=draw)
        self.time = START + torch.randint(0, 30 * DAY, (rows,), generator=draw)
        self.views, self.buys = _draw_jagged(rows, LONGEST, ITEMS, draw), _draw_jagged(rows, LONGEST // 2, ITEMS, draw)
        self.action = torch.randint(1, ACTIONS + 1, self.views.values.shape, generator=draw)
        self.dwell = torch.rand(self.views.values.shape[0], 1, generator=draw)
        self.view_age, self.buy_age = (torch.randint(1, 7 * DAY, column.values.shape, generator=draw) for column in (self.views, self.buys))
        self.weight = torch.where(torch.rand(rows, generator=draw) < 0.2, 2.0, 1.0)
        self._draw_labels(rows, draw)

    def _draw_labels(self, rows: int, draw: torch.Generator) -> None:
        taste = torch.randn(USERS + 1, CATEGORIES, generator=draw)
        liked = taste[self.user, self.item % CATEGORIES]
        row = torch.repeat_interleave(torch.arange(rows), self.views.lengths())
        match = (self.views.values % CATEGORIES == self.item[row] % CATEGORIES).float()
        seen = torch.zeros(rows).index_add(0, row, match)
        self.click = torch.bernoulli(torch.sigmoid(1.5 * liked + 0.8 * seen - 1.0), generator=draw)
        self.convert = torch.bernoulli(torch.sigmoid(0.5 * liked - self.price[:, 0]), generator=draw) * self.click

    def batch(self, index: Tensor, together: int) -> Batch:
        rows = index.numel()
        views, view_at = _take(self.views, index)
        buys, buy_at = _take(self.buys, index)
        one_each = torch.arange(rows + 1)
        columns = {
            "user": Jagged(self.user[index], one_each, min(rows, 1)),
            "item": Jagged(self.item[index], one_each, min(rows, 1)),
            "tags": _take(self.tags, index)[0],
            "views.item": views,
            "views.action": Jagged(self.action[view_at], views.offsets, views.max_length),
            "buys.item": buys,
        }
        now = self.time[index]
        ages = {"views": (views, self.view_age[view_at]), "buys": (buys, self.buy_age[buy_at])}
        return Batch(
            rows=rows,
            ids=KeyedJagged.from_columns(columns, rows),
            labels={"ctr": self.click[index], "cvr": self.convert[index]},
            dense={"price": self.price[index], "picture": self.picture[index]},
            event_dense={"views.dwell": self.dwell[view_at]},
            event_time={name: torch.repeat_interleave(now, group.lengths()) - _oldest_first(age, group) for name, (group, age) in ages.items()},
            event_offsets={name: Jagged(torch.empty(0), group.offsets, group.max_length) for name, (group, _) in ages.items()},
            masks={},
            weights={"ctr": self.weight[index]},
            time=now,
            groups=self.user[index],
            global_rows=together,
        )


def _draw_jagged(rows: int, longest: int, ids: int, draw: torch.Generator) -> Jagged:
    """Rows of 0 to ``longest`` ids from 1; about a quarter of them empty."""
    lengths = (torch.randint(0, longest + 1, (rows,), generator=draw) - longest // 4).clamp(min=0)
    values = torch.randint(1, ids + 1, (int(lengths.sum()),), generator=draw)
    return Jagged(values, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), longest)


def _take(column: Jagged, index: Tensor) -> tuple[Jagged, Tensor]:
    """The chosen rows of a packed column, and where their values came from."""
    lengths = column.lengths()[index]
    at, offsets = range_index(column.offsets[:-1][index], lengths)
    return Jagged(column.values[at], offsets, int(lengths.max()) if index.numel() else 0), at


def _oldest_first(ages: Tensor, group: Jagged) -> Tensor:
    """Ages in falling order within each row."""
    row = torch.repeat_interleave(torch.arange(group.rows), group.lengths())
    order = torch.argsort(row * (8 * DAY) - ages)
    return ages[order]
