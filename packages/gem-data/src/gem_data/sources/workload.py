"""The source ``workload``: rows of given shapes, quick enough to feed a GPU, for measuring what a training step costs.

Every row is computed alone from its number, so any rows make a batch. A row is interested in one category, in which a share of its events lies; a
click is likelier when the candidate is in it too, so that labels can be learnt from histories.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gem_core.batch import Batch, Jagged, KeyedJagged
from gem_core.spec import DataSchema, DenseFeature, IdFeature, RequestError, SequenceFeature, Shard, Task
from gem_data.feed.balance import lpt_by_group
from gem_data.feed.pipeline import ahead
from gem_data.generate.draws import GOLDEN, Draws, Ints, floor, mix, permute, unit
from gem_data.options import SequenceShape, WorkloadOptions
from gem_data.score import expected_scores, sigmoid

SPLITS = ("train", "test")
READY = 2
"""Batches a worker may be ahead."""
PIECE = 1 << 15
"""Events computed at once."""
START, DAY = 1_700_000_000, 86_400
_BITS = 24
Floats32 = NDArray[np.float32]
Job = Callable[[], Batch]


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns that do not need events, ``[rows]`` each; ``numbers`` ``[rows, numbers]``, ``lengths`` by sequence."""

    interest: Ints
    category: Ints
    item: Ints
    user: Ints
    time: Ints
    numbers: NDArray[np.float64]
    lengths: dict[str, Ints]
    click: NDArray[np.float64]


