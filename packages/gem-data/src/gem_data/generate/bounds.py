"""The best AUC and NE that can be reached on generated rows, with histories and without."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gem_data.generate.draws import Floats
from gem_data.generate.world import Rows, World
from gem_data.score import expected_scores, scores

ROWS_AT_ONCE = 16_384
EVENTS_AT_ONCE = 2_000_000
Baselines = dict[str, dict[str, dict[str, float]]]


def chunks(world: World, split: str) -> Iterator[Rows]:
    """All rows of a split in order, in pieces of at most ``ROWS_AT_ONCE`` rows (one request, if it has more) and about ``EVENTS_AT_ONCE`` events."""
    candidates, total = world.options.candidates, world.split_rows(split)
    step = max(1, ROWS_AT_ONCE // candidates)
    for first in range(0, -(-total // candidates), step):
        number = np.arange(first, min(first + step, -(-total // candidates)))
        running = np.cumsum(world.history_lengths(split, number)) // EVENTS_AT_ONCE
        for piece in np.split(number, 1 + np.flatnonzero(np.diff(running))):
            yield world.rows(split, np.arange(piece[0] * candidates, min((piece[-1] + 1) * candidates, total)))


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is known of rows, each ``[rows]``: true probabilities as in ``Rows``, labels, and whether the conversion label is observed."""

    click: Floats
    blind: Floats
    conversion: Floats
    clicked: NDArray[np.bool_]
    converted: NDArray[np.bool_]
    seen: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Rows) -> Self:
        seen = rows.clicked & rows.closed
        return cls(click=rows.click, blind=rows.blind, conversion=rows.conversion, clicked=rows.clicked, converted=rows.converted, seen=seen)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)})


def bounds(world: World, split: str) -> Baselines:
    """The bounds on a split; memory: 27 bytes a row."""
    return score_bounds(Truth.joined([Truth.of(rows) for rows in chunks(world, split)]), conversion=world.options.conversion)


def score_bounds(truth: Truth, *, conversion: bool) -> Baselines:
    """``{bound: {task: {"auc", "ne"}}}``: the true probabilities with and without histories, scored on the very labels of the rows, and in
    expectation over all labels that they could draw. The latter no predictor beats on average; the former a lucky one may.

    Conversions do not depend on histories, so their bounds are alike. A score that is undefined, for want of a class, is left out.
    """
    everywhere = np.ones(truth.click.size)
    out = {}
    for name, click in (("", truth.click), (" without history", truth.blind)):
        drawn = {"ctr": scores(truth.clicked.astype(np.float64), click)}
        expected = {"ctr": expected_scores(truth.click, everywhere, click)}
        if conversion:
            drawn["cvr"] = scores(truth.converted[truth.seen].astype(np.float64), truth.conversion[truth.seen])
            expected["cvr"] = expected_scores(truth.conversion, truth.click)
        out[f"bayes{name}"] = {task: figures for task, figures in drawn.items() if not np.isnan(figures["auc"])}
        out[f"bayes expected{name}"] = expected
    return out
