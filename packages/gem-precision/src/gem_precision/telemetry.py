"""What low-precision operands look like while a run trains: how large they are, what rounding adds, and what falls off either end of the format."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_precision.formats import Quantized
from gem_precision.probe.record import ratio

FILE = "precision.jsonl"

latest: list["Telemetry"] = []
"""The one that was told last: composing a run prepares models that never compute."""


class Telemetry:
    """Sums over the training calls of a window, by site and operand; nothing is read back from the device before the window is closed."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[Tensor, Tensor, int]] = {}
        self.paused = False
        """While set, nothing is looked at."""

    def watcher(self, site: str) -> Callable[[str, Tensor, Quantized], None]:
        """The ``watch`` of a low-precision layer."""
        return partial(self._see, site)

    @torch.no_grad()
    def _see(self, site: str, role: str, original: Tensor, quantized: Quantized) -> None:
        if self.paused:
            return
        latest[:] = [self]
        low, exact = quantized.dequantize(), original.float()
        sums = torch.stack(
            [
                exact.double().square().sum(),
                (low.double() - exact.double()).square().sum(),
                (quantized.elements.abs() == quantized.format.element.largest).sum().double(),
                ((low == 0) & (exact != 0)).sum().double(),
            ]
        )
        amax = exact.abs().amax() if exact.numel() else exact.new_zeros(())
        before, count = self._sums.get((site, role)), exact.numel()
        self._sums[site, role] = (sums, amax, count) if before is None else (before[0] + sums, torch.maximum(before[1], amax), before[2] + count)

    def close(self) -> list[dict[str, Any]]:
        """One record an operand since the last call: ``site, role, amax, sqnr`` (dB), and ``saturated`` and ``underflow``, shares of its elements."""
        rows = []
        for (site, role), (sums, amax, count) in self._sums.items():
            signal, noise, saturated, under = sums.tolist()
            shares = {"saturated": saturated / max(count, 1), "underflow": under / max(count, 1)}
            rows.append({"site": site, "role": role, "amax": float(amax), "sqnr": ratio(signal, noise), **shares})
        self._sums = {}
        return rows


def append(folder: Path, step: int) -> None:
    """Add the window that ends with a step to ``precision.jsonl`` of a run, a line an operand."""
    if latest:
        with (folder / FILE).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **row}) + "\n" for row in latest[0].close())
