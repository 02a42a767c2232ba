"""Evaluation metrics over a whole split and all ranks, and additive metrics of the training stream.

Definitions, with ``p = sigmoid(logit)``, label ``y``, weight ``w``, in float64, over the observed rows with a finite prediction and ``w > 0``:

- normalised entropy NE = weighted mean log loss / entropy of the base rate ``sum(w y) / sum(w)`` (He et al., "Practical Lessons from Predicting
  Clicks on Ads at Facebook", 2014); a model that knows only the base rate has 1;
- calibration = ``sum(w p) / sum(w y)``;
- AUC and group AUC: see ``ranking``.

A metric that is not defined (one class, no rows) is None with a reason, never a huge number.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from gem_core.batch import Batch
from gem_core.spec import RequestError, Task
from gem_core.train.labels import observed, row_weights
from gem_core.train.ranking import GroupAuc, auc, group_auc
from gem_core.train.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetrics:
    """Metrics of one task.

    Args:
        auc: tie-correct AUC.
        ne: normalised entropy.
        calibration: predicted positives over true positives.
        log_loss: weighted mean log loss in nats.
        rows: rows that entered the metrics.
        positives: how many of them are positive.
        unobserved: rows left out because the label is masked or its condition is not met.
        zero_weight: rows left out because they weigh nothing.
        bad_predictions: rows left out because the prediction is not finite.
        group_auc: AUC within groups; None where the data has no groups.
        reasons: ``{metric: why it is None}``.
    """

    auc: float | None
    ne: float | None
    calibration: float | None
    log_loss: float | None
    rows: int
    positives: int
    unobserved: int
    zero_weight: int
    bad_predictions: int
    group_auc: GroupAuc | None = None
    reasons: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def task_metrics(
    logits: Tensor, labels: Tensor, *, mask: Tensor | None = None, weights: Tensor | None = None, groups: Tensor | None = None
) -> TaskMetrics:
    """Metrics of one task over all rows given, on the CPU.

    Args:
        logits: ``[rows]`` of any float dtype.
        labels: ``[rows]``, 0 or 1 where observed.
        mask: ``[rows]`` bool, True where the label is observed; None is everywhere.
        weights: ``[rows]``; None is 1.
        groups: ``[rows]`` int64 for group AUC; None leaves it out.

    Raises:
        RequestError: an observed label is neither 0 nor 1, or its weight is negative or not finite.
    """
    x, y = logits.double(), labels.double()
    seen = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    w = torch.ones_like(x) if weights is None else weights.double()
    _check_observed(y[seen], w[seen])
    weighs, finite = seen & (w > 0), torch.isfinite(x)
    keep = weighs & finite
    counts = {
        "unobserved": int((~seen).sum()),
        "zero_weight": int((seen & (w == 0)).sum()),
        "bad_predictions": int((weighs & ~finite).sum()),
        "rows": int(keep.sum()),
        "positives": int(y[keep].sum()),
    }
    x, y, w = x[keep], y[keep], w[keep]
    sums = torch.stack([w.sum(), (w * y).sum(), (w * x.sigmoid()).sum(), (w * log_losses(x, y)).sum()])
    values, reasons = metrics_of_sums(sums)
    area = auc(x, y, w)
    if area is None:
        reasons["auc"] = reasons["ne"]
    grouped = None if groups is None else group_auc(x, y, w, groups[keep])
    if grouped is not None and grouped.groups_used == 0:
        reasons["group_auc"] = f"none of {grouped.groups_skipped} groups holds both classes"
    return TaskMetrics(
        auc=area,
        ne=values["ne"],
        calibration=values["calibration"],
        log_loss=values["log_loss"],
        **counts,
        group_auc=grouped,
        reasons=reasons,
    )


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Log loss of each row in nats, stable for large logits."""
    return binary_cross_entropy_with_logits(logits, labels, reduction="none")


def metrics_of_sums(sums: Tensor) -> tuple[dict[str, float | None], dict[str, str]]:
    """NE, calibration and mean log loss from four float64 sums over rows: ``w``, ``w y``, ``w p``, ``w log_loss``; and why one is None."""
    weight, positive, predicted, loss = sums.tolist()
    values: dict[str, float | None] = {"ne": None, "calibration": None, "log_loss": None}
    if weight <= 0:
        return values, dict.fromkeys(values, "no rows with weight")
    values["log_loss"] = loss / weight
    reasons = {}
    if positive > 0:
        values["calibration"] = predicted / positive
    else:
        reasons["calibration"] = "no positive row"
    rate = positive / weight
    if 0 < rate < 1:
        values["ne"] = values["log_loss"] / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    else:
        reasons["ne"] = f"one class: no {'negative' if rate > 0 else 'positive'} row"
    return values, reasons


