"""Recipe ``auto``: each site in the first of a list of formats whose measured error keeps within a bound."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gem_precision.presets import PRESETS
from gem_precision.probe.record import read_probe, worst
from gem_precision.recipes.low_precision import Lowering, LowSites
from gem_precision.sites import Site


class Auto(LowSites):
    """As the other low-precision recipes, with a format for each site.

    Args:
        probe: what ``gem precision sweep`` wrote.
        bound: the lowest signal-to-quantisation-noise ratio, in dB, that each product of a site has to reach.
        formats: recipes whose formats are tried, in this order: put the fastest first.
    """

    def __init__(
        self,
        *,
        probe: Path,
        bound: float = 25.0,
        formats: Sequence[str] = ("fp8_block", "mxfp8"),
        high: Sequence[str] = (),
        islands: Sequence[str] | None = None,
        small: int = 128,
        attention: bool = True,
        telemetry: bool = False,
        cpu: Literal["fp32", "bf16"] = "fp32",
    ) -> None:
        super().__init__("auto", high=high, islands=islands, small=small, attention=attention, telemetry=telemetry, cpu=cpu)
        self._bound, self._formats = bound, tuple(formats)
        self._measured = worst(read_probe(probe))

    def choose(self, site: Site) -> Lowering | str:
        measured = self._measured.get(site.name)
        if measured is None:
            return "the probe did not meet it"
        tried = []
        for name in self._formats:
            if site.attention and not PRESETS[name].attention:
                continue
            if measured[name] >= self._bound:
                return Lowering(name, PRESETS[name].rule(), f"{measured[name]:.1f} dB with {name}, {self._bound:g} are asked")
            tried.append(f"{measured[name]:.1f} dB with {name}")
        return f"{self._bound:g} dB are asked: {', '.join(tried) or 'no format is for attention'}"
