"""How far a run has come: what a checkpoint needs to go on, whatever the number of ranks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gem_core.train.efficiency import Meter, Span
from gem_core.train.world import World


@dataclass(kw_only=True)
class Progress:
    """Counters over all ranks.

    Args:
        step: optimiser steps done.
        epoch: the epoch in progress, from 0.
        next_batch: the next global batch of that epoch.
        trained_rows: rows trained on, over all epochs.
        dropped_rows: rows read and left out because another rank had run out.
        eval_seconds: time spent on evaluation.
        stopped: why the run ended before its epochs were done, if it did.
        meter: rates of the current window and of the run.
    """

    step: int = 0
    epoch: int = 0
    next_batch: int = 0
    trained_rows: int = 0
    dropped_rows: int = 0
    eval_seconds: float = 0.0
    stopped: str = ""
    meter: Meter = field(default_factory=Meter)

    def close_epoch(self, dropped_rows: int) -> None:
        """The epoch has given all it has."""
        self.epoch, self.next_batch = self.epoch + 1, 0
        self.dropped_rows += dropped_rows

    def ledger(self, rows: int) -> dict[str, int]:
        """Where the rows of all begun epochs went; ``offered`` equals the sum of the rest. ``rows`` is the size of the training split."""
        offered = rows * (self.epoch + (self.next_batch > 0))
        left = offered - self.trained_rows - self.dropped_rows
        return {"offered": offered, "trained": self.trained_rows, "dropped_uneven": self.dropped_rows, "not_read": left}

    def state_dict(self, world: World) -> dict[str, Any]:
        """Plain values; the losses, of which each rank has a part, are added up. Collective."""
        state = asdict(self)
        parts = world.all_gather(torch.tensor([self.meter.window.loss, self.meter.run.loss], dtype=torch.float64)).sum(0)
        state["meter"]["window"]["loss"], state["meter"]["run"]["loss"] = parts.tolist()
        return state

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Go on from saved counters; the first rank carries the losses of all."""
        values = dict(state)
        meter = {name: Span(**span) for name, span in values.pop("meter").items()}
        for name, value in values.items():
            setattr(self, name, value)
        self.meter = Meter(**meter)
        self.stopped = ""
        if not world.leads:
            self.meter.window.loss = self.meter.run.loss = 0.0
