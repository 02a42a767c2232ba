"""Launches of Triton kernels. A kernel that was launched before goes past Triton's own Python, which takes most of the host's time of a short call;
``GEM_DIRECT_LAUNCH=0`` leaves all launches to Triton.

The first launch of a kernel under a new key goes through Triton, which compiles it, launches it and returns it; later ones hand the compiled kernel's
launcher the arguments that Triton would hand it, tensors as addresses. A key tells apart all that Triton's own key does: the dtype of every tensor
and whether its address is a multiple of 16; of every integer its width and, where it is specialised, whether it is 1 or a multiple of 16; dtype,
block and layout of every descriptor; constants, options and the current device. ``GEM_CHECK=full`` compares some launches with Triton's own choice.
Triton also looks, at each launch, whether a global that the kernel reads has changed since it was compiled; that is not done here.
"""

import os
from contextlib import nullcontext
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_kernels.common.direct_launch import SWITCH, why_through_triton

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
    here = device.type == "cpu" or device.index == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(device):
        if why_through_triton() is None and hasattr(kernel, "device_caches"):
            _launcher(kernel).launch(grid, arguments)
        else:
            kernel[(grid,)](**arguments)


@cache
def _checked() -> bool:
    return os.environ.get("GEM_CHECK") == "full"


def forget() -> None:
    """Read the environment again, and forget compiled kernels."""
    why_through_triton.cache_clear()
    _checked.cache_clear()
    _launchers.clear()


class Launcher:
    """The direct launches of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        params = kernel.params
        self.names = frozenset(kernel.arg_names)
        self.defaults = {p.name: p.default for p in params if p.has_default}
        self.values = itemgetter(*kernel.arg_names)
        self.constants = [i for i, p in enumerate(params) if p.is_constexpr]
        self.varying = [(i, not p.do_not_specialize) for i, p in enumerate(params) if not p.is_constexpr]
        self.kept: dict[tuple[Any, ...], Any] = {}
        self.hits = 0
        self.driver, self.knobs = _runtime()

    def launch(self, grid: int, arguments: dict[str, Any]) -> None:
        """Launch on the current device and stream."""
        device = self.driver.active.get_current_device()
        known = None if self._watched() else self.key(device, arguments)
        if known is None:
            self.kernel[(grid,)](**arguments)
            return
        key, passed = known
        compiled = self.kept.get(key)
        if compiled is None:
            self._first(key, grid, arguments)
            return
        if _checked():
            self._compare(compiled, device, passed, arguments)
        stream = self.driver.active.get_current_stream(device)
        compiled.run(grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *passed)

    def _watched(self) -> bool:
        """Whether somebody wants to see or change launches: profilers, tuners, compiler passes. Triton serves them."""
        runtime = self.knobs.runtime
        hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
        return bool(self.kernel.pre_run_hooks) or runtime.add_stages_inspection_hook is not None or any(map(_calls, hooks))

    def key(self, device: int, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], list[Any]] | None:
        """What tells launches apart, and the values that the launcher gets, in its order; None for a call that only Triton understands."""
        passed = list(self.values({**self.defaults, **arguments} if self.defaults else arguments))
        key: list[Any] = [device, self.knobs.runtime.debug, self.knobs.compilation.instrumentation_mode, *[passed[i] for i in self.constants]]
        key.extend((name, arguments[name]) for name in sorted(arguments.keys() - self.names))
        for i, specialised in self.varying:
            value = passed[i]
            if type(value) is int:
                key.append(integer_kind(value, specialised))
            elif isinstance(value, Tensor):
                if not value.is_cuda:
                    return None
                passed[i] = address = value.data_ptr()
                key.append((value.dtype, address % 16 == 0))
            else:
                kind = kind_of(value)
                if kind is None:
                    return None
                key.append(kind)
        return tuple(key), passed

    def _first(self, key: tuple[Any, ...], grid: int, arguments: dict[str, Any]) -> None:
        compiled = self.kernel[(grid,)](**arguments)
        if compiled is not None and compiled.metadata.target.backend == "cuda":
            self.kept[key] = compiled

    def _compare(self, compiled: Any, device: int, passed: list[Any], arguments: dict[str, Any]) -> None:
        """Ask Triton, now and then, which kernel it would launch with which arguments."""
        self.hits += 1
        if self.hits % EVERY != 1:
            return
        from triton.runtime.jit import compute_cache_key

        kernels, keys, _, _, binder = self.kernel.device_caches[device]
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


def _launcher(kernel: Any) -> Launcher:
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = Launcher(kernel)
    return found


def _runtime() -> tuple[Any, Any]:
    from triton import knobs
    from triton.runtime import driver

    return driver, knobs
