"""The best AUC and NE that can be reached on generated rows, with histories and without."""

from collections.abc import Iterator

import numpy as np

from gem_data.generate.world import Rows, World
from gem_data.score import expected_scores

ROWS_AT_ONCE = 16_384
EVENTS_AT_ONCE = 2_000_000
Baselines = dict[str, dict[str, dict[str, float]]]
WITH, WITHOUT = "bayes expected", "bayes expected without history"


def chunks(world: World, split: str) -> Iterator[Rows]:
    """All rows of a split in order, in pieces of at most ``ROWS_AT_ONCE`` rows (one request, if it has more) and about ``EVENTS_AT_ONCE`` events."""
    candidates, total = world.options.candidates, world.split_rows(split)
    step = max(1, ROWS_AT_ONCE // candidates)
    for first in range(0, -(-total // candidates), step):
        number = np.arange(first, min(first + step, -(-total // candidates)))
        running = np.cumsum(world.history_lengths(split, number)) // EVENTS_AT_ONCE
        for piece in np.split(number, 1 + np.flatnonzero(np.diff(running))):
            yield world.rows(split, np.arange(piece[0] * candidates, min((piece[-1] + 1) * candidates, total)))


def bounds(world: World, split: str) -> Baselines:
    """``{WITH | WITHOUT: {task: {"auc", "ne"}}}``, in expectation over the labels of the split's rows.

    Conversions do not depend on histories, so both bounds of ``cvr`` are one. Memory: 24 bytes a row.
    """
    parts = [(rows.click, rows.blind, rows.conversion) for rows in chunks(world, split)]
    click, blind, conversion = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return score_bounds(click, blind, conversion if world.options.conversion else None)


def score_bounds(click: np.ndarray, blind: np.ndarray, conversion: np.ndarray | None) -> Baselines:
    """The bounds from the true probabilities of every row, each ``[rows]``."""
    everywhere = np.ones(click.size)
    out = {
        WITH: {"ctr": expected_scores(click, everywhere)},
        WITHOUT: {"ctr": expected_scores(click, everywhere, blind)},
    }
    if conversion is not None:
        for figures in out.values():
            figures["cvr"] = expected_scores(conversion, click)
    return out
