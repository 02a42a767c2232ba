"""Model FLOPs, samples a second and MFU.

Only matmuls on valid elements count (the model counts them exactly), backward counts twice the forward, recomputation and tables count nothing. MFU
is model FLOPs over wall time, data wait and optimiser included, over the summed peak of all ranks.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

TRAIN_OVER_FORWARD = 3
"""Forward plus backward, in forwards."""

_MEASURE_SECONDS = 0.1

# Dense vendor peaks in TFLOP/s of the SXM part unless the name says otherwise: (name part, fp8, bf16 and fp16, tf32, fp32). The first match counts.
_PEAKS = (
    ("H200", 1978.9, 989.4, 494.7, 66.9),
    ("H100 NVL", 1671.0, 835.5, 417.5, 60.0),
    ("H100 PCIe", 1513.0, 756.5, 378.0, 51.2),
    ("H100", 1978.9, 989.4, 494.7, 66.9),
    ("A100", None, 312.0, 156.0, 19.5),
    ("B200", 4500.0, 2250.0, 1125.0, 75.0),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Peak FLOP/s of one rank's device at the compute dtype, and where the figure comes from."""

    flops_per_second: float
    dtype: str
    source: str


def peak_of(device: torch.device, dtype: str) -> Peak:
    """The vendor's dense peak of a GPU that the table knows; otherwise the best of a short run of matmuls, labelled ``measured``.

    Args:
        dtype: ``bf16``, ``fp16``, ``fp32`` or ``fp64``; fp32 on a GPU counts as tf32 where torch is allowed to use it. On a CPU the faster of
            fp32 and ``dtype`` counts: where 16-bit matmuls are slow, most work of a 16-bit run is in fp32, and its MFU would pass 1.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        known = table_peak(name, dtype, tf32=torch.backends.cuda.matmul.allow_tf32)
        if known is not None:
            return known
    if device.type == "cpu" and dtype in ("bf16", "fp16"):
        return max(_measured(device, dtype), _measured(device, "fp32"), key=lambda peak: peak.flops_per_second)
    return _measured(device, dtype)


@contextmanager
def tf32_as_before() -> Iterator[None]:
    """At the end, float32 matmuls on GPUs are what they were before: a recipe may turn TF32 on, and torch's switch holds for the process."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def table_peak(name: str, dtype: str, *, tf32: bool) -> Peak | None:
    """The table's entry for a GPU name and ``dtype`` (``fp8`` or what ``peak_of`` takes), or None."""
    for part, eighth, half, tensor32, plain32 in _PEAKS:
        if part.lower() in name.lower():
            label = "tf32" if dtype == "fp32" and tf32 else dtype
            tera = {"fp8": eighth, "bf16": half, "fp16": half, "tf32": tensor32, "fp32": plain32}.get(label)
            return None if tera is None else Peak(flops_per_second=tera * 1e12, dtype=label, source=f"vendor, dense, {name}")
    return None


def _measured(device: torch.device, dtype: str) -> Peak:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}[dtype]
    size = 512 if device.type == "cpu" else 8192
    left = torch.ones(size, size, dtype=kind, device=device)
    best, begun = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() - begun < _MEASURE_SECONDS:
        start = time.perf_counter()
        torch.mm(left, left)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Peak(flops_per_second=best, dtype=dtype, source=f"measured, {size}x{size} matmul on {device.type}{threads}")


@dataclass(kw_only=True)
class Span:
    """Sums over a stretch of training: all ranks' rows and FLOPs, this rank's seconds."""

    steps: int = 0
    rows: int = 0
    flops: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    loss: float = 0.0

    def add(self, *, rows: int, forward_flops: int, seconds: float, data_seconds: float, loss: float) -> None:
        """Take in one optimiser step; ``seconds`` is its wall time, waiting for data included."""
        self.steps += 1
        self.rows += rows
        self.flops += TRAIN_OVER_FORWARD * forward_flops
        self.seconds += seconds
        self.data_seconds += data_seconds
        self.loss += loss

    def figures(self, peak: float) -> dict[str, float]:
        """Rates of the stretch; ``peak`` is the FLOP/s of all ranks together."""
        seconds = max(self.seconds, 1e-9)
        return {
            "samples_per_second": self.rows / seconds,
            "mfu": self.flops / seconds / peak,
            "seconds": self.seconds,
            "data_seconds": self.data_seconds,
            "compute_seconds": self.seconds - self.data_seconds,
        }


@dataclass(kw_only=True)
class Meter:
    """The window since the last log, and the whole run across resumes."""

    window: Span = field(default_factory=Span)
    run: Span = field(default_factory=Span)

    def add(self, *, rows: int, forward_flops: int, seconds: float, data_seconds: float, loss: float) -> None:
        """Take in one optimiser step."""
        for span in (self.window, self.run):
            span.add(rows=rows, forward_flops=forward_flops, seconds=seconds, data_seconds=data_seconds, loss=loss)

    def close_window(self) -> Span:
        """The window so far; a new one begins."""
        done, self.window = self.window, Span()
        return done
