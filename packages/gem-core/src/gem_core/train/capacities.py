"""Sizes of graphs: how many events of each group, and ids of each feature with any number of them, the batches to come may have."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from statistics import NormalDist, fmean, pvariance

import torch
from torch import Tensor

from gem_core.batch import Batch
from gem_core.train.static_inputs import Extents

SPREAD = 5.0
"""The largest capacity holds batches that are by so many standard deviations larger than the mean."""
STEP = 0.05
"""What heights of capacities are multiples of, in standard deviations below ``SPREAD``."""
LOWEST = -2.0
KEPT = 1024
"""Batches that a survey remembers, the latest: batches that fit no capacity go on being looked at as long as a run lasts."""


class Survey:
    """Batches that were looked at.

    Args:
        extents: of the data set.
    """

    def __init__(self, extents: Extents) -> None:
        self._extents = extents
        self._sizes: deque[dict[str, int]] = deque(maxlen=KEPT)
        self._variances: deque[Tensor] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, batch: Batch, sizes: Mapping[str, int]) -> None:
        """Look at a batch of these sizes by extent. What its rows say stays on its device until capacities are chosen."""
        names = self._extents.names
        self._sizes.append({name: sizes[name] for name in names})
        each = [self._extents.lengths(batch, name).double().var(correction=0) for name in names]
        self._variances.append(batch.rows * torch.stack(each) if each else torch.zeros(0))

    def capacities(self, count: int) -> list[dict[str, int]]:
        """As ``capacities`` for what was looked at. Waits for the device."""
        alone = torch.stack(list(self._variances)).mean(0).tolist()
        return capacities(list(self._sizes), dict(zip(self._extents.names, alone, strict=True)), count)


def capacities(seen: Sequence[Mapping[str, int]], alone: Mapping[str, float], count: int) -> list[dict[str, int]]:
    """At most ``count`` capacities, each once, the smallest first. The last holds every batch seen, and those of ``SPREAD`` standard deviations.

    Batches seen may be more alike than those to come: where rows are dealt out evenly within windows, all may be of one. Their mean then has the
    variance of a mean over independent rows, and that of any later window as long has it too; both are added to what the batches seen vary by.

    Args:
        seen: sizes of batches, by name.
        alone: variance of the sizes if the rows of batches were independent.
        count: 1 or more.
    """
    names = list(seen[0])
    mean = {name: fmean(sizes[name] for sizes in seen) for name in names}
    deviation = {name: sqrt(pvariance([sizes[name] for sizes in seen]) + 2 * alone[name] / len(seen)) for name in names}
    found = []
    for height in levels(count, max(1, sum(each > 0 for each in deviation.values()))):
        found.append({name: max(0, ceil(mean[name] + height * deviation[name])) for name in names})
    found[-1] = {name: max(found[-1][name], *(sizes[name] for sizes in seen)) for name in names}
    return [each for i, each in enumerate(found) if each not in found[:i]]


def levels(count: int, groups: int) -> list[float]:
    """How many standard deviations above the mean ``count`` capacities stand that cost least on average, the last of them at ``SPREAD``.

    Sizes of so many groups are normal and independent. A batch takes the lowest capacity that it fits with all of them, so one of height ``z`` is
    enough for a share ``Phi(z) ** groups`` of the batches; all partitions of the heights into ``count`` are searched (dynamic programming).
    """
    heights = [SPREAD - STEP * i for i in range(round((SPREAD - LOWEST) / STEP), -1, -1)]
    enough = [NormalDist().cdf(height) ** groups for height in heights]
    cost = [height * share for height, share in zip(heights, enough, strict=True)]
    chosen = [[height] for height in heights]

    def after(j: int, i: int) -> float:
        return cost[j] + heights[i] * (enough[i] - enough[j])

    for _ in range(count - 1):
        before = [min((after(j, i), j) for j in range(i + 1))[1] for i in range(len(heights))]
        cost, chosen = [after(j, i) for i, j in enumerate(before)], [[*chosen[j], heights[i]] for i, j in enumerate(before)]
    return chosen[-1]
