"""The batches of one epoch, agreed step by step over all ranks, so that no rank ever waits for one that has run out.

Before a step the ranks exchange a few numbers on the host: how many batches each has, their rows, FLOPs and weight sums, and whether reading failed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from gem_core.batch import Batch, Jagged, KeyedJagged
from gem_core.spec import DataSchema, GemError, Task
from gem_core.train.labels import check_batch, weight_sums
from gem_core.train.ledger.clock import DATA, IDS
from gem_core.train.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What this rank does in one step.

    Args:
        batches: this rank's micro-batches on the CPU; every rank has the same number.
        rows: rows over all ranks.
        flops: forward model FLOPs over all ranks.
        weights: ``[tasks]`` float64 sums of weights over all ranks: the loss denominators.
        data_seconds: time this rank spent on reading.
    """

    batches: Sequence[Batch]
    rows: int
    flops: int
    weights: Tensor
    data_seconds: float


class Feed:
    """Iterates over the steps of an epoch.

    Args:
        batches: this rank's batches.
        world: the ranks.
        schema: for the labels, and for batches without rows.
        flops: forward model FLOPs of one CPU batch.
        accumulate: micro-batches a step; the last step of an epoch may have fewer.
        uneven: when some ranks run out first, ``pad`` feeds them batches without rows until all have; ``stop`` and ``drop`` end the epoch at the last
            step that every rank can take, and leave the rest out.
        prepare: what becomes of each step before it is given out. Collective, in the order of the steps.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        world: World,
        schema: DataSchema,
        *,
        flops: Callable[[Batch], int],
        accumulate: int = 1,
        uneven: str = "pad",
        prepare: Callable[[Work], Work] = lambda work: work,
    ) -> None:
        self._batches, self._world, self._schema, self._flops = batches, world, schema, flops
        self._prepare, self._accumulate, self._uneven = prepare, accumulate, uneven
        self.ran_out: int | None = None
        """The first rank that ended the epoch for the others; None while none has."""
        self.dropped = 0
        """Rows over all ranks that were read and left out because another rank had run out."""
        self._steps = self._read_steps()
        self._peeked: list[Work | None] = []

    def __iter__(self) -> Iterator[Work]:
        while (work := self.peek()) is not None:
            self._peeked.clear()
            yield work

    def peek(self) -> Work | None:
        """The next step before its turn, None at the end. Reading it is collective, and raises what its turn would."""
        if not self._peeked:
            self._peeked.append(next(self._steps, None))
        return self._peeked[0]

    def _read_steps(self) -> Iterator[Work]:
        while self.ran_out is None:
            begun = time.perf_counter()
            with self._world.clock.phase(DATA):
                own, error = self._read()
                told = self._agree(own, error)
            counts = told[:, 0, 0].long()
            take = int(counts.max() if self._uneven == "pad" else counts.min())
            if take < int(counts.max()):
                self.ran_out = int(counts.argmin())
                self.dropped = int(told[:, take:, 1].sum())
            if take == 0:
                return
            sums = told[:, :take].sum((0, 1))
            mine = own[:take] + [empty_batch(self._schema) for _ in range(take - len(own))]
            work = Work(batches=mine, rows=int(sums[1]), flops=int(sums[2]), weights=sums[3:], data_seconds=time.perf_counter() - begun)
            with self._world.clock.phase(IDS):
                work = self._prepare(work)
            yield work

    def _read(self) -> tuple[list[Batch], GemError | None]:
        try:
            own = list(islice(self._batches, self._accumulate))
            for batch in own:
                check_batch(batch, self._schema.tasks)
        except GemError as error:
            return [], error
        return own, None

    def _agree(self, own: Sequence[Batch], error: GemError | None) -> Tensor:
        """``[ranks, micro-batches, 3 + tasks]``: number of batches (-1 for an error), rows, FLOPs, weight sums. A rank's error is raised on all."""
        tasks: Sequence[Task] = self._schema.tasks
        table = torch.zeros(self._accumulate, 3 + len(tasks), dtype=torch.float64)
        table[:, 0] = len(own) if error is None else -1
        for row, batch in zip(table, own, strict=False):
            row[1], row[2] = batch.rows, self._flops(batch)
            row[3:] = weight_sums(batch, tasks)
        told = self._world.all_gather(table)
        if bool((told[:, 0, 0] < 0).any()):
            raise next(e for e in self._world.gather_objects(error) if e is not None)
        return told


def empty_batch(schema: DataSchema) -> Batch:
    """A batch without rows that has every column of the schema."""
    nothing, offsets = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    groups = schema.sequences
    return Batch(
        rows=0,
        ids=KeyedJagged.from_columns({key: Jagged(nothing, offsets, 0) for key in schema.all_id_features()}, 0),
        labels={task.name: torch.zeros(0) for task in schema.tasks},
        dense={f.name: torch.zeros(0, f.width) for f in schema.dense},
        event_dense={f"{g.name}.{f.name}": torch.zeros(0, f.width) for g in groups for f in g.dense},
        event_time={g.name: nothing for g in groups if g.time},
        event_offsets={g.name: Jagged(nothing, offsets, 0) for g in groups},
        masks={},
        weights={},
        time=nothing if any(g.time for g in groups) else None,
        groups=nothing if schema.group else None,
        id_weights={f.name: torch.zeros(0) for f in schema.ids if f.weighted},
    )
