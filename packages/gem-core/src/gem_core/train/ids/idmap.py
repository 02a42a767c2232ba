"""Which ids of one table own a row: counting, admission and eviction. Pure numpy on the host; the ids of a step come in, their rows go out.

The scores are those of torchrec's eviction policies (``torchrec.modules.mc_modules``) with an exponent of 1. They are compared as exact integers or
quotients, and ties go to the id that is already in or has the smaller key, so that nothing depends on how many ranks share the work.
"""

from dataclasses import dataclass

import numpy as np

from gem_core.config.schema import ManagedTable
from gem_core.train.ids.layout import Ints, Keys, keys_of, layout_of

IDS, ROWS, COUNTS, USED = range(4)
NAMES = ("id", "id_row", "id_count", "id_used")
"""The columns of the state, as a checkpoint names them beside the table's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What a step changed.

    Args:
        admitted: ids that got a row.
        rows: ``[evicted]`` rows that were taken from their ids.
        ids: ``[evicted]`` who has them now.
    """

    admitted: int
    rows: Ints
    ids: Ints


class IdMap:
    """The ids of some buckets of one table.

    An id that was seen is an entry: it owns a row, or waits for one with row 0. A bucket keeps at most as many waiting entries as it owns rows, after
    each eviction; between two evictions the ids that were seen are added.

    Args:
        rule: rows, policy and thresholds.
        low: the first bucket kept here.
        high: the first bucket kept elsewhere; None keeps all.
    """

    def __init__(self, rule: ManagedTable, low: int = 0, high: int | None = None) -> None:
        self.rule, self.layout = rule, layout_of(rule)
        self.low, self.high = low, self.layout.buckets if high is None else high
        self._starts = self.layout.starts()
        self.load(np.zeros((4, 0), np.int64))

    @property
    def owned(self) -> int:
        """Ids that own a row."""
        return int(np.count_nonzero(self.state[ROWS]))

    def mine(self, state: Ints) -> Ints:
        """The entries ``[4, n]`` that belong to these buckets."""
        bucket = self.layout.bucket(keys_of(np.ascontiguousarray(state[IDS])))
        return state[:, (bucket >= self.low) & (bucket < self.high)]

    def load(self, state: Ints) -> None:
        """Take over entries ``[4, n]`` (id, row, count, last use) of these buckets, in any order."""
        keys = keys_of(np.ascontiguousarray(state[IDS]))
        order = np.argsort(keys)
        self._keys: Keys = keys[order]
        self.state: Ints = np.ascontiguousarray(state[:, order])

    def place_again(self, clock: int) -> Ints:
        """Entries were loaded from a table of another layout: give the most valuable owners of each bucket its rows, and let the others wait.

        Returns:
            ``[2, n]``: rows now, and rows before.
        """
        owners, bucket, place = self._ranked(np.flatnonzero(self.state[ROWS]), clock, best_first=True)
        fits = place < np.diff(self._starts)[bucket]
        old = self.state[ROWS, owners[fits]]
        self.state[ROWS] = 0
        self.state[ROWS, owners[fits]] = (self._starts[bucket] + place)[fits]
        self._forget(clock)
        return np.stack([(self._starts[bucket] + place)[fits], old])

    def look_up(self, ids: Ints) -> Ints:
        """``[n]`` rows: the id's own, or the one it shares."""
        keys = keys_of(ids)
        at, known = self._find(keys)
        rows = self.layout.shared(keys)
        own = self.state[ROWS, at[known]]
        rows[known] = np.where(own > 0, own, rows[known])
        return rows

    def observe(self, ids: Ints, counts: Ints, clock: int) -> Changes:
        """Count the ids of step ``clock`` (from 1), each given once with its look-ups over all ranks; admit, and when it is time evict."""
        keys = keys_of(ids)
        order = np.argsort(keys)
        self._count(keys[order], ids[order], counts[order], clock)
        admitted = self._admit(clock)
        if clock % self.rule.evict_every:
            return Changes(admitted=admitted, rows=np.zeros(0, np.int64), ids=np.zeros(0, np.int64))
        rows, new = self._evict(clock)
        self._forget(clock)
        return Changes(admitted=admitted + rows.size, rows=rows, ids=new)

    def _find(self, keys: Keys) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """Where the keys are or would be inserted, and whether they are there."""
        at = np.searchsorted(self._keys, keys)
        known = np.zeros(keys.size, np.bool_)
        inside = at < self._keys.size
        known[inside] = self._keys[at[inside]] == keys[inside]
        return at, known

    def _count(self, keys: Keys, ids: Ints, counts: Ints, clock: int) -> None:
        at, known = self._find(keys)
        self.state[COUNTS, at[known]] += counts[known]
        self.state[USED, at[known]] = clock
        if not known.all():
            new = ~known
            zero = np.zeros(int(new.sum()), np.int64)
            entries = np.stack([ids[new], zero, counts[new], zero + clock])
            self.state = np.insert(self.state, at[new], entries, axis=1)
            self._keys = np.insert(self._keys, at[new], keys[new])

    def _admit(self, clock: int) -> int:
        """Give free rows to the most valuable waiting ids."""
        waiting = self._waiting()
        bucket = self.layout.bucket(self._keys[waiting])
        held = self._held()
        free = np.diff(self._starts) - held
        waiting = waiting[free[bucket] > 0]  # once a table is full, nothing is left to sort
        waiting, bucket, place = self._ranked(waiting, clock, best_first=True)
        fits = place < free[bucket]
        # an owned row is never given back, only passed on: the rows in use are the first ones of a bucket
        self.state[ROWS, waiting[fits]] = (self._starts[bucket] + held[bucket] + place)[fits]
        return int(fits.sum())

    def _evict(self, clock: int) -> tuple[Ints, Ints]:
        """Pass rows on: a bucket's best waiting id takes the row of its worst owner, and so on while it is worth more."""
        inn, in_bucket, in_place = self._ranked(self._waiting(), clock, best_first=True)
        out, out_bucket, _ = self._ranked(np.flatnonzero(self.state[ROWS]), clock, best_first=False)
        held = np.concatenate([[0], np.cumsum(np.bincount(out_bucket, minlength=self.layout.buckets))])
        fits = in_place < np.diff(held)[in_bucket]
        inn, opposite = inn[fits], out[(held[in_bucket] + in_place)[fits]]
        better = self._value(inn, clock)[0] > self._value(opposite, clock)[0]
        inn, opposite = inn[better], opposite[better]
        rows = self.state[ROWS, opposite]
        self.state[ROWS, opposite] = 0
        self.state[ROWS, inn] = rows
        return rows, self.state[IDS, inn]

    def _forget(self, clock: int) -> None:
        """Drop the least valuable waiting entries beyond a bucket's bound."""
        waiting, bucket, place = self._ranked(np.flatnonzero(self.state[ROWS] == 0), clock, best_first=True)
        gone = waiting[place >= np.diff(self._starts)[bucket]]
        if gone.size:
            self.state = np.delete(self.state, gone, axis=1)
            self._keys = np.delete(self._keys, gone)

    def _waiting(self) -> Ints:
        """Entries without a row that were seen often enough for one."""
        return np.flatnonzero((self.state[ROWS] == 0) & (self.state[COUNTS] >= self.rule.admit_after))

    def _held(self) -> Ints:
        """``[buckets]`` rows in use."""
        return np.bincount(self.layout.bucket(self._keys[self.state[ROWS] > 0]), minlength=self.layout.buckets)

    def _value(self, entries: Ints, clock: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], Ints]:
        """What entries are worth, and what decides between equals."""
        counts, used = self.state[COUNTS, entries], self.state[USED, entries]
        if self.rule.policy == "lru":
            return used.astype(np.float64), counts
        if self.rule.policy == "lfu":
            return counts.astype(np.float64), used
        return counts / (clock - used + 1), used

    def _ranked(self, entries: Ints, clock: int, *, best_first: bool) -> tuple[Ints, Ints, Ints]:
        """Entries by bucket and value, their buckets, and each one's place in its bucket from 0."""
        bucket = self.layout.bucket(self._keys[entries])
        value, second = self._value(entries, clock)
        sign = -1 if best_first else 1
        order = np.lexsort((sign * second, sign * value, bucket))  # stable: what is left equal stays in the order of keys
        entries, bucket = entries[order], bucket[order]
        first = np.searchsorted(bucket, bucket)
        return entries, bucket, np.arange(entries.size) - first
