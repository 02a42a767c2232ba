"""Collectives over one process group: issued, counted and recorded in one place.

A group of one rank needs no process group: everything then returns its input and counts nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gem_parallel.comm.ledger import LEDGER, Span

gather_into: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_into: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch 2.13 renamed both and warns about the old names."""


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

    def __init__(self, result: Tensor, work: dist.Work | None, span: Span | None = None) -> None:
        self._result, self._work, self._span = result, work, span

    def wait(self) -> Tensor:
        """``[ranks, ...]``."""
        if self._work is not None:
            if self._span is None:
                self._work.wait()
            else:
                with self._span.waiting():
                    self._work.wait()
                self._span.done()
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
        sent = self._count(name, (self.size - 1) * values.nbytes)
        span = LEDGER.span(name, "all_gather", sent, self._group.group_desc, self.size, values.device)
        work = gather_into(out.view(-1), values.contiguous().view(-1), group=self._group, async_op=True)
        return Gathering(out, work, span)

    def reduce_scatter(self, name: str, values: Tensor) -> Tensor:
        """The sum over ranks of this rank's part: ``[size, ...] -> [...]``."""
        if self._group is None:
            return values[0]
        out = values.new_empty(values.shape[1:])
        sent = self._count(name, (self.size - 1) * out.nbytes)
        with LEDGER.blocking(name, "reduce_scatter", sent, self._group.group_desc, self.size, values.device):
            scatter_into(out.view(-1), values.contiguous().view(-1), group=self._group)
        return out

    def all_to_all(self, name: str, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Give the first ``send[0]`` rows of ``values`` to the first rank, and so on; the result holds ``receive[r]`` rows from each rank ``r``."""
        if self._group is None:
            return values
        out = values.new_empty(sum(receive), *values.shape[1:])
        row = values[:1].numel() if values.shape[0] else values.new_empty(1, *values.shape[1:]).numel()
        sent = self._count(name, (sum(send) - send[self.rank]) * row * values.element_size())
        with LEDGER.blocking(name, "all_to_all", sent, self._group.group_desc, self.size, values.device):
            dist.all_to_all_single(out, values.contiguous(), list(receive), list(send), group=self._group)
        return out

    def exchange_counts(self, name: str, counts: Tensor) -> list[list[int]]:
        """Tell every rank ``counts[r]`` (``[size, n]`` int64): what each of them sent, ``[size][n]`` on the host. Synchronises."""
        if self._group is None:
            return counts.tolist()
        out = torch.empty_like(counts)
        sent = self._count(name, (self.size - 1) * counts[0].nbytes)
        with LEDGER.blocking(name, "all_to_all", sent, self._group.group_desc, self.size, counts.device):
            dist.all_to_all_single(out, counts.contiguous(), group=self._group)
        return out.tolist()

    def _count(self, name: str, sent: int) -> int:
        self._traffic.sent[name] += sent
        return sent
