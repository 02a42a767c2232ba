"""What the ranks' steps say together: the parts of a step, who is waited for, and which exchange is slow.

Ranks run in step, so every step takes all of them the same time: a rank computes for ``local`` seconds and is blocked for the rest. Of that, the wait
for the slowest rank is ``max over ranks of local - own local``; what remains is transfer. No clocks are compared between ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from gem_core.train.ledger.clock import AGREE, BACKWARD, FORWARD, StepTimes
from gem_core.train.ledger.load import Cost

Floats = NDArray[np.float64]

WAIT = "wait for the slowest"
EXCHANGE = "exchange: "
NOTICED = 0.1
"""A rank or an exchange is named when it costs more than this part of a step."""
MOSTLY = 2 / 3
"""A rank is named when it is the slowest in at least this part of the steps."""
LEAST = 4
"""Steps without which nobody is named."""
SLOWER = 3.0
"""An exchange is slow when it takes so many times what others take."""


class Exchange(NamedTuple):
    """A collective of one rank in a window: calls (0 for a wait) and bytes of a mean step, ranks, seconds of a median step, all exposed seconds."""

    calls: float
    sent: float
    ranks: int
    seconds: float
    exposed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """What one rank tells the others of a window.

    Args:
        steps: ``[steps, 7]``: number, seconds, blocked, compute (forward and backward), tokens, pairs, rows.
        parts: seconds by phase, over all steps.
        exchanges: by collective, in the order of their first call.
    """

    steps: Floats
    parts: Mapping[str, float]
    exchanges: Mapping[str, Exchange]

    @classmethod
    def of(cls, steps: Sequence[StepTimes], loads: Mapping[int, tuple[int, int, int]]) -> Self:
        """From a rank's own steps and what each had to do."""
        rows, parts, names = [], dict[str, float](), dict[str, None]()
        for s in steps:
            rows.append((s.step, s.seconds, s.blocked, s.parts.get(FORWARD, 0.0) + s.parts.get(BACKWARD, 0.0), *loads[s.step]))
            for label, seconds in s.parts.items():
                parts[label] = parts.get(label, 0.0) + seconds
            names |= dict.fromkeys(s.collectives)
        exchanges = {}
        for name in names:
            calls = [s.collectives[name] for s in steps if name in s.collectives]
            exchanges[name] = Exchange(
                calls=sum(c.calls for c in calls) / len(steps),
                sent=sum(c.sent for c in calls) / len(steps),
                ranks=calls[0].ranks,
                seconds=median([c.seconds for c in calls]),
                exposed=sum(c.exposed for c in calls),
            )
        return cls(steps=np.array(rows, dtype=np.float64).reshape(-1, 7), parts=parts, exchanges=exchanges)


