"""Backends of low-precision linear layers: who multiplies for a recipe, on which devices, at which shapes.

A backend is declared in ``BACKENDS`` and names its code by string, so that listing what there is imports none of it. Each computes the numbers of one
recipe of ``gem_precision.presets``; the emulated one of a recipe is the reference that the others are held to.
"""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gem_core.spec import KernelUnavailable, load_object
from gem_precision.plugin import emulated
from gem_precision.presets import PRESETS


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where products are computed.

    Args:
        type: ``cpu`` or ``cuda``.
        name: the model, as torch has it for a GPU and the system for a CPU.
        arch: compute capability as an integer, 90 for sm90; None on a CPU and where it is unknown.
    """

    type: str
    name: str
    arch: int | None = None

    @classmethod
    def here(cls, device_type: str) -> "Device":
        """The device of that type that this process computes on; of a GPU that a plan is made for, on a machine without one, nothing is known."""
        if device_type != "cuda":
            return cls(type=device_type, name=_processor())
        if not torch.cuda.is_available():
            return cls(type="cuda", name="a CUDA device that this machine lacks")
        major, minor = torch.cuda.get_device_capability()
        return cls(type="cuda", name=torch.cuda.get_device_name(), arch=10 * major + minor)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearShape:
    """``[rows, inputs] x [outputs, inputs]``; ``rows`` is None where it is not known yet."""

    inputs: int
    outputs: int
    rows: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearBackend:
    """A way to compute the linear layers of a recipe, alone or each behind a norm.

    Args:
        name: unique.
        recipe: the name in ``PRESETS`` whose numbers it computes.
        load: ``module:function``, called as ``function(x, weight, rule, held, watch, bias)``: ``[rows, in]``, ``[out, in]`` and ``[out]`` or None to
            ``[rows, out]``, with gradients; ``held`` is the ``gem_precision.weights.HeldWeight`` of the layer, ``watch`` as in
            ``gem_precision.linear.LowForward``. Of ``NORM_BACKENDS``: called as the op ``norm_linear``.
        check: ``module:function``, called as ``function(device, shape)`` with a ``Device`` and a ``LinearShape``: the reasons why it cannot be used
            there, none if it can. None for a backend that works everywhere.
        gain: ``module:function``, called as ``check``: the reasons why it would be no faster there than bfloat16, none if it would. They do not keep
            a backend that somebody names from computing. None for a backend whose speed is no reason to choose it.
        emulated: it gives the numbers of the format without its speed.
        measured: its results and its speed have been checked on the hardware that it is for. One that has not is used where it is named, and is
            chosen automatically only with ``GEM_UNMEASURED=1``.
    """

    name: str
    recipe: str
    load: str
    check: str | None = None
    gain: str | None = None
    emulated: bool = False
    measured: bool = False

    def why_not(self, device: Device, shape: LinearShape) -> list[str]:
        """The reasons why it cannot compute this shape on this device, none if it can."""
        return _told(self.check, device, shape)

    def why_not_unasked(self, device: Device, shape: LinearShape) -> list[str]:
        """The reasons why it is not to be chosen where nobody has named it."""
        trusted = self.measured or os.environ.get("GEM_UNMEASURED") == "1"
        cannot = [*([] if trusted else ["nobody has measured it yet"]), *self.why_not(device, shape)]
        return cannot or _told(self.gain, device, shape)

    def resolve(self) -> Callable[..., Any]:
        """Import the function that ``load`` names."""
        function: Callable[..., Any] = load_object(self.load)
        return function


def _told(function: str | None, device: Device, shape: LinearShape) -> list[str]:
    """The reasons that a function by that name gives."""
    return [] if function is None else list(load_object(function)(device, shape))


BACKENDS: tuple[LinearBackend, ...] = (
    *(
        LinearBackend(name=emulated(recipe), recipe=recipe, load="gem_precision.linear:emulated_linear", emulated=True, measured=True)
        for recipe in PRESETS
    ),
    *(
        LinearBackend(
            name=f"{recipe}_native",
            recipe=recipe,
            load=f"gem_precision.native:{function}",
            check="gem_precision.native:why_not",
            gain="gem_precision.native:no_gain",
            measured=True,
        )
        for recipe, function in (("fp8_block", "native_linear"), ("fp8_square", "native_square_linear"))
    ),
    LinearBackend(name="mxfp8_native", recipe="mxfp8", load="gem_precision.native:native_mx_linear", check="gem_precision.native:mx_why_not"),
)
"""Every backend, those of one recipe in the order in which tables show them."""

NORM_BACKENDS: tuple[LinearBackend, ...] = tuple(
    LinearBackend(
        name=f"{recipe}_native",
        recipe=recipe,
        load=f"gem_precision.native_ops:{function}",
        check="gem_precision.native_ops:why_not",
        gain="gem_precision.native:no_gain",
        measured=True,
    )
    for recipe, function in (("fp8_block", "norm_linear"), ("fp8_square", "square_norm_linear"))
)
"""Those of a norm and the linear layer behind it, which one kernel of the op ``norm_linear`` computes: the kernel backends of these names. They gain
where linear layers alone do: of what an H200 has timed (``benchmarks/results/h200-norm-linear.json``) that leaves 1024 x 1024, 1.00 and 1.02 times as
fast as bfloat16, and takes the wider ones, 1.06 to 1.23 times as fast.
"""


def _processor() -> str:
    """The model of the processor, as far as the system tells it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()


def backends_of(recipe: str, *, normed: bool = False) -> list[LinearBackend]:
    """The backends that compute a recipe's numbers, of linear layers alone or each behind a norm."""
    return [backend for backend in (NORM_BACKENDS if normed else BACKENDS) if backend.recipe == recipe]


def find_backend(name: str, recipe: str) -> LinearBackend:
    """The backend of that name.

    Raises:
        KernelUnavailable: there is none for the recipe.
    """
    known = {backend.name: backend for backend in backends_of(recipe)}
    if name not in known:
        raise KernelUnavailable(f"linear backend {name!r} for {recipe!r}", "there is none of that name", f"Choose one of {', '.join(known)}.")
    return known[name]


def require(backend: LinearBackend, device: Device, shape: LinearShape) -> None:
    """A backend that was asked for by name can compute the shape.

    Raises:
        KernelUnavailable: it cannot, with its reasons.
    """
    if reasons := backend.why_not(device, shape):
        raise KernelUnavailable(f"linear backend {backend.name!r}", "; ".join(reasons), f"Leave the name out, or name {emulated(backend.recipe)!r}.")
