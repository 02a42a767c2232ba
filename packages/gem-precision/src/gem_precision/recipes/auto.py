"""Recipe ``auto``: each site in a format whose measured error keeps within a bound, by order or by measured time."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from gem_core.spec import PrecisionDecision
from gem_precision.backends import Device, backends_of
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.presets import PRESETS
from gem_precision.probe.record import read_probe, read_times, worst
from gem_precision.probe.times import HIGH
from gem_precision.recipes.low_precision import Lowering, LowSites
from gem_precision.sites import Site


class Auto(LowSites):
    """As the other low-precision recipes, with a format for each site.

    Args:
        probe: what ``gem precision sweep`` wrote.
        bound: the lowest signal-to-quantisation-noise ratio, in dB, that each product of a site has to reach.
        formats: recipes whose formats are tried, with ``given`` in this order.
        order: ``given`` takes the first format within the bound, emulated. ``time`` takes the way that was fastest when the probe timed it on this
            device: the layer as it is, or a backend of a format within the bound whose results have been checked on its hardware.
    """

    def __init__(
        self,
        *,
        probe: Path,
        bound: float = 25.0,
        formats: Sequence[str] = ("fp8_block", "mxfp8"),
        order: Literal["given", "time"] = "given",
        high: Sequence[str] = (),
        islands: Sequence[str] | None = None,
        small: int = 128,
        attention: bool = True,
        telemetry: bool = False,
        guard: GuardOptions | None = None,
        ramp: RampOptions | None = None,
        keep_last: int = 0,
        cpu: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        words: dict[str, Any] = {"high": high, "islands": islands, "small": small, "attention": attention, "telemetry": telemetry, "cpu": cpu}
        super().__init__("auto", guard=guard, ramp=ramp, keep_last=keep_last, **words)
        self._probe, self._bound, self._formats, self._by_time = probe, bound, tuple(formats), order == "time"
        self._measured = worst(read_probe(probe))
        self._times: dict[str, list[Mapping[str, Any]]] = {}

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """As ``LowSites``.

        Raises:
            RequestError: also if sites are ordered by time and the probe has no times, or those of another device.
        """
        for row in read_times(self._probe, Device.here(device_type)) if self._by_time else ():
            self._times.setdefault(row["site"], []).append(row)
        return super().prepare(model, device_type)

    def choose(self, site: Site) -> Lowering | str:
        measured = self._measured.get(site.name)
        if measured is None:
            return "the probe did not meet it"
        if self._by_time:
            return self._fastest(site, measured)
        tried = []
        for name in self._formats:
            if site.attention and not PRESETS[name].attention:
                continue
            if measured[name] >= self._bound:
                return Lowering(name, PRESETS[name].rule(), self._error(name, measured))
            tried.append(f"{measured[name]:.1f} dB with {name}")
        return f"{self._bound:g} dB are asked: {', '.join(tried) or 'no format is for attention'}"

    def _fastest(self, site: Site, measured: Mapping[str, float]) -> Lowering | str:
        if not isinstance(site.module, nn.Linear):
            return "its low-precision kernels are emulations, which order = 'time' does not take"
        times = self._times.get(site.name, [])
        shape = site.module.in_features, site.module.out_features
        if any((row["inputs"], row["outputs"]) != shape for row in times):
            return f"the probe timed it with other sizes than {shape[0]} x {shape[1]}"
        known = {backend.name: backend for name in self._formats for backend in backends_of(name) if backend.measured}
        within = {name for name, backend in known.items() if measured[backend.recipe] >= self._bound}
        ways = {row["backend"]: float(row["ms"]) for row in times if row["ms"] is not None and row["backend"] in {HIGH, *within}}
        if HIGH not in ways:
            return "the probe did not time it"
        told = ", ".join(f"{ms:.3g} ms {name}" for name, ms in sorted(ways.items(), key=lambda way: way[1]))
        fastest = min(ways, key=lambda name: ways[name])
        if fastest == HIGH:
            return f"fastest as it is: {told}"
        recipe = known[fastest].recipe
        return Lowering(recipe, PRESETS[recipe].rule(), f"fastest: {told}; {self._error(recipe, measured)}", known[fastest])

    def _error(self, name: str, measured: Mapping[str, float]) -> str:
        return f"{measured[name]:.1f} dB with {name}, {self._bound:g} are asked"
