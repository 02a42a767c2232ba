"""Collectives over one process group, with a count of the bytes that each sends.

A group of one rank needs no process group: everything then returns its input and counts nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank sent to other ranks, by the collectives' names, since the last ``take``."""

    sent: Counter[str] = field(default_factory=Counter)

    def take(self) -> dict[str, int]:
        """The counts so far; counting starts again."""
        taken, self.sent = dict(self.sent), Counter()
        return taken


class Gathering:
    """An all-gather under way; ``wait`` gives its result."""

    def __init__(self, result: Tensor, work: dist.Work | None) -> None:
        self._result, self._work = result, work

    def wait(self) -> Tensor:
        """``[ranks, ...]``."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._result


class Collectives:
    """The collectives of one group.

    Args:
        group: the process group; None for this rank alone.
        traffic: where bytes are counted.
    """

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic) -> None:
        self._group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._traffic = traffic

    def all_gather(self, name: str, values: Tensor) -> Gathering:
        """Start to gather equal shapes ``[...] -> [size, ...]``."""
        if self._group is None:
            return Gathering(values[None], None)
        out = values.new_empty(self.size, *values.shape)
        self._traffic.sent[name] += (self.size - 1) * values.numel() * values.element_size()
        work = dist.all_gather_into_tensor(out.view(-1), values.contiguous().view(-1), group=self._group, async_op=True)
        return Gathering(out, work)

    def all_to_all(self, name: str, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Give the first ``send[0]`` rows of ``values`` to the first rank, and so on; the result holds ``receive[r]`` rows from each rank ``r``."""
        if self._group is None:
            return values
        out = values.new_empty(sum(receive), *values.shape[1:])
        row = values[:1].numel() if values.shape[0] else values.new_empty(1, *values.shape[1:]).numel()
        self._traffic.sent[name] += (sum(send) - send[self.rank]) * row * values.element_size()
        dist.all_to_all_single(out, values.contiguous(), list(receive), list(send), group=self._group)
        return out

    def exchange_counts(self, name: str, counts: Tensor) -> list[list[int]]:
        """Tell every rank ``counts[r]`` (``[size, n]`` int64): what each of them sent, ``[size][n]`` on the host. Synchronises."""
        if self._group is None:
            return counts.tolist()
        out = torch.empty_like(counts)
        self._traffic.sent[name] += (self.size - 1) * counts[0].numel() * counts.element_size()
        dist.all_to_all_single(out, counts.contiguous(), group=self._group)
        return out.tolist()
