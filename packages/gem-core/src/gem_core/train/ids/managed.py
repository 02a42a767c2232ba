"""Between the feed and the engine: raw ids of managed tables become rows, and rows that change hands start afresh.

All ids of a step, over all ranks and micro-batches, are counted together, each by the rank that keeps its bucket. So which id owns which row depends
on the global batches alone. Everything happens on the host, before a batch goes to its device.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.config.schema import ManagedTable
from gem_core.spec import Embeddings, GemError, TableSpec
from gem_core.train.feed import Work
from gem_core.train.ids.exchange import exchange
from gem_core.train.ids.idmap import IdMap
from gem_core.train.ids.layout import Ints, fresh_weights, keys_of
from gem_core.train.world import World


@dataclass(slots=True)
class _Step:
    """What admission leaves to be done or told when its step begins: whether any table evicts, rows and their new ids by table, figures."""

    evicts: bool = False
    moved: dict[str, tuple[Ints, Ints]] = field(default_factory=dict)
    owned: dict[str, int] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)


class ManagedIds:
    """The managed tables of a run; without any, batches pass as they are and nothing is exchanged.

    Args:
        tables: the model's tables, whose ``rows`` say how many ids there may be.
        rules: by table name.
        world: the ranks, which keep the buckets of each table in ranges.
        seed: of the weights of rows that change hands.
    """

    def __init__(self, tables: Sequence[TableSpec], rules: Mapping[str, ManagedTable], world: World, seed: int) -> None:
        self._tables = [table for table in tables if table.name in rules]
        self._limits = {feature: (table.name, table.rows) for table in self._tables for feature in table.features}
        self._world, self._seed = world, seed
        self._edges = {name: [rule.buckets * rank // world.size for rank in range(world.size + 1)] for name, rule in rules.items()}
        """The first bucket of each rank."""
        self.maps = {name: IdMap(rule, *self._edges[name][world.rank : world.rank + 2]) for name, rule in rules.items()}
        self.clock = 0
        """Steps whose ids were counted."""
        self.report: list[str] = []
        """What became of tables whose sizes are not those of the checkpoint."""
        self._next = _Step()
        self._owned: dict[str, int] = dict.fromkeys(rules, 0)
        self._told: dict[str, Counter[str]] = {split: Counter() for split in ("train", "test")}

    def admit(self, work: Work) -> Work:
        """The next training step with rows in place of ids, after counting, admission and eviction. Collective.

        It may be called while the step before is computed, and no earlier; ``begin_step`` does what concerns the tables.

        Raises:
            RequestError: an id is negative, or exceeds the cardinality of its feature.
        """
        self.clock += 1
        step = self._next = _Step(evicts=any(self.clock % ids.rule.evict_every == 0 for ids in self.maps.values()))

        def count(name: str, ids: Ints, counts: Ints) -> None:
            changes = self.maps[name].observe(ids, counts, self.clock)
            step.told.update({f"{name}/admitted": changes.admitted, f"{name}/evicted": changes.rows.size})
            step.moved[name] = changes.rows, changes.ids
            step.owned[name] = self.maps[name].owned

        return replace(work, batches=self._mapped(work.batches, step.told, count))

    def begin_step(self, embeddings: Embeddings) -> None:
        """Before the look-ups of the step admitted last: rows that passed to another id get fresh weights and optimiser state. Collective."""
        step, self._next = self._next, _Step()
        self._told["train"].update(step.told)
        self._owned |= step.owned
        if step.evicts:
            self._start_afresh(step.moved, embeddings)

    def look_up(self, work: Work) -> Work:
        """Batches to evaluate, with rows in place of ids; nothing is admitted or counted as use. Collective."""
        return replace(work, batches=self._mapped(work.batches, self._told["test"]))

    def rows_of(self, batch: Batch) -> Batch:
        """As ``look_up``, for one batch on the host that no figure tells of."""
        return self._mapped([batch], Counter())[0]

    def read(self, split: str) -> dict[str, Any]:
        """``{"features": {feature: {"ids", "unadmitted"}}, "tables": {table: {"owned", "admitted", "evicted"}}}`` over all ranks since the last call.

        ``ids`` counts look-ups but those of missing values (row 0), ``unadmitted`` those of ids that owned no row, ``owned`` the ids that own one.
        Tables are told of in training only. Empty where no table is managed. Collective.
        """
        if not self.maps:
            return {}
        told = self._told[split]
        names = [f"{key}/{what}" for key in self._limits for what in ("ids", "unadmitted")]
        if split == "train":
            names += [f"{name}/{what}" for name in self.maps for what in ("admitted", "evicted")]
            names += [f"{name}/owned" for name in self.maps]
            told.update({f"{name}/owned": owned for name, owned in self._owned.items()})
        sums = self._world.all_gather(torch.tensor([told[name] for name in names])).sum(0).tolist()
        told.clear()
        out: dict[str, Any] = {}
        for name, value in zip(names, sums):
            key, what = name.rsplit("/", 1)
            kind = "features" if what in ("ids", "unadmitted") else "tables"
            out.setdefault(kind, {}).setdefault(key, {})[what] = value
        return out

    def _mapped(self, batches: Sequence[Batch], told: Counter[str], count: Callable[[str, Ints, Ints], None] | None = None) -> Sequence[Batch]:
        """The batches with rows in place of ids.

        Args:
            told: gets the numbers of look-ups by feature.
            count: called for each table, before its rows are looked up, with the distinct ids of all ranks that this one keeps, and their numbers.
        """
        if not self.maps:
            return batches
        self._check(batches)
        columns = [[batch.ids.ids(key) for batch in batches for key in table.features] for table in self._tables]
        asked, places = zip(*(_distinct(torch.cat(parts).numpy()) for parts in columns), strict=True)
        mine = exchange(self._world, [self._by_owner(table.name, ids) for table, ids in zip(self._tables, asked)])
        if count is not None:
            for table, parts in zip(self._tables, mine):
                count(table.name, *_summed(np.concatenate(parts)))
        answers = [[self.maps[table.name].look_up(part[:, 0])[:, None] for part in parts] for table, parts in zip(self._tables, mine)]
        values = [batch.ids.values.clone() for batch in batches]
        for table, parts, place in zip(self._tables, exchange(self._world, answers), places):
            rows = torch.from_numpy(np.concatenate([[0], np.concatenate(parts)[:, 0]])[place + 1])
            self._put(table, rows, batches, values, told)
        return [replace(batch, ids=replace(batch.ids, values=value)) for batch, value in zip(batches, values)]

    def _check(self, batches: Sequence[Batch]) -> None:
        """Raise on every rank what is wrong with the ids of one: the others would wait for it."""
        error: GemError | None = None
        try:
            for batch in batches:
                batch.ids.check_ids(self._limits)
        except GemError as found:
            error = found
        if bool(self._world.all_gather(torch.tensor([error is not None])).any()):
            raise next(e for e in self._world.gather_objects(error) if e is not None)

    def _put(self, table: TableSpec, rows: Tensor, batches: Sequence[Batch], values: Sequence[Tensor], told: Counter[str]) -> None:
        """Write a table's rows, batch after batch and feature after feature, over the ids in ``values``."""
        first = 0
        for batch, value in zip(batches, values):
            for key in table.features:
                ids, begin = batch.ids.ids(key), batch.ids.starts[batch.ids.keys.index(key)]
                own = rows[first : first + ids.numel()]
                told[f"{key}/ids"] += int((ids != 0).sum())
                told[f"{key}/unadmitted"] += int(((ids != 0) & (own < self.maps[table.name].layout.first)).sum())
                value[begin : begin + ids.numel()] = own
                first += ids.numel()

    def _by_owner(self, name: str, asked: Ints) -> list[Ints]:
        """Ids ``[n, 2]`` in the order of their keys, divided among the ranks that keep their buckets."""
        bucket = self.maps[name].layout.bucket(keys_of(np.ascontiguousarray(asked[:, 0])))
        return np.split(asked, np.searchsorted(bucket, self._edges[name][1:-1]))

    def _start_afresh(self, moved: Mapping[str, tuple[Ints, Ints]], embeddings: Embeddings) -> None:
        """Give rows that changed hands fresh weights and optimiser state, wherever the engine keeps them. Collective."""
        everywhere = self._world.gather_objects(moved)
        changed = False
        for table in self._tables:
            rows, ids = (np.concatenate([of_rank[table.name][i] for of_rank in everywhere]) for i in (0, 1))
            if rows.size:
                reset_rows(embeddings, table.name, torch.from_numpy(rows), torch.from_numpy(fresh_weights(table, ids, self._seed)))
                changed = True
        if changed:
            embeddings.tables_loaded(embeddings.table_updates())


