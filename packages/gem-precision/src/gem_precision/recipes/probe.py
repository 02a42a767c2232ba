"""Recipe ``probe``: computes as ``bf16_islands`` does, and records what every low-precision recipe would get wrong."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from gem_core.spec import PrecisionDecision
from gem_precision.policy import island_around
from gem_precision.probe.products import ProbedBind, ProbedForward
from gem_precision.probe.record import Record
from gem_precision.recipes.bf16_islands import Bf16Islands
from gem_precision.sites import sites


class Probe:
    """Sites outside islands go on in the reference kernels, float32 products under autocast's inputs, and are recorded in every training step.

    Args:
        islands: as in ``bf16_islands``.
        cpu: as in ``bf16_islands``.
    """

    def __init__(self, *, islands: Sequence[str] | None = None, cpu: Literal["fp32", "bf16"] = "fp32") -> None:
        self._rest = Bf16Islands(islands=islands, small=0, cpu=cpu)
        self.record = Record()

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """Instrument the sites in place; the decisions are those of ``bf16_islands``."""
        high = self._rest.islands(model)
        decisions = self._rest.prepare(model, device_type)
        for site in sites(model):
            if site.handed or island_around(site.owner, high) is not None:
                continue
            if site.slot is None:
                site.module.forward = ProbedForward(site.module.forward, site.name, self.record)
            else:
                site.slot.asked = "reference"
                vars(site.slot)["bind"] = ProbedBind(site.slot.bind, site.name, self.record)
        return decisions

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """That of ``bf16_islands``."""
        return self._rest.forward_context(device_type)

    def compute_dtype(self) -> str:
        """That of ``bf16_islands``."""
        return self._rest.compute_dtype()
