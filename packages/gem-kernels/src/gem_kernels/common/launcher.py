"""Launches of Triton kernels. A kernel that was launched before goes past Triton's own Python, which takes most of the host's time of a short call;
``GEM_DIRECT_LAUNCH=0`` leaves all launches to Triton.

The first launch of a kernel under a new key goes through Triton, which compiles it, launches it and returns it; later ones hand the compiled kernel's
launcher the arguments that Triton would hand it, tensors as addresses. A key tells apart all that Triton's own key does: the dtype of every tensor
and whether its address is a multiple of 16; of every integer its width and, where it is specialised, whether it is 1 or a multiple of 16; dtype,
block and layout of every descriptor; constants, options and the current device. ``GEM_CHECK=full`` compares some launches with Triton's own choice.
Triton also looks, at each launch, whether a global that the kernel reads has changed since it was compiled; that is not done here.
"""

import os
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common.direct_launch import SWITCH, why_through_triton

EVERY = 64
"""Under ``GEM_CHECK=full`` the first direct launch of a kernel is compared, and then each of these many."""


def launch(kernel: Any, grid: int, device: torch.device, arguments: dict[str, Any]) -> Any:
    """Launch ``kernel`` on a grid of one axis, on the current stream of ``device``.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``, or what the interpreter makes of it.
        grid: number of programs.
        device: where the tensors lie.
        arguments: parameters and options by name.

    Returns:
        The compiled kernel, where it can be launched directly from now on; else None.

    Raises:
        RequestError: ``GEM_DIRECT_LAUNCH`` is neither 0 nor 1; or, under ``GEM_CHECK=full``, a direct launch would not be Triton's.
    """
    place = direct(kernel, device)
    if place is not None:
        return place[0].launch(place, grid, arguments)
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        kernel[(grid,)](**arguments)
        return None
    with torch.cuda.device(device):
        return launch(kernel, grid, device, arguments)


Place = tuple["Launcher", int, bool, str]
"""What a direct launch depends on beside its arguments: the kernel's launcher, the current device, and Triton's switches ``debug`` and
``instrumentation_mode``."""


def direct(kernel: Any, device: torch.device) -> Place | None:
    """The place of a launch of ``kernel`` on ``device``; None where it is left to Triton, or ``device`` is not the current one.

    Raises:
        RequestError: ``GEM_DIRECT_LAUNCH`` is neither 0 nor 1.
    """
    if why_through_triton() is not None:
        return None
    found = _launchers.get(id(kernel))
    if found is None:
        if not hasattr(kernel, "device_caches"):  # the interpreter's
            return None
        found = _launchers[id(kernel)] = Launcher(kernel)
    index = found.driver.active.get_current_device()
    if found.watched() or (device.index != index and device.type != "cpu"):
        return None
    return found, index, found.knobs.runtime.debug, found.knobs.compilation.instrumentation_mode


@cache
def checked() -> bool:
    """Whether ``GEM_CHECK=full`` asks for comparisons with Triton."""
    return os.environ.get("GEM_CHECK") == "full"


def forget() -> None:
    """Read the environment again, and forget compiled kernels."""
    why_through_triton.cache_clear()
    checked.cache_clear()
    _launchers.clear()


