"""The roofline of a device (Williams et al., doi 10.1145/1498765.1498785): the least time that FLOPs and bytes take, and a picture of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gem_core.bench.flops import peak_seconds, unit_peak
from gem_core.train.efficiency import Peak

_COPIED = {"cuda": 1 << 32, "cpu": 1 << 28}
_COPIES = 5
_INK, _GRID = "#334155", "#e2e8f0"
_COLOURS = {"compute": "#2563eb", "bytes": "#ea580c"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a device can do in a second.

    Args:
        name: of the device.
        device: where.
        peak: of matmuls in the compute dtype.
        bandwidth: bytes read and written by a copy in the device's memory.
    """

    name: str
    device: torch.device
    peak: Peak
    bandwidth: float

    def floor(self, by_format: Mapping[str, int], moved: int) -> tuple[float, str]:
        """Least seconds for FLOPs (by format, each at its own peak) and bytes moved, and which of the two binds: ``compute`` or ``bytes``."""
        compute, memory = peak_seconds(by_format, self.device), moved / self.bandwidth
        return (compute, "compute") if compute >= memory else (memory, "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A layer in the picture: its name, FLOPs a byte, FLOP/s, and what binds it."""

    name: str
    intensity: float
    rate: float
    bound: str


def machine(device: torch.device, dtype: str) -> Machine:
    """This device: the vendor's peak where it is known, else a measured one, and a measured bandwidth."""
    return Machine(name=device_name(device), device=device, peak=unit_peak(dtype, device), bandwidth=copy_bandwidth(device))


def device_name(device: torch.device) -> str:
    """The GPU's, or ``CPU``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of the best of a few copies larger than any cache."""
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    best = float("inf")
    for _ in range(_COPIES):
        finish(device)
        begun = time.perf_counter()
        target.copy_(source)
        finish(device)
        best = min(best, time.perf_counter() - begun)
    return 2 * source.nbytes / best


def finish(device: torch.device) -> None:
    """Wait until a GPU has done what was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def draw(points: Sequence[Point], where: Machine, title: str, path: Path) -> None:
    """Write the roofline with its points, numbered, log-log; the ending of ``path`` names the format."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.subplots()
    ridge = where.peak.flops_per_second / where.bandwidth
    reach = [p.intensity for p in points] + [ridge]
    left, right = min(reach) / 3, max(reach) * 10
    roof = [min(x * where.bandwidth, where.peak.flops_per_second) / 1e12 for x in (left, ridge, right)]
    axes.loglog([left, ridge, right], roof, color=_INK, linewidth=1.6)
    top, slope = f"{where.peak.flops_per_second / 1e12:.3g} TFLOP/s {where.peak.dtype}", f"{where.bandwidth / 1e12:.3g} TB/s"
    axes.annotate(top, (right, roof[-1]), ha="right", va="bottom", color=_INK, fontsize=8)
    axes.annotate(slope, (left * 1.2, roof[0] * 1.2), ha="left", va="bottom", color=_INK, fontsize=8)
    for number, point in enumerate(points, 1):
        colour = _COLOURS[point.bound]
        axes.scatter([point.intensity], [point.rate / 1e12], color=colour, s=26, zorder=3, label=f"{number}  {point.name}")
        axes.annotate(str(number), (point.intensity, point.rate / 1e12), xytext=(4, 3), textcoords="offset points", fontsize=8, color=colour)
    axes.set_xlabel("model FLOPs a byte that must be moved", color=_INK)
    axes.set_ylabel("TFLOP/s", color=_INK)
    axes.set_title(title, color=_INK, fontsize=10)
    axes.grid(color=_GRID, linewidth=0.8, which="major")
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8)
    words = "blue: bound by compute, orange: by bytes"
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="upper left", bbox_to_anchor=(1, 1), title=words, title_fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "gem", "svg.fonttype": "none"}):  # the same rows give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
