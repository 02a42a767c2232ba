"""Checks of direct launches, for a program of their own: the interpreter must be off. ``python3 -m gem_kernels_launches`` prints a line a check."""

import os
import sys
import traceback
from contextlib import contextmanager

import gem_kernels_driver
import pytest
import torch
import triton
import triton.language as tl
from gem_kernels_driver import launches, on_gpu
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from gem_core.spec import RequestError
from gem_kernels.common import launcher
from gem_kernels.ops.gated_residual.triton import forward_kernel

DRIVER = gem_kernels_driver.install()
CPU = torch.device("cpu")


@triton.jit(do_not_specialize=["count"])
def kernel(x, other, size, count, factor, BLOCK: tl.constexpr, flag=False, SHIFT: tl.constexpr = 0):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at * size + SHIFT, mask=at < count)
    if other is not None:
        value += tl.load(other + at)
    tl.store(x + at, value * factor + flag)


@triton.jit
def described(desc, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at[:, None] * BLOCK + at[None, :], desc.load([0, 0]))


CALL = {"other": None, "size": 3, "count": 5, "factor": 0.5, "BLOCK": 16, "num_warps": 4}
X, Y, HALF = on_gpu(64), on_gpu(64), on_gpu(64, dtype=torch.float16)
VARIED = [
    {},
    {"x": Y},
    {"x": on_gpu(64, shift=1)},
    {"x": HALF},
    {"other": Y},
    {"other": on_gpu(64, shift=3)},
    *({"size": size} for size in (1, 4, 16, 48, 2**31, -(2**31), 2**63)),
    *({"count": count} for count in (0, 1, 16, 2**31 - 1, 2**31)),
    {"factor": 1.0},
    {"BLOCK": 32},
    {"num_warps": 8},
    {"num_warps": 8, "num_stages": 3},
    {"flag": True},
    {"SHIFT": 1},
]
"""Changes of a call, of which some need a kernel of their own and some must not."""


@contextmanager
def switched(on, **environment):
    """Direct launches on or off, everything forgotten."""
    os.environ.update({"GEM_DIRECT_LAUNCH": str(int(on)), **environment})
    launcher.forget()
    try:
        yield
    finally:
        for name in ("GEM_DIRECT_LAUNCH", *environment):
            os.environ.pop(name)
        launcher.forget()


def all_calls():
    for change in VARIED:
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL, **change})


def triton_python_is_passed_by(call):
    """Runs ``call`` with Triton's own ``run`` out of order: what is launched then is launched directly."""
    run = type(kernel).run
    type(kernel).run = None
    try:
        return launches(call)
    finally:
        type(kernel).run = run


def check_every_kind_of_argument_is_launched_as_triton_does():
    with switched(False):
        wanted = launches(all_calls)
    with switched(True):
        first = launches(all_calls)
        again = triton_python_is_passed_by(all_calls)
    assert len(wanted) == len(VARIED)
    assert len({function for _, _, function, _, _ in wanted}) > 10
    assert first == wanted
    assert again == wanted


def check_a_named_kernel_of_this_package():
    tensors = {name: on_gpu(40, dtype=torch.bfloat16) for name in ("x", "gate", "residual", "out")}

    def call():
        launcher.launch(forward_kernel, 1, CPU, {**tensors, "count": 40, "tiles": 1, "BLOCK": 1024, "num_warps": 4})

    with switched(False):
        wanted = launches(call)
    with switched(True):
        launches(call)
        assert triton_python_is_passed_by(call) == wanted


def check_descriptors_of_tritons_own_are_left_to_triton():
    given = TensorDescriptor.from_tensor(on_gpu(32, 32, dtype=torch.float16), [16, 16])

    def call():
        launcher.launch(described, 1, CPU, {"desc": given, "out": X, "BLOCK": 16})

    with switched(True):
        for _ in range(2):
            ((_, _, _, _, values),) = launches(call)
            assert values[0] is given
        with pytest.raises(TypeError, match="NoneType"):
            triton_python_is_passed_by(call)


def check_device_and_stream_are_the_current_ones():
    with switched(True):
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        try:
            DRIVER.device = 1
            (first,) = launches(lambda: launcher.launch(kernel, 3, CPU, {"x": X, **CALL}))
            (again,) = triton_python_is_passed_by(lambda: launcher.launch(kernel, 3, CPU, {"x": X, **CALL}))
        finally:
            DRIVER.device = 0
        (home,) = triton_python_is_passed_by(lambda: launcher.launch(kernel, 3, CPU, {"x": X, **CALL}))
    assert first == again
    assert [found[1] for found in (first, again, home)] == [8, 8, 7]
    assert first[2] != home[2]  # a module is loaded on each device


def check_a_device_without_a_number_is_the_current_one():
    with switched(True):
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        (direct,) = triton_python_is_passed_by(lambda: launcher.launch(kernel, 3, torch.device("cuda"), {"x": X, **CALL}))
        (wanted,) = launches(lambda: launcher.launch(kernel, 3, CPU, {"x": X, **CALL}))
    assert direct == wanted
    with switched(False):
        launcher.launch(kernel, 3, torch.device("cuda"), {"x": X, **CALL})


def check_hooks_of_a_profiler_are_called():
    seen = []

    def see(metadata):
        seen.append(metadata.get()["name"])

    with switched(True):
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        knobs.runtime.launch_enter_hook.add(see)
        try:
            launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        finally:
            knobs.runtime.launch_enter_hook.remove(see)
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
    assert seen == ["kernel"]


def check_a_tensor_of_the_cpu_is_left_to_triton():
    with switched(True):
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        given = {"x": X, **CALL, "other": torch.zeros(64)}
        for _ in range(2):
            launcher.launch(kernel, 3, CPU, given)
        with pytest.raises(TypeError, match="NoneType"):
            triton_python_is_passed_by(lambda: launcher.launch(kernel, 3, CPU, given))


def check_wrong_calls_are_triton_errors_each_time():
    with switched(True):
        for _ in range(2):
            for change, error in (({"warps": 4}, KeyError), ({"count": [1]}, TypeError)):
                with pytest.raises(error):
                    launcher.launch(kernel, 3, CPU, {"x": X, **CALL, **change})


def check_a_key_that_is_too_coarse_is_noticed_under_full_checks():
    with switched(True, GEM_CHECK="full"):
        all_calls()
        all_calls()
        launcher.forget()
        found = launcher.direct(kernel, CPU)[0]
        found.varying = [(i, False) for i, _ in found.varying]  # as if no integer were specialised
        launcher.launch(kernel, 3, CPU, {"x": X, **CALL})
        with pytest.raises(RequestError, match="Triton would launch another kernel"):
            launcher.launch(kernel, 3, CPU, {"x": X, **CALL, "size": 1})


def run_checks(checks):
    for name, check in checks.items():
        try:
            check()
            print(name, "ok", flush=True)
        except Exception:
            print(name, "failed", flush=True)
            traceback.print_exc(file=sys.stderr)


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    run_checks(CHECKS)
