"""Comparing paired runs, row by row.

Normalised entropy and calibration are those of gem-core: with ``p = sigmoid(logit)``, NE is the weighted mean log loss over the entropy of the base
rate, calibration ``sum(w p) / sum(w y)``. Differences are relative, in percent. Rows of a test split that lie near each other belong together (a
user, an hour), so intervals come from a bootstrap over blocks of consecutive rows (Künsch 1989), the same blocks for both sides of a pair.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gem_core.spec import RequestError

Floats = NDArray[np.float64]
SMALLEST_LIMIT = 0.02
"""Percent of NE that counts as nothing, whatever the band: a change of 0.02 % is significant in ads ranking (arXiv 2403.02545)."""
CALIBRATION_LIMIT = 0.2
"""Percent."""
BLOCKS = 100


@dataclass(frozen=True, slots=True)
class Scored:
    """The scored rows of one run and task: ``[rows]`` each."""

    logit: Floats
    label: Floats
    weight: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the pairs say of one task. Percentages are of the baseline.

    Args:
        task: the task.
        ne: mean NE of baseline and candidate.
        difference: mean over pairs of the relative difference of NE.
        low: lower end of its 95 % interval over blocks of rows.
        high: upper end.
        band: largest relative difference of NE between two baseline runs: what a change of seed alone does; None with one seed.
        limit: what the difference may be: the larger of the band and ``SMALLEST_LIMIT``.
        calibration: mean over pairs of the relative difference of calibration.
        holds: the difference is within the limit and calibration within ``CALIBRATION_LIMIT``, on either side.
    """

    task: str
    ne: tuple[float, float]
    difference: float
    low: float
    high: float
    band: float | None
    limit: float
    calibration: float
    holds: bool

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compare(task: str, baseline: Sequence[Scored], candidate: Sequence[Scored], *, draws: int = 1000) -> Verdict:
    """Compare runs pair by pair: same seed, same data, another format.

    Raises:
        RequestError: the sides differ in number or rows, a prediction is not finite, or the labels have one class.
    """
    _check(task, baseline, candidate)
    before, after = (np.stack([_block_sums(run) for run in side]) for side in (baseline, candidate))  # [runs, blocks, 4]
    ne_before, ne_after = _ne(before.sum(1)), _ne(after.sum(1))
    difference = _percent(ne_after, ne_before).mean()
    picks = np.random.default_rng(0).integers(0, before.shape[1], (draws, before.shape[1]))
    resampled = np.stack([_percent(_ne(after[:, pick].sum(1)), _ne(before[:, pick].sum(1))).mean() for pick in picks])
    low, high = np.quantile(resampled, (0.025, 0.975))
    calibration = _percent(_calibration(after.sum(1)), _calibration(before.sum(1))).mean()
    pairs = [abs(_percent(b, a)) for a, b in combinations(ne_before, 2)]
    band = float(max(pairs)) if pairs else None
    limit = max(SMALLEST_LIMIT, band or 0.0)
    return Verdict(
        task=task,
        ne=(float(ne_before.mean()), float(ne_after.mean())),
        difference=float(difference),
        low=float(low),
        high=float(high),
        band=band,
        limit=limit,
        calibration=float(calibration),
        holds=bool(abs(difference) <= limit and abs(calibration) <= CALIBRATION_LIMIT),
    )


def _check(task: str, baseline: Sequence[Scored], candidate: Sequence[Scored]) -> None:
    asked = f"comparing runs on task {task!r}"
    if not baseline or len(baseline) != len(candidate):
        raise RequestError(asked, f"{len(baseline)} runs against {len(candidate)}", "Give as many runs of each side, in pairs.")
    first = baseline[0]
    for run in (*baseline, *candidate):
        if not (np.array_equal(run.label, first.label) and np.array_equal(run.weight, first.weight)):
            raise RequestError(asked, "the runs were scored on different rows", "Compare runs on one test split, scored by as many ranks.")
        bad = int((~np.isfinite(run.logit[run.weight > 0])).sum())
        if bad:
            raise RequestError(asked, f"{bad} predictions of a run are not finite", "That run is broken; no difference of NE says more.")
    rate = (first.weight * first.label).sum() / max(first.weight.sum(), 1e-300)
    if not 0 < rate < 1:
        raise RequestError(asked, "its labels have one class", "NE is not defined; choose another split.")


def _block_sums(run: Scored) -> Floats:
    """``[blocks, 4]``: sums of w, w y, w p and w times log loss over blocks of consecutive rows."""
    y, w = run.label, run.weight
    x = np.where(w > 0, run.logit, 0.0)  # a row that does not count may hold anything
    loss = np.logaddexp(0, x) - x * y
    columns = np.stack([w, w * y, w / (1 + np.exp(-np.clip(x, -700, 700))), w * loss], axis=1)
    return np.stack([part.sum(0) for part in np.array_split(columns, min(BLOCKS, max(1, len(x))))])


def _ne(sums: Floats) -> Floats:
    """NE of ``[..., 4]`` sums; NaN for one class."""
    weight, positive, _, loss = np.moveaxis(sums, -1, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = positive / weight
        return np.asarray(loss / weight / -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def _calibration(sums: Floats) -> Floats:
    return np.asarray(sums[..., 2] / sums[..., 1])


def _percent(new: Floats, old: Floats) -> Floats:
    return np.asarray(100 * (new - old) / old)