class Predictions:
    """Collects the predictions of a split, batch by batch, and computes exact metrics at the end over all ranks."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        self._parts: dict[str, list[Tensor]] = {task.name: [] for task in tasks}
        self._groups: list[Tensor] = []

    def add(self, logits: Mapping[str, Tensor], batch: Batch) -> None:
        """Take ``{task: [rows]}`` logits of a CPU batch."""
        masks = observed(batch, self._tasks)
        for task in self._tasks:
            columns = (logits[task.name].detach().cpu(), batch.labels[task.name], masks[task.name], row_weights(batch, task.name))
            self._parts[task.name].append(torch.stack([column.double() for column in columns]).T)
        if batch.groups is not None:
            self._groups.append(batch.groups)

    def compute(self, world: World) -> tuple[dict[str, TaskMetrics], dict[str, Tensor]] | None:
        """Metrics of each task over the rows of all ranks, and those rows; None on every rank but the first. Collective.

        The rows of a task are ``[rows, 4]`` float64, rank after rank: logit, label, 1 where the label is observed, weight.

        Raises:
            RequestError: as ``task_metrics``, or some batches carry groups and others do not.
        """
        no_groups, no_rows = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.float64)
        groups = world.gather_rows(torch.cat([no_groups, *self._groups]))
        columns = {name: world.gather_rows(torch.cat([no_rows, *parts])) for name, parts in self._parts.items()}
        if not world.leads:
            return None
        return {name: _of_columns(name, table, groups) for name, table in columns.items()}, columns


def _of_columns(task: str, table: Tensor, groups: Tensor) -> TaskMetrics:
    if groups.numel() not in (0, table.shape[0]):
        so = f"{groups.numel()} of {table.shape[0]} rows carry a group"
        raise RequestError(f"group AUC of {task!r}", so, "A source gives groups with every batch or with none.")
    logits, labels, mask, weights = table.unbind(1)
    return task_metrics(logits, labels, mask=mask.bool(), weights=weights, groups=groups if groups.numel() else None)


class StreamMetrics:
    """NE and calibration of the training stream, where each batch is scored before it is learned from: since the last log, and over the run.

    The state is four float64 sums a task (see ``metrics_of_sums``) on the training device; nothing synchronises until it is read.
    """

    def __init__(self, tasks: Sequence[Task], device: torch.device) -> None:
        self._tasks = tuple(task.name for task in tasks)
        self._window = torch.zeros(len(self._tasks), 4, dtype=torch.float64, device=device)
        self._run = torch.zeros_like(self._window)

    def add(self, sums: Tensor) -> None:
        """Add ``[tasks, 4]`` sums of this rank's rows."""
        self._window += sums

    def read(self, world: World, *, close_window: bool) -> dict[str, dict[str, dict[str, float | None]]]:
        """``{"window" | "run": {task: {"ne", "calibration", "log_loss"}}}`` over all ranks; collective. ``close_window`` starts a new window."""
        state = self.state_dict(world)
        if close_window:
            self._run += self._window
            self._window.zero_()
        whole = {"window": state["window"], "run": state["window"] + state["run"]}
        return {span: {task: metrics_of_sums(row)[0] for task, row in zip(state["tasks"], sums, strict=True)} for span, sums in whole.items()}

    def state_dict(self, world: World) -> dict[str, Any]:
        """The sums over all ranks on the CPU; collective."""
        return {
            "tasks": list(self._tasks),
            "window": world.all_gather(self._window.cpu()).sum(0),
            "run": world.all_gather(self._run.cpu()).sum(0),
        }

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> list[str]:
        """Continue from a saved state, whatever the number of ranks that saved it.

        Returns:
            Names that only one of the two sides knows; they start at zero or are left out.
        """
        for index, task in enumerate(self._tasks):
            if task in state["tasks"] and world.leads:  # the sums of all ranks are carried by one
                saved = state["tasks"].index(task)
                self._window[index] = state["window"][saved].to(self._window.device)
                self._run[index] = state["run"][saved].to(self._run.device)
        return sorted(set(self._tasks) ^ set(state["tasks"]))


def stream_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """``[4]`` float64 sums of ``metrics_of_sums`` over rows; ``weights`` are 0 where a row does not count."""
    with torch.no_grad():
        x, y, w = logits.double(), labels.double(), weights.double()
        return torch.stack([w.sum(), (w * y).sum(), (w * x.sigmoid()).sum(), (w * log_losses(x, y)).sum()])


def _check_observed(labels: Tensor, weights: Tensor) -> None:
    bad = ((labels != 0) & (labels != 1)).nonzero()
    if bad.numel():
        so = f"an observed label is {float(labels[int(bad[0])])}"
        raise RequestError("metrics", so, "Labels are 0 or 1; mask out rows whose label is unknown.")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise RequestError("metrics", "a weight is negative or not finite", "Weights are finite and not negative.")