class Launcher:
    """The direct launches of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        params = kernel.params
        self.names = frozenset(kernel.arg_names)
        self.defaults = {p.name: p.default for p in params if p.has_default}
        self.values = itemgetter(*kernel.arg_names)
        self.varying = [(i, not p.do_not_specialize) for i, p in enumerate(params) if not p.is_constexpr]
        self.kept: dict[tuple[Any, ...], Any] = {}
        self.hits = 0
        self.driver, self.knobs = _runtime()

    def launch(self, place: Place, grid: int, arguments: dict[str, Any]) -> Any:
        """Launch on the current device and stream; returns the compiled kernel, None where Triton had to see to it."""
        known = self.key(place, arguments)
        if known is None:
            self.kernel[(grid,)](**arguments)
            return None
        key, passed = known
        compiled = self.kept.get(key)
        if compiled is None:
            return self._first(key, grid, arguments)
        if checked():
            self.compare(compiled, place, passed, arguments)
        compiled.run(grid, 1, 1, self.stream(place), compiled.function, compiled.packed_metadata, None, None, None, *passed)
        return compiled

    def stream(self, place: Place) -> int:
        """The current stream."""
        found: int = self.driver.active.get_current_stream(place[1])
        return found

    def watched(self) -> bool:
        """Whether somebody wants to see or change launches: profilers, tuners, compiler passes. Triton serves them."""
        runtime = self.knobs.runtime
        return (
            bool(self.kernel.pre_run_hooks)
            or runtime.add_stages_inspection_hook is not None
            or _calls(runtime.launch_enter_hook)
            or _calls(runtime.launch_exit_hook)
        )

    def key(self, place: Place, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
        """What tells launches apart, and the values that the launcher gets, in its order; None for a call that only Triton understands."""
        passed = list(self.values({**self.defaults, **arguments} if self.defaults else arguments))
        kinds: list[Any] = passed.copy()  # constants stand for themselves
        for i, specialised in self.varying:
            value = passed[i]
            if type(value) is int:
                kinds[i] = integer_kind(value, specialised)
            elif isinstance(value, Tensor):
                if not value.is_cuda:
                    return None
                passed[i] = address = value.data_ptr()
                kinds[i] = (value.dtype, address % 16 == 0)
            else:
                kinds[i] = kind_of(value)
                if kinds[i] is None:
                    return None
        options = [(name, arguments[name]) for name in sorted(arguments.keys() - self.names)]
        return (*place[1:], *kinds, *options), passed

    def passed(self, arguments: dict[str, Any]) -> list[Any]:
        """The values that the launcher gets, tensors as addresses."""
        given = self.values({**self.defaults, **arguments})
        return [value.data_ptr() if isinstance(value, Tensor) else value for value in given]

    def _first(self, key: tuple[Any, ...], grid: int, arguments: dict[str, Any]) -> Any:
        compiled = self.kernel[(grid,)](**arguments)
        if compiled is None or compiled.metadata.target.backend != "cuda":
            return None
        self.kept[key] = compiled
        return compiled

    def compare(self, compiled: Any, place: Place, passed: list[Any], arguments: dict[str, Any]) -> None:
        """Ask Triton, now and then, which kernel it would launch with which arguments."""
        self.hits += 1
        if self.hits % EVERY != 1:
            return
        from triton.runtime.jit import compute_cache_key

        kernels, keys, _, _, binder = self.kernel.device_caches[place[1]]
        runtime, compilation = self.knobs.runtime, self.knobs.compilation
        debug = arguments.get("debug", self.kernel.debug) or runtime.debug
        bound, specialization, options = binder(**{**arguments, "debug": debug, "instrumentation_mode": compilation.instrumentation_mode})
        theirs = kernels.get(compute_cache_key(keys, specialization, options))
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in bound.values()]
        if theirs is not compiled or any(mine is not other and mine != other for mine, other in zip(passed, values, strict=True)):
            so = "Triton would launch another kernel, or hand it other arguments"
            raise RequestError(f"direct launch of {self.kernel.__name__}", so, f"Leave {SWITCH} out, and report this with the release of triton.")


def integer_kind(value: int, specialised: bool) -> int:
    """What Triton's key holds of an integer: its width, and if it is specialised whether it is 1 and whether it is a multiple of 16."""
    width = 0 if -(2**31) <= value < 2**31 else 4 if value < 2**63 else 8
    return width + (value == 1) + 2 * (value % 16 == 0) if specialised else width


def kind_of(value: Any) -> Any:
    """What Triton's key holds of a value that is no tensor, integer or constant, or something finer; None for what is not known here."""
    if value is None or type(value) in (float, bool):
        return type(value)
    if hasattr(value, "block_shape") and value.base.is_cuda:
        return value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)
    return None


def _calls(hook: Any) -> bool:
    """Whether a hook of Triton, a chain of functions or a function, does something."""
    return hook is not None and bool(getattr(hook, "calls", True))


_launchers: dict[int, Launcher] = {}
"""By identity of the kernel, which its launcher keeps alive: hashing a kernel hashes its source."""


def _runtime() -> tuple[Any, Any]:
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs
