"""A precision recipe whose low numbers are easy to tell: the first layer's output, rounded to whole numbers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.builtin.precision import Bf16, Fp32
from gem_core.spec import PairedSums, PrecisionDecision, PrecisionNews


class Rounds:
    """Implements ``gem_core.spec.ChangingPrecision``.

    Args:
        every: which steps are paired; 0 for none.
        falls: the paired step after which the layer computes high.
        stops: the paired step that asks for the end of the run.
        rest: the recipe of everything else.
    """

    def __init__(self, *, every: int = 1, falls: int = 0, stops: int = 0, rest: str = "fp32") -> None:
        self.every, self.falls, self.stops = every, falls, stops
        self.rest = Bf16() if rest == "bf16" else Fp32()
        self.low, self.comparing, self.fallen = True, False, False
        self.seen: list[tuple[int, Mapping[str, PairedSums], Sequence[float]]] = []

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        exact = model.first.forward

        def forward(x: Tensor) -> Tensor:
            out: Tensor = exact(x)
            return out if self.comparing or not self.low else out + (out.round() - out).detach()

        model.first.forward = forward
        self.decided = self.rest.prepare(model, device_type)
        return self.decisions()

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return self.rest.forward_context(device_type)

    def compute_dtype(self) -> str:
        return self.rest.compute_dtype()

    def begin_step(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    @contextmanager
    def high(self) -> Iterator[None]:
        assert not torch.is_grad_enabled()
        self.comparing = True
        yield
        self.comparing = False

    def sums(self) -> Sequence[float]:
        return [1.0]

    def observe(self, step: int, pairs: Mapping[str, PairedSums], sums: Sequence[float], folder: Path | None) -> PrecisionNews:
        self.seen.append((step, pairs, sums))
        record = {"ranks": sums[0], "weight": pairs["ctr"].weight, "loss": pairs["ctr"].loss, "told": folder is not None}
        if step == self.falls:
            self.low, self.fallen = False, True
            return PrecisionNews(record=record, say="first is high")
        return PrecisionNews(record=record, stop="first is too low" if step == self.stops else None)

    def decisions(self) -> Sequence[PrecisionDecision]:
        first = PrecisionDecision(module="first", format="fp32" if self.fallen else "whole", reason="fell" if self.fallen else "as asked")
        return [first if d.module == "first" else d for d in self.decided]

    def state_dict(self) -> dict[str, Any]:
        return {"fallen": self.fallen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.fallen, self.low = state["fallen"], not state["fallen"]
