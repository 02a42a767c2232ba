"""What the cost model says of a run, by ``gem plan``. Imports no torch.

The speed of the model's own compute comes from the run of one rank, whatever the device. On the CPU, which has no description, links, copies and the
speed of a product are measured on as many ranks as the run has.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gem_core.spec import RequestError, RunFailed
from gem_parallel.scale.figures import Figures
from gem_parallel.scale.machine import Measured
from gem_parallel.scale.runs import Bench, answer, first_error, run_to_end, torchrun, words_of

LEAST = 1e-6
"""Smallest fraction of a peak that the cost model takes."""


@dataclass(kw_only=True)
class Predictor:
    """Predicts the runs of a bench.

    Args:
        bench: what they have in common.
        machine: a described machine in the place of the one at hand, or None.
    """

    bench: Bench
    machine: str | None = None
    _machines: dict[int, tuple[str, ...]] = field(default_factory=dict)
    _matmul: dict[tuple[str, ...], float] = field(default_factory=dict)

    def seconds(self, ranks: int, layout: Sequence[str], base: Figures, base_layout: Sequence[str]) -> float:
        """Seconds of a step.

        Args:
            layout: settings of the layout.
            base: what the same layout's run on one rank measured.
            base_layout: settings of that run.

        Raises:
            RequestError: the cost model does not know the machine, the engine or the layout.
            RunFailed: the machine could not be measured.
        """
        key = tuple(base_layout)
        if key not in self._matmul:
            self._matmul[key] = reached(self._plan(1, base_layout, 1.0), base.compute() / 1e3)
        return float(self._plan(ranks, layout, self._matmul[key])["seconds"])

    def _plan(self, ranks: int, layout: Sequence[str], matmul: float) -> dict[str, Any]:
        bench = self.bench
        words = ["plan", "-c", bench.recipe, *words_of(bench.settings(ranks, layout)), "--world", str(ranks), "--json"]
        words += ["--assume", f"matmul={matmul!r}", *self._machine(ranks)]
        step = answer(words)["step"]
        if step is None:
            raise RequestError("a prediction", "the machine's links or peak are unknown", "Name a described one: --machine h200, or a .toml file.")
        found: dict[str, Any] = step["layouts"][0]
        return found

    def _machine(self, ranks: int) -> tuple[str, ...]:
        if self.machine is not None:
            return ("--machine", self.machine)
        if self.bench.device != "cpu":
            return ()
        if ranks not in self._machines:
            self._machines[ranks] = self._measure(ranks)
        return self._machines[ranks]

    def _measure(self, ranks: int) -> tuple[str, ...]:
        """Measure this machine on so many ranks and describe it in a file."""
        folder = self.bench.folder / f"ranks-{ranks}"
        figures, log = folder / "machine.json", folder / "machine.log"
        if not figures.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with log.open("w", encoding="utf-8") as file:
                words = [*torchrun(ranks), "-m", "gem_parallel.scale.calibrate", str(figures)]
                code = run_to_end(words, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"})
            if code or not figures.exists():
                so = f"{first_error(log.read_text(encoding='utf-8', errors='replace'))} ({log})"
                raise RunFailed(f"measuring this machine on {ranks} ranks", so, "Read its log.")
        machine = Measured(**json.loads(figures.read_text(encoding="utf-8")))
        described = folder / "machine.toml"
        described.write_text(machine.toml(), encoding="utf-8")
        return ("--machine", str(described), *(word for name, value in machine.assumed().items() for word in ("--assume", f"{name}={value!r}")))


def reached(plan: dict[str, Any], seconds: float) -> float:
    """The fraction of the peak at which matrix products must run for the model's forward and backward to take what one rank measured.

    Args:
        plan: of one rank, with products at the peak.
        seconds: of a measured forward and backward.
    """
    compute = plan["parts"]["forward"] + plan["parts"]["backward"]
    products = plan["local_mfu"] * compute
    left = seconds - (compute - products)  # what activations take in memory does not change
    return min(1.0, max(LEAST, products / left)) if left > 0 else 1.0
