"""Launches of Triton kernels. A kernel that was launched before goes past Triton's own Python, which takes most of the host's time of a short call;
``GEM_DIRECT_LAUNCH=0`` leaves all launches to Triton.

The first launch of a kernel under a new key goes through Triton, which compiles it, launches it and returns it; later ones hand the compiled kernel's
launcher the arguments that Triton would hand it, tensors as addresses. A key tells apart all that Triton's own key does: the dtype of every tensor
and whether its address is a multiple of 16; of every integer its width and, where it is specialised, whether it is 1 or a multiple of 16; dtype,
block and layout of every descriptor; constants, options and the current device. ``GEM_CHECK=full`` compares some launches with Triton's own choice.
Descriptors are given as a ``Block`` (``compiled``); those of Triton's own class are left to Triton.
Triton also looks, at each launch, whether a global that the kernel reads has changed since it was compiled; that is not done here.
"""

import os
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common.compiled import Block, Compiled, whole
from gem_kernels.common.direct_launch import SWITCH, why_through_triton

MOST = 1024
"""Kinds of launches of one kernel that are remembered; then all are forgotten."""
EVERY = 64
"""Under ``GEM_CHECK=full`` the first direct launch of a kernel is compared, and then each of these many."""


def launch(kernel: Any, grid: int, device: torch.device, arguments: dict[str, Any]) -> None:
    """Launch ``kernel`` on a grid of one axis, on the current stream of ``device``.

    Args:
        kernel: a function under ``triton.jit`` or ``gluon.jit``, or what the interpreter makes of it.
        grid: number of programs.
        device: where the tensors lie.
        arguments: parameters and options by name.

    Raises:
        RequestError: ``GEM_DIRECT_LAUNCH`` is neither 0 nor 1; or, under ``GEM_CHECK=full``, a direct launch would not be Triton's.
    """
    place = direct(kernel, device)
    if place is not None:
        place[0].launch(place, grid, arguments)
    elif device.type == "cpu" or device.index is None or device.index == torch.cuda.current_device():
        _by_triton(kernel, grid, arguments)
    else:
        with torch.cuda.device(device):
            launch(kernel, grid, device, arguments)


def _by_triton(kernel: Any, grid: int, arguments: dict[str, Any]) -> Any:
    return kernel[(grid,)](**{name: whole(value) for name, value in arguments.items()})


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
    index = found.driver.get_current_device()
    if found.watched() or (device.index not in (None, index) and device.type != "cpu"):
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
        self.kept: dict[tuple[Any, ...], Compiled] = {}
        self.hits = 0
        self.driver, self.knobs = _runtime()

    def launch(self, place: Place, grid: int, arguments: dict[str, Any]) -> None:
        """Launch on the current device and stream."""
        values = self.values({**self.defaults, **arguments} if self.defaults else arguments)
        known = self.key(place, values, arguments)
        if known is None:
            _by_triton(self.kernel, grid, arguments)
            return
        key, passed = known
        compiled = self.kept.get(key)
        if compiled is None:
            self._first(key, grid, values, arguments)
            return
        if checked():
            self.compare(compiled.kernel, place, passed, arguments)
        compiled.launch(grid, self.driver.get_current_stream(place[1]), values, passed)

    def watched(self) -> bool:
        """Whether somebody wants to see or change launches: profilers, tuners, compiler passes. Triton serves them."""
        runtime = self.knobs.runtime
        if self.kernel.pre_run_hooks or runtime.add_stages_inspection_hook is not None:
            return True
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook  # a function each, or a chain of them
        return bool((enter is not None and getattr(enter, "calls", True)) or (leave is not None and getattr(leave, "calls", True)))

    def key(self, place: Place, values: tuple[Any, ...], arguments: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
        """What tells launches apart, and the values with tensors as addresses; None for a call that only Triton understands."""
        kinds: list[Any] = [*values]  # constants stand for themselves
        passed = [*values]
        for i, specialised in self.varying:
            value = values[i]
            kind = value.__class__
            if kind is Block:
                x, described = value
                passed[i] = address = x.data_ptr()
                if not x.is_cuda or address % 16:  # Triton says what is wrong with it
                    return None
                kinds[i] = x.dtype, described, None if described.strides else x.stride()
            elif kind is int:
                if not -(2**31) <= value < 2**31:
                    kinds[i] = wide_kind(value, specialised)
                else:
                    kinds[i] = (value == 1) + 2 * (value % 16 == 0) if specialised else 0
            elif value is None or kind is float or kind is bool:
                kinds[i] = kind
            elif kind is Tensor or isinstance(value, Tensor):
                if not value.is_cuda:
                    return None
                passed[i] = address = value.data_ptr()
                kinds[i] = value.dtype, address % 16 == 0
            else:
                return None
        options = [item for item in arguments.items() if item[0] not in self.names]
        return (*place[1:], *kinds, *options), passed

    def _first(self, key: tuple[Any, ...], grid: int, values: tuple[Any, ...], arguments: dict[str, Any]) -> None:
        kernel = _by_triton(self.kernel, grid, arguments)
        if kernel is not None and kernel.metadata.target.backend == "cuda":
            if len(self.kept) >= MOST:
                self.kept.clear()
            self.kept[key] = Compiled(kernel, values)

    def compare(self, compiled: Any, place: Place, passed: list[Any], arguments: dict[str, Any]) -> None:
        """Ask Triton, now and then, which kernel it would launch with which arguments."""
        self.hits += 1
        if self.hits % EVERY != 1:
            return
        from triton.runtime.jit import compute_cache_key

        kernels, keys, _, _, binder = self.kernel.device_caches[place[1]]
        runtime, compilation = self.knobs.runtime, self.knobs.compilation
        debug = arguments.get("debug", self.kernel.debug) or runtime.debug
        given = {name: whole(value) for name, value in arguments.items()}
        bound, specialization, options = binder(**{**given, "debug": debug, "instrumentation_mode": compilation.instrumentation_mode})
        theirs = kernels.get(compute_cache_key(keys, specialization, options))
        values = [_address(value) for value in bound.values()]
        if theirs is not compiled or any(mine is not other and mine != other for mine, other in zip(passed, values, strict=True)):
            so = "Triton would launch another kernel, or hand it other arguments"
            raise RequestError(f"direct launch of {self.kernel.__name__}", so, f"Leave {SWITCH} out, and report this with the release of triton.")


def _address(value: Any) -> Any:
    """An argument of Triton's as ``Launcher.key`` passes it: tensors and descriptors as addresses."""
    value = value.base if hasattr(value, "block_shape") else value
    return value.data_ptr() if isinstance(value, Tensor) else value


def wide_kind(value: int, specialised: bool) -> int:
    """What Triton's key holds of an integer of more than 32 bits: its width, and if it is specialised whether it is a multiple of 16."""
    width = 4 if -(2**63) <= value < 2**63 else 8
    return width + 2 * (value % 16 == 0) if specialised else width


_launchers: dict[int, Launcher] = {}
"""By identity of the kernel, which its launcher keeps alive: hashing a kernel hashes its source."""


def _runtime() -> tuple[Any, Any]:
    from triton import knobs
    from triton.runtime import driver

    return driver.active, knobs
