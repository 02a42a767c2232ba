"""How a managed table's rows are divided, and the hash that says which ids share what.

Row 0 is for missing and unknown ids; the next ``hashed`` rows are shared, by hash, by ids without a row of their own; the rest are owned, in
``buckets`` ranges of equal size. An id belongs to one bucket for ever. Its row depends on buckets, not on ranks: any number of ranks gives the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from gem_core.config.schema import ManagedTable
from gem_core.spec import RequestError, TableSpec, table_seed

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def mix(x: Keys) -> Keys:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 17) of ``x + GAMMA``: a bijection of 64-bit words."""
    x = x + _GAMMA
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))


def keys_of(ids: Ints) -> Keys:
    """``[n]`` different keys of different ids; buckets are ranges of keys."""
    return mix(ids.view(np.uint64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The division of one table: ``rows`` in all, ``hashed`` of them shared by hash, and the number of ``buckets``."""

    rows: int
    hashed: int
    buckets: int

    @property
    def first(self) -> int:
        """The first owned row."""
        return 1 + self.hashed

    def starts(self) -> Ints:
        """``[buckets + 1]``: the first owned row of each bucket, and the end."""
        return np.asarray(self.first + (self.rows - self.first) * np.arange(self.buckets + 1) // self.buckets, np.int64)

    def bucket(self, keys: Keys) -> Ints:
        """``[n]``; it never falls where keys rise."""
        return ((keys >> _HALF) * np.uint64(self.buckets) >> _HALF).astype(np.int64)

    def shared(self, keys: Keys) -> Ints:
        """``[n]`` rows of ids that own none."""
        if not self.hashed:
            return np.zeros(keys.size, np.int64)
        return 1 + (mix(keys) % np.uint64(self.hashed)).astype(np.int64)


def layout_of(rule: ManagedTable) -> Layout:
    """The division that a rule asks for.

    Raises:
        RequestError: a bucket would own no row.
    """
    owned = rule.rows - 1 - rule.hashed_rows
    if owned < rule.buckets:
        so = f"of {rule.rows} rows, {owned} are left for {rule.buckets} buckets, beside row 0 and {rule.hashed_rows} hashed rows"
        raise RequestError(f"embedding.ids, pattern {rule.pattern!r}", so, "Give more rows, or fewer buckets or hashed rows.")
    return Layout(rows=rule.rows, hashed=rule.hashed_rows, buckets=rule.buckets)


def rules_by_table(tables: Sequence[TableSpec], rules: Sequence[ManagedTable]) -> dict[str, ManagedTable]:
    """The rule of each managed table: the first whose pattern matches its name.

    Raises:
        RequestError: a rule matches no table, or asks for more than its rows allow.
    """
    for rule in rules:
        layout_of(rule)
        if not any(fnmatchcase(table.name, rule.pattern) for table in tables):
            so = f"the model's tables are {', '.join(table.name for table in tables)}"
            raise RequestError(f"embedding.ids, pattern {rule.pattern!r}", so, "Name one of them; * and ? stand for any text and any letter.")
    found = {table.name: next((rule for rule in rules if fnmatchcase(table.name, rule.pattern)), None) for table in tables}
    return {name: rule for name, rule in found.items() if rule is not None}


def with_rows(tables: Sequence[TableSpec], rules: Mapping[str, ManagedTable]) -> list[TableSpec]:
    """The tables as an engine builds them: a managed one has the rows of its rule, whatever the number of ids."""
    return [replace(table, rows=rules[table.name].rows) if table.name in rules else table for table in tables]


def fresh_weights(table: TableSpec, ids: Ints, seed: int) -> NDArray[np.float32]:
    """``[n, dim]``: what ids start from that take over a used row: uniform in ``[-init_scale, init_scale)``, by seed, table, id and column."""
    base = mix(keys_of(ids) ^ np.uint64(table_seed(seed, table.name)))
    words: Keys = mix(np.add(base[:, None], np.arange(table.dim, dtype=np.uint64), dtype=np.uint64))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)) * np.float32(table.init_scale)
