"""What a step has to do, by its batches, and the cost model that explains the ranks' compute times by it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gem_core.batch import Batch

Floats = NDArray[np.float64]


def load_of(batches: Sequence[Batch]) -> tuple[int, int, int]:
    """``(tokens, pairs, rows)`` of CPU batches: events, squared numbers of events by row and group, rows."""
    tokens = pairs = rows = 0
    for batch in batches:
        rows += batch.rows
        for jagged in batch.event_offsets.values():
            lengths = np.diff(jagged.offsets.numpy())
            tokens += int(lengths.sum())
            pairs += int(lengths @ lengths)
    return tokens, pairs, rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """``seconds = token * tokens + pair * pairs + step``, and the share of the variance that it explains (R squared)."""

    token: float
    pair: float
    step: float
    explained: float

    def of(self, tokens: Floats, pairs: Floats) -> Floats:
        """Seconds of steps."""
        return self.token * tokens + self.pair * pairs + self.step


@dataclass(slots=True)
class CostFit:
    """Least squares over all steps of all ranks so far, by sums: memory does not grow with the run."""

    count: int = 0
    _normal: Floats = field(default_factory=lambda: np.zeros((4, 4)))

    def add(self, tokens: Floats, pairs: Floats, seconds: Floats) -> None:
        """Take in steps, ``[steps]`` each."""
        terms = np.stack([tokens, pairs, np.ones_like(seconds), seconds], axis=1)
        self._normal += terms.T @ terms
        self.count += len(seconds)

    def fit(self) -> Cost | None:
        """The best model without a negative term; None for fewer than 8 steps, or steps that do not tell the terms apart."""
        scale = np.sqrt(np.diag(self._normal))
        if self.count < 8 or not scale.all():
            return None
        normal, found = self._normal / np.outer(scale, scale), np.zeros(3)
        kept = [0, 1, 2]
        while kept:
            if np.linalg.matrix_rank(normal[np.ix_(kept, kept)], tol=1e-9) < len(kept):
                return None
            some = np.linalg.solve(normal[np.ix_(kept, kept)], normal[kept, 3])
            if some.min() >= 0:
                found[kept] = some
                break
            kept.pop(int(some.argmin()))
        mean = self._normal[2, 3] ** 2 / self.count
        residual = scale[3] ** 2 * max(0.0, 1.0 - 2 * found @ normal[:3, 3] + found @ normal[:3, :3] @ found)
        spread = self._normal[3, 3] - mean
        token, pair, step = (found * scale[3] / scale[:3]).tolist()
        return Cost(token=token, pair=pair, step=step, explained=float(1 - residual / spread) if spread > 0 else 0.0)