class Workload:
    """A ``gem_core.spec.data.Source``."""

    def __init__(self, options: WorkloadOptions) -> None:
        self.options, self._draw = options, Draws(options.seed)
        self._pin = torch.cuda.is_available()
        self._effect = 0.5 * self._draw.normal("effect", np.arange(options.categories))

    def schema(self) -> DataSchema:
        o = self.options
        item, category = IdFeature(name="item", cardinality=o.items + 1), IdFeature(name="category", cardinality=o.categories + 1)
        return DataSchema(
            ids=(item, category, IdFeature(name="user", cardinality=o.users + 1)),
            dense=tuple(DenseFeature(name=f"number_{k + 1}") for k in range(o.numbers)),
            sequences=tuple(SequenceFeature(name=s.name, ids=(item, category), time=True, max_length=s.longest) for s in o.sequences),
            tasks=(Task(name="ctr"),),
        )

    def rows(self, split: str) -> int:
        if split not in SPLITS:
            raise RequestError(f"split {split!r} of 'workload'", f"the splits are {', '.join(SPLITS)}", "Name one of them.")
        return self.options.rows if split == "train" else self.options.test_rows

    def batches(
        self, split: str, *, batch_size: int, shard: Shard = Shard(), seed: int | None = None, epoch: int = 0, start: int = 0
    ) -> Iterator[Batch]:
        """As ``Source.batches``. Balanced batches hold the rows of ``window`` batches in another order, the same for any number of workers."""
        self.rows(split)
        if batch_size < 1 or min(seed or 0, epoch, start) < 0 or not 0 <= shard.rank < shard.world:
            so = f"batch_size {batch_size}, seed {seed}, epoch {epoch}, start {start}, rank {shard.rank} of {shard.world}"
            raise RequestError("batches of 'workload'", so, "Give a batch of one row or more, nothing negative, and a rank below the world size.")
        return self._made(self._windows(split, batch_size, shard, seed, epoch, start // self.options.window), start % self.options.window)

    def baselines(self) -> dict[str, dict[str, dict[str, float]]]:
        """``oracle``: what knowing every row's interest would give on average on the test rows; short histories show it in part."""
        chance = self.columns(self._numbers("test", np.arange(self.rows("test")))).click
        return {"oracle": {"ctr": expected_scores(chance, np.ones_like(chance))}}

    def ledger(self) -> dict[str, int]:
        return {"read": sum(map(self.rows, SPLITS)), **{split: self.rows(split) for split in SPLITS}}

    def columns(self, number: Ints) -> Rows:
        """What the rows of these numbers are, events left out."""
        o, draw = self.options, self._draw
        interest = draw.integers("interest", o.categories, number)
        category = np.where(draw.uniform("candidate", number) < 0.5, interest, draw.integers("category", o.categories, number))
        numbers = np.stack([draw.normal(f"number {k}", number) for k in range(o.numbers)], axis=1)
        lengths = {shape.name: self._lengths(shape, number) for shape in o.sequences}
        shown = np.add.reduce(list(lengths.values())) > 0
        signal = o.match * ((category == interest) & shown) + self._effect[category] + 0.8 * numbers[:, 0] - 0.5 * numbers[:, 1]
        return Rows(
            interest=interest,
            category=category,
            item=self._item(draw.uniform("item", number).astype(np.float32), category),
            user=draw.integers("user", o.users, number),
            time=START + draw.integers("time", 30 * DAY, number),
            numbers=numbers,
            lengths=lengths,
            click=sigmoid(o.base_logit + signal),
        )

    def _lengths(self, shape: SequenceShape, number: Ints) -> Ints:
        if shape.lengths == "fixed":
            return np.full(number.size, shape.longest)
        uniform = self._draw.uniform(f"length {shape.name}", number)
        if shape.lengths == "uniform":
            return shape.shortest + floor(uniform * (shape.longest - shape.shortest + 1))
        if shape.lengths == "zipf":
            # P(n >= x) = x ** (1 - exponent): the whole part of Pareto's law
            drawn = floor(np.minimum((1.0 - uniform) ** (1.0 / (1.0 - shape.exponent)), float(shape.longest)))
        else:
            normal = self._draw.normal(f"length {shape.name}", number)
            drawn = np.rint(shape.mean * np.exp(shape.sigma * normal - shape.sigma**2 / 2)).astype(np.int64)
        return np.asarray(np.clip(drawn, shape.shortest, shape.longest))

    def _item(self, uniform: Floats32, category: Ints) -> Ints:
        """Items of these categories; within one the ``n``-th is drawn as ``1 / n`` (Zipf's law)."""
        each = self.options.items // self.options.categories
        place = np.exp(uniform * np.float32(np.log1p(each))).astype(np.int64)
        return np.asarray((np.minimum(place, each) - 1) * self.options.categories + category)

    def _numbers(self, split: str, row: Ints) -> Ints:
        return row if split == "train" else row + self.options.rows

    def _windows(self, split: str, batch_size: int, shard: Shard, seed: int | None, epoch: int, first: int) -> Iterator[Callable[[], list[Job]]]:
        """Of each window from number ``first`` on: what deals its rows out, and gives a job for each of this rank's batches."""
        rows, window = self.rows(split), self.options.window * batch_size
        for begin in range(first * window, rows, window):
            yield partial(self._jobs, split, np.arange(begin, min(begin + window, rows)), batch_size, shard, seed, epoch)

    def _jobs(self, split: str, row: Ints, batch_size: int, shard: Shard, seed: int | None, epoch: int) -> list[Job]:
        if seed is not None:
            row = permute(row, self.rows(split), Draws(seed).words("order", np.array([epoch])))
        sizes = [min(batch_size, row.size - at) for at in range(0, row.size, batch_size)]
        shares = [[size * (r + 1) // shard.world - size * r // shard.world for r in range(shard.world)] for size in sizes]
        parts = self._dealt(self._numbers(split, row), shares)[shard.rank :: shard.world]
        return [partial(self._batch, part, size) for size, part in zip(sizes, parts, strict=True)]

    def _dealt(self, number: Ints, shares: list[list[int]]) -> list[Ints]:
        """The rows of each batch and rank, batch by batch."""
        sizes = [size for batch in shares for size in batch]
        if self.options.balance == "none":
            return np.split(number, np.cumsum(sizes)[:-1])
        events = np.stack([self._lengths(shape, number) for shape in self.options.sequences], axis=1)
        part = lpt_by_group(events.sum(1).astype(np.float64), events, sizes)
        return [number[part == i] for i in range(len(sizes))]

    def _made(self, windows: Iterator[Callable[[], list[Job]]], skipped: int) -> Iterator[Batch]:
        """The batches in order, without the first ``skipped``. With workers, the next window is dealt out before its turn."""
        workers = self.options.workers
        with ThreadPoolExecutor(workers) if workers else nullcontext() as pool:
            jobs = chain.from_iterable(ahead(windows, pool, 1))
            yield from ahead(islice(jobs, skipped, None), pool, READY * workers)

    def _batch(self, number: Ints, global_rows: int) -> Batch:
        """Ids start at 1: row 0 of each table stays for unknown values."""
        rows, count = self.columns(number), number.size
        one_each = np.ones(count, np.int64)
        lengths = {"item": one_each, "category": one_each, "user": one_each}
        lengths |= {f"{name}.{id}": each for name, each in rows.lengths.items() for id in ("item", "category")}
        ids, column = _packed({key: lengths[key] for key in self.schema().all_id_features()}, count, pin=self._pin)
        for name, values in (("item", rows.item), ("category", rows.category), ("user", rows.user)):
            np.add(values, 1, out=column[name])
        times, spans = {}, {}
        for name, each in rows.lengths.items():
            offsets = np.concatenate([[0], np.cumsum(each)])
            time = self._events(name, rows, number, offsets, column[f"{name}.item"], column[f"{name}.category"])
            times[name], spans[name] = time, Jagged(torch.empty(0), torch.from_numpy(offsets), int(each.max(initial=0)))
        clicked = self._draw.uniform("click", number) < rows.click
        batch = Batch(
            rows=count,
            ids=ids,
            labels={"ctr": torch.from_numpy(clicked.astype(np.float32))},
            dense={f"number_{k + 1}": torch.from_numpy(rows.numbers[:, k : k + 1].astype(np.float32)) for k in range(self.options.numbers)},
            event_dense={},
            event_time=times,
            event_offsets=spans,
            masks={},
            weights={},
            time=torch.from_numpy(rows.time),
            global_rows=global_rows,
        )
        return batch.pin_memory() if self._pin else batch

    def _events(self, name: str, rows: Rows, number: Ints, offsets: Ints, item: Ints, category: Ints) -> torch.Tensor:
        """Fill ``item`` and ``category`` ``[events]`` of a sequence, oldest event first; returns its times. One word of random bits an event."""
        interest, times = np.uint64(int(self.options.interest * 2**16)), _empty(offsets[-1], pin=self._pin)
        first = self._draw.words(f"events {name}", number)
        pace = 60 + floor(unit(self._draw.words(f"pace {name}", number)) * 3540)
        for some, part in _pieces(offsets):
            each = partial(np.repeat, repeats=rows.lengths[name][some])
            later = each(offsets[1:][some]) - np.arange(part.start, part.stop)  # 1 for the newest event
            words = mix(each(first[some]) + later.view(np.uint64) * GOLDEN)
            low, middle = words & np.uint64(0xFFFF), (words >> np.uint64(16)) & np.uint64(0xFFFF)
            other = (middle * np.uint64(self.options.categories) >> np.uint64(16)).view(np.int64)
            drawn = np.where(low < interest, each(rows.interest[some]), other)
            uniform = (words >> np.uint64(64 - _BITS)).view(np.int64).astype(np.float32) * np.float32(2.0**-_BITS)
            np.add(self._item(uniform, drawn), 1, out=item[part])
            np.add(drawn, 1, out=category[part])
            np.subtract(each(rows.time[some]), later * each(pace[some]), out=times.numpy()[part])
        return times


def _empty(size: int, *, pin: bool) -> torch.Tensor:
    """``[size]`` int64, in page-locked memory where a GPU may ask for it: what is made there need not be copied there."""
    return torch.empty(int(size), dtype=torch.int64, pin_memory=pin)


def _packed(lengths: dict[str, Ints], rows: int, *, pin: bool) -> tuple[KeyedJagged, dict[str, Ints]]:
    """Columns of ids with so many in each row, to be filled, and a view of each: packed as they are made, they need not be copied together."""
    offsets = np.concatenate([[0], *lengths.values()]).cumsum()
    values = _empty(offsets[-1], pin=pin)
    starts = offsets[::rows].tolist() if rows else [0] * (len(lengths) + 1)
    longest = tuple(int(each.max(initial=0)) for each in lengths.values())
    ids = KeyedJagged(tuple(lengths), values, torch.from_numpy(offsets), rows, tuple(starts), longest, sound=True)
    return ids, {key: values.numpy()[start:stop] for key, (start, stop) in zip(lengths, pairwise(starts), strict=True)}


def _pieces(offsets: Ints) -> Iterator[tuple[slice, slice]]:
    """Rows and their events, about ``PIECE`` events at a time: what is computed of them stays in the cache, and in memory that is used again."""
    edges = np.unique(np.append(np.searchsorted(offsets, np.arange(0, offsets[-1], PIECE)), offsets.size - 1))
    for start, stop in pairwise(edges.tolist()):
        yield slice(start, stop), slice(int(offsets[start]), int(offsets[stop]))


def load(**options: Any) -> Workload:
    """The source for these options (``WorkloadOptions``)."""
    return Workload(WorkloadOptions(**options))
