"""Exact area under the ROC curve, over all rows and within groups, in float64.

AUC is the Mann-Whitney statistic: the chance that a positive scores above a negative, where a tie counts one half. With weights a pair counts the
product of its two weights. The result does not depend on the order of the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAuc:
    """AUC within groups, averaged over the groups that hold both classes.

    Args:
        unweighted: each group counts the same; None when no group holds both classes.
        impression_weighted: each group counts by its number of rows; None likewise.
        groups_used: groups with both classes.
        groups_skipped: groups with one class.
    """

    unweighted: float | None
    impression_weighted: float | None
    groups_used: int
    groups_skipped: int


def auc(scores: Tensor, labels: Tensor, weights: Tensor) -> float | None:
    """AUC of ``scores`` ``[rows]`` for ``labels`` in {0, 1} ``[rows]``; None unless both classes have weight. O(n log n)."""
    one_group = torch.zeros(scores.shape[0], dtype=torch.int64)
    ranked = _ranked(scores, labels, weights, one_group)
    pairs, positives, negatives, _ = ranked
    return float(pairs[0] / (positives[0] * negatives[0])) if pairs.numel() and positives[0] > 0 and negatives[0] > 0 else None


def group_auc(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> GroupAuc:
    """AUC within each of ``groups`` ``[rows]`` int64, averaged both ways. One sort, no loop over groups."""
    pairs, positives, negatives, rows = _ranked(scores, labels, weights, groups)
    used = (positives > 0) & (negatives > 0)
    each = pairs[used] / (positives[used] * negatives[used])
    count, size = int(used.sum()), rows[used]
    return GroupAuc(
        unweighted=float(each.mean()) if count else None,
        impression_weighted=float((each * size).sum() / size.sum()) if count else None,
        groups_used=count,
        groups_skipped=used.numel() - count,
    )


def _ranked(scores: Tensor, labels: Tensor, weights: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each group, ``[groups]`` float64: weight of rightly ordered pairs, of positives, of negatives, and the number of rows."""
    if scores.numel() == 0:
        return (torch.zeros(0, dtype=torch.float64),) * 4
    order = scores.argsort(stable=True)
    order = order[groups[order].argsort(stable=True)]
    score, group, label = scores[order], groups[order], labels[order].double()
    weight = weights[order].double()
    new_group = _starts(group)
    new_tie = new_group | _starts(score)
    tie, group_of_row = new_tie.cumsum(0) - 1, new_group.cumsum(0) - 1
    ties, count = int(tie[-1]) + 1, int(group_of_row[-1]) + 1
    positive = weight.new_zeros(ties).index_add_(0, tie, weight * label)
    negative = weight.new_zeros(ties).index_add_(0, tie, weight * (1 - label))
    group_of_tie = group_of_row[new_tie]
    before = negative.cumsum(0) - negative  # negatives at lower scores, earlier groups included
    below = before - before[_starts(group_of_tie)][group_of_tie]

    def per_group(index: Tensor, values: Tensor) -> Tensor:
        return weight.new_zeros(count).index_add_(0, index, values)

    pairs = per_group(group_of_tie, positive * (below + negative / 2))
    rows = per_group(group_of_row, torch.ones_like(weight))
    return pairs, per_group(group_of_tie, positive), per_group(group_of_tie, negative), rows


def _starts(values: Tensor) -> Tensor:
    """``[n]`` bool: where a run of equal values begins."""
    return torch.cat([torch.ones(1, dtype=torch.bool), values[1:] != values[:-1]])
