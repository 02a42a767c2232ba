"""What each way to compute a linear layer takes on this device: forward and backward at the shapes that a run met, casts included."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor, nn

from gem_precision.backends import BACKENDS, Device, LinearBackend, LinearShape
from gem_precision.linear import lower
from gem_precision.presets import PRESETS

HIGH = "high"
"""The layer as it is, in the dtype that the run computes in."""
BUDGET, MOST = 0.1, 15
"""Seconds for one way at one shape, and the most times that it is repeated within them; once at least, after a call that does not count. An
emulation, which is slow and known to be, is timed once."""


def time_sites(shapes: Mapping[str, LinearShape], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What ``precision-probe.json`` says of speed.

    Args:
        shapes: of the linear products, by site.
        device: where the run computes.
        dtype: of its activations.

    Returns:
        ``device`` (``type, name, arch``), ``dtype``, ``versions``, and ``times``: for each site and way ``{site, rows, inputs, outputs, backend,
        recipe, emulated, measured, ms, why_not}``; ``ms`` is the median of forward and both gradients together, None where ``why_not`` has reasons.
    """
    here, known, rows = Device.here(device.type), {}, []
    for site, shape in shapes.items():
        if shape not in known:
            known[shape] = list(_ways(shape, here, device, dtype))
        rows += [{"site": site, "rows": shape.rows, "inputs": shape.inputs, "outputs": shape.outputs, **way} for way in known[shape]]
    about = {"type": here.type, "name": here.name, "arch": here.arch}
    return {"device": about, "dtype": str(dtype).removeprefix("torch."), "versions": _versions(), "times": rows}


def _ways(shape: LinearShape, here: Device, device: torch.device, dtype: torch.dtype) -> Sequence[dict[str, Any]]:
    x = torch.randn(shape.rows or 0, shape.inputs, device=device, dtype=dtype).requires_grad_()
    grad = torch.randn(shape.rows or 0, shape.outputs, device=device, dtype=dtype)
    plain = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device)
    high: dict[str, Any] = {
        "backend": HIGH,
        "recipe": None,
        "emulated": False,
        "measured": True,
        "ms": _median(_step(plain, x, grad), device, BUDGET),
        "why_not": [],
    }
    ways = [high]
    for backend in BACKENDS:
        reasons, ms = backend.why_not(here, shape), None
        if not reasons:
            try:
                ms = _median(_step(_lowered(shape, backend, device), x, grad), device, 0.0 if backend.emulated else BUDGET)
            except (RuntimeError, ValueError, TypeError) as error:  # one way that fails leaves the times of the others
                reasons = [f"it failed: {str(error).splitlines()[0]}"]
        about = {"backend": backend.name, "recipe": backend.recipe, "emulated": backend.emulated, "measured": backend.measured}
        ways.append({**about, "ms": ms, "why_not": reasons})
    return ways


def _lowered(shape: LinearShape, backend: LinearBackend, device: torch.device) -> nn.Linear:
    layer = nn.Linear(shape.inputs, shape.outputs, bias=False, device=device)
    lower(layer, PRESETS[backend.recipe].rule(), backend.resolve())
    return layer


def _step(layer: nn.Linear, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Forward and backward of a layer. It is not told that its weight stays, so it rounds it anew."""

    def step() -> None:
        x.grad = layer.weight.grad = None
        with torch.autocast(x.device.type, dtype=x.dtype, enabled=x.dtype != torch.float32):
            out = layer(x)
        out.backward(grad)

    return step


def _median(step: Callable[[], None], device: torch.device, seconds: float) -> float:
    """Milliseconds of a call, the median of as many as these seconds allow."""
    taken: list[float] = []
    step()
    _wait(device)
    begun = time.perf_counter()
    while not taken or (len(taken) < MOST and time.perf_counter() - begun < seconds):
        before = time.perf_counter()
        step()
        _wait(device)
        taken.append(1e3 * (time.perf_counter() - before))
    return statistics.median(taken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    return found
