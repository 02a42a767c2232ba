"""Hypothesis strategies for jagged data."""

from typing import Any

import torch
from hypothesis import strategies as st

from gem_core.batch import Batch, Jagged, KeyedJagged, lengths_to_offsets
from gem_core.spec.data import DataSchema, IdFeature


def jagged_lengths(*, min_rows: int = 0, max_rows: int = 8, max_length: int = 70) -> st.SearchStrategy[list[int]]:
    """Row lengths that shrink to few, short rows; empty rows and one long row among short ones come up often."""
    short = st.integers(0, min(3, max_length))
    edges = st.sampled_from([n for n in (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65) if n <= max_length])
    return st.lists(st.one_of(short, edges, st.integers(0, max_length)), min_size=min_rows, max_size=max_rows)


def jagged_offsets(**limits: Any) -> st.SearchStrategy[torch.Tensor]:
    """Offsets ``[rows + 1]`` int64 of ``jagged_lengths``; same arguments."""
    return jagged_lengths(**limits).map(lambda lengths: lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)))


def batches(schema: DataSchema, *, min_rows: int = 0, max_rows: int = 6) -> st.SearchStrategy[Batch]:
    """CPU batches of a schema: valid ids, labels of 0 and 1, some of them masked, histories of any length up to the schema's."""
    drawn = st.tuples(st.integers(min_rows, max_rows), st.integers(0, 2**31 - 1), st.floats(0.0, 1.0))
    return drawn.map(lambda parts: random_batch(schema, parts[0], seed=parts[1], fullness=parts[2]))


def random_batch(schema: DataSchema, rows: int, *, seed: int, fullness: float = 0.5) -> Batch:
    """One CPU batch of ``rows`` rows.

    Args:
        schema: what it holds.
        rows: number of rows, may be 0.
        seed: equal seeds give equal batches.
        fullness: share of each group's longest history that rows may reach.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, size: int) -> torch.Tensor:
        return torch.randint(max(high, 1), (size,), generator=generator)

    def column(feature: IdFeature, offsets: torch.Tensor) -> Jagged:
        longest = int(offsets.diff().max()) if rows else 0
        return Jagged(integers(feature.cardinality, int(offsets[-1])), offsets, longest)

    columns: dict[str, Jagged] = {}
    for feature in schema.ids:
        lengths = integers(4, rows) if feature.multi else torch.ones(rows, dtype=torch.int64)
        columns[feature.name] = column(feature, lengths_to_offsets(lengths))
    event_dense, event_time, event_offsets = {}, {}, {}
    for group in schema.sequences:
        offsets = lengths_to_offsets(integers(round(group.max_length * fullness) + 1, rows))
        total = int(offsets[-1])
        event_offsets[group.name] = Jagged(torch.empty(0), offsets, int(offsets.diff().max()) if rows else 0)
        columns.update({f"{group.name}.{f.name}": column(f, offsets) for f in group.ids})
        event_dense.update({f"{group.name}.{d.name}": torch.randn(total, d.width, generator=generator) for d in group.dense})
        if group.time:
            event_time[group.name] = integers(10**6, total)
    return Batch(
        rows=rows,
        ids=KeyedJagged.from_columns(columns, rows),
        labels={task.name: integers(2, rows).float() for task in schema.tasks},
        dense={d.name: torch.randn(rows, d.width, generator=generator) for d in schema.dense},
        event_dense=event_dense,
        event_time=event_time,
        event_offsets=event_offsets,
        masks={task.name: integers(4, rows) > 0 for task in schema.tasks},
        weights={},
        time=integers(10**6, rows) + 10**6 if any(group.time for group in schema.sequences) else None,
        groups=integers(3, rows) if schema.group else None,
        global_rows=rows,
    )