class Together:
    """A window of steps over all ranks.

    Args:
        told: by rank, in rank order; every rank has the same steps. At least one step is needed for anything but ``count``.
    """

    def __init__(self, told: Sequence[Told]) -> None:
        self._told = told
        every = np.stack([t.steps for t in told])  # [ranks, steps, 7]
        self.count = every.shape[1]
        self.tokens, self.pairs, self.rows = (every[:, :, column] for column in (4, 5, 6))
        self.compute: Floats = every[:, :, 3]
        self.numbers: list[int] = every[0, :, 0].astype(int).tolist()
        self._blocked = every[:, :, 2]
        self._local = every[:, :, 1] - self._blocked
        self._wait = np.minimum(self._blocked, self._local.max(0) - self._local)
        self.walls: Floats = every[:, :, 1].mean(0)
        self.seconds = float(self.walls.mean()) if self.count else 0.0

    def parts(self) -> dict[str, float]:
        """Seconds of a mean step, as means over ranks, the largest first; they add up to the step."""
        sums: dict[str, float] = {WAIT: 0.0}
        for told, wait, blocked in zip(self._told, self._wait.sum(1), self._blocked.sum(1), strict=True):
            own = dict(told.parts) | {f"{EXCHANGE}{name}": exchange.exposed for name, exchange in told.exchanges.items()}
            transfer = 1.0 - wait / blocked if blocked > 0 else 1.0
            sums[WAIT] += wait
            for label, seconds in own.items():
                blocking = label == AGREE or label.startswith(EXCHANGE)
                sums[label] = sums.get(label, 0.0) + seconds * (transfer if blocking else 1.0)
        if len(self._told) == 1:
            sums.pop(WAIT)
        means = {label: float(seconds) / (self.count * len(self._told)) for label, seconds in sums.items()}
        return dict(sorted(means.items(), key=lambda item: -item[1]))

    def imbalance(self) -> float:
        """Largest over mean of the ranks' compute times, minus 1; the mean over steps."""
        return float((self.compute.max(0) / np.maximum(self.compute.mean(0), 1e-12) - 1).mean())

    def bound(self) -> dict[str, Any]:
        """The shortest step these ranks could take if all communication hid behind local work: max over ranks of max(local, communication)."""
        local, wait = self._local.mean(1), self._wait.mean(1)
        exchanged = [sum(e.seconds for e in told.exchanges.values() if e.calls) + told.parts.get(AGREE, 0.0) / self.count for told in self._told]
        sent = np.maximum(0.0, np.array(exchanged) - wait)
        rank = int(np.maximum(local, sent).argmax())
        by = "local work" if local[rank] >= sent[rank] else "communication"
        return {"seconds": float(max(local[rank], sent[rank])), "rank": rank, "by": by}

    def slowest(self) -> dict[str, Any]:
        """The rank that is the slowest most often, by how much its local work exceeds the mean, and in which part of the steps."""
        ranks = np.bincount(self._local.argmax(0), minlength=len(self._told))
        rank = int(ranks.argmax())
        over = self._local[rank].mean() / max(float(self._local.mean()), 1e-12) - 1
        return {"rank": rank, "over_mean": float(over), "share_of_steps": float(ranks[rank] / self.count)}

    def straggler(self, cost: Cost | None) -> dict[str, Any] | None:
        """The rank that the others wait for in most steps, if that costs them anything.

        Returns:
            ``rank``, ``seconds`` that a step is longer for it, ``share_of_steps``, and with a cost model ``explained``: the part of those seconds
            that its load explains.
        """
        if len(self._told) < 2 or self.count < LEAST:
            return None
        others = np.stack([np.median(np.delete(self._local, rank, 0), axis=0) for rank in range(len(self._told))])
        excess = np.median(self._local - others, axis=1)
        rank = int(excess.argmax())
        share = float((self._local.argmax(0) == rank).mean())
        if excess[rank] < NOTICED * self.seconds or share < MOSTLY:
            return None
        named = {"rank": rank, "seconds": float(excess[rank]), "share_of_steps": share}
        if cost is not None:
            expected = cost.of(self.tokens.mean(1), self.pairs.mean(1))
            named["explained"] = float((expected[rank] - np.delete(expected, rank).mean()) / excess[rank])
        return named

    def slow_exchange(self) -> dict[str, Any] | None:
        """The first exchange of a step that is slow beyond waiting for the slowest: between some ranks, or beside exchanges that carry as much.

        A later one that seems slow may only be waiting for the ranks that the first one held up, so one is named at a time.

        Returns:
            ``name``, ``ranks`` between which it is slow, ``seconds`` a step that it takes there and ``expected`` seconds.
        """
        names = [name for name, e in self._told[0].exchanges.items() if e.calls and all(name in told.exchanges for told in self._told)]
        if len(self._told) < 2 or self.count < LEAST or not names:
            return None
        waits, least = np.median(self._wait, axis=1), NOTICED * self.seconds
        taken = {name: np.array([told.exchanges[name].seconds for told in self._told]) for name in names}
        for name in names:
            quickest = float(taken[name].min())
            transfer = taken[name] - waits
            unexplained = transfer > 0.5 * taken[name]  # a wait for a slow rank leaves a remainder, as ranks are not equally slow in all phases
            slow = np.flatnonzero(unexplained & (transfer > SLOWER * quickest) & (transfer - quickest > least))
            if slow.size:
                return {"name": name, "ranks": slow.tolist(), "seconds": float(taken[name][slow].max()), "expected": quickest}
            expected = min((self._scaled(other, name, float(taken[other].min())) for other in names if other != name), default=quickest)
            if quickest > SLOWER * expected and quickest - expected > least:
                return {"name": name, "ranks": list(range(len(self._told))), "seconds": quickest, "expected": expected}
        return None

    def _scaled(self, other: str, name: str, seconds: float) -> float:
        """What ``name`` would take if it went as ``other`` does: as long for fewer bytes and ranks, longer in proportion for more."""
        theirs, own = self._told[0].exchanges[other], self._told[0].exchanges[name]
        larger = (own.sent / own.calls) / max(theirs.sent / theirs.calls, 1.0)
        return seconds / theirs.calls * own.calls * max(1.0, larger) * max(1.0, own.ranks / theirs.ranks)