@torch.no_grad()
def reset_rows(embeddings: Embeddings, table: str, rows: Tensor, weights: Tensor) -> None:
    """Put ``weights`` ``[n, dim]`` into ``rows`` ``[n]`` of a table and zeros into their optimiser state, as far as this process keeps them.

    The caller tells the engine with ``tables_loaded``.
    """
    for piece in embeddings.table_slices():
        if piece.table != table:
            continue
        here = (rows >= piece.start) & (rows < piece.start + piece.tensor.shape[0])
        at = (rows[here] - piece.start).to(piece.tensor.device)
        if piece.name == "weight":
            piece.tensor[at] = weights[here, piece.column : piece.column + piece.tensor.shape[1]].to(piece.tensor)
        else:
            piece.tensor[at] = 0


def _distinct(ids: Ints) -> tuple[Ints, Ints]:
    """``[n, 2]`` distinct ids but 0, in the order of their keys, with their number; and ``[ids]`` the place of each id among them, -1 for id 0."""
    _, first, inverse, counts = np.unique(keys_of(ids), return_index=True, return_inverse=True, return_counts=True)
    distinct = ids[first]
    zero = distinct == 0
    place = np.cumsum(~zero) - 1
    place[zero] = -1
    return np.stack([distinct, counts], axis=1)[~zero], place[inverse]


def _summed(asked: Ints) -> tuple[Ints, Ints]:
    """Distinct ids, and the sum of their numbers."""
    ids, inverse = np.unique(asked[:, 0], return_inverse=True)
    counts = np.zeros(ids.size, np.int64)
    np.add.at(counts, inverse, asked[:, 1])
    return ids, counts
