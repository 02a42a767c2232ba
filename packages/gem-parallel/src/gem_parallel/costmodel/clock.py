"""Ranks' clocks: what each computes, which collectives run beside it, and what it waits for."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gem_parallel.mesh import Layout, Part

Times = NDArray[np.float64]
WAITING = "waiting for slower ranks"


@dataclass(frozen=True, slots=True)
class Running:
    """A collective under way: when each rank was ready, when its group began, and when it is done; ``[ranks]`` seconds."""

    name: str
    ready: Times
    began: Times
    done: Times


class Clocks:
    """One clock a rank. A rank has a stream that computes and a link into each tier, which carries one collective at a time, in order.

    A collective begins when the slowest rank of its group is ready. What a rank waits for one is split: until the group began it waited for slower
    ranks, from then on for the network.

    Args:
        layout: which ranks form groups.
        blocking: whether a collective holds up its ranks until it is done.
    """

    def __init__(self, layout: Layout, *, blocking: bool = False) -> None:
        self._layout, self._blocking = layout, blocking
        self.now: Times = np.zeros(layout.world)
        self._links: dict[int, Times] = defaultdict(lambda: np.zeros(layout.world))
        self.parts: dict[str, float] = defaultdict(float)
        """Mean seconds over ranks by what they went to; their sum is the mean of the clocks."""
        self.carried: dict[str, float] = defaultdict(float)
        """Seconds of each collective, hidden or not."""

    def compute(self, name: str, seconds: Times | float) -> None:
        """Each rank computes for so long."""
        self.now = self.now + seconds
        self.parts[name] += float(np.mean(seconds))

    def start(self, name: str, part: Part, axes: tuple[int, ...], seconds: float, *, tier: int, after: Running | None = None) -> Running:
        """Issue a collective along dimensions of a mesh; the ranks go on computing.

        Args:
            tier: the outermost tier that it crosses, whose link it takes.
            after: one that must be done before.
        """
        ready = np.maximum(self.now if after is None else np.maximum(self.now, after.done), self._links[tier])
        grid = ready.reshape(self._layout.sizes(part))
        began = np.broadcast_to(grid.max(axis=axes, keepdims=True), grid.shape).reshape(-1)
        self._links[tier] = done = began + seconds
        self.carried[name] += seconds
        running = Running(name, ready, began, done)
        if self._blocking:
            self.wait(running)
        return running

    def wait(self, running: Running) -> None:
        """Each rank goes on when the collective is done."""
        late = np.maximum(running.done - self.now, 0.0)
        idle = np.minimum(late, running.began - running.ready)
        self.parts[WAITING] += float(idle.mean())
        self.parts[running.name] += float((late - idle).mean())
        self.now = self.now + late

    def wait_all(self, running: Iterable[Running]) -> None:
        """Wait for collectives in the order in which they were issued."""
        for one in running:
            self.wait(one)

    def meet(self) -> float:
        """All ranks wait for the last one; the time is returned."""
        last = float(self.now.max())
        self.parts[WAITING] += max(0.0, last - float(self.now.mean()))
        self.now = np.full_like(self.now, last)
        return last
