"""Checks of descriptors that are handed over by address, for a program of their own: the interpreter must be off, and Triton's own launcher of NVIDIA
GPUs is in its place, the C functions below it excepted. ``python3 -m gem_kernels_blocks`` prints a line a check."""

from types import SimpleNamespace
from unittest.mock import patch

import gem_kernels_driver
import pytest
import torch
from gem_kernels_driver import on_gpu
from gem_kernels_launches import CPU, run_checks, switched, triton_python_is_passed_by
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from gem_core.spec import RequestError
from gem_kernels.common import compiled, launcher
from gem_kernels.common.compiled import Block, Described
from gem_kernels.common.hopper.gluon import gl, gluon, mbarrier, tma, triton
from gem_kernels.common.language import tl

DRIVER = gem_kernels_driver.install()
DRIVER.launcher_cls = nvidia.CudaLauncher
SEEN = []
"""What the C functions were handed: all of a launch, with the maps of its descriptors as what they were filled with."""
SHARED = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float16)


def note(where, memory, packed, hooks, values):
    metadata, enter, _ = hooks
    if enter is not None:
        enter(metadata)
    SEEN.append((*where, memory, packed, [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in values]))


def launch_36(*given):
    note(((given[:3]), *given[3:7]), given[7:9], given[9], given[10:13], given[13:])


def launch_37(*given):
    note(((given[:3]), *given[3:7]), given[11:15], given[7], given[8:11], given[15])


def filled(*given):
    return tuple([tuple(value) if isinstance(value, list | tuple) else value for value in given])


if hasattr(nvidia, "annotate_arguments"):
    DRIVER.utils.launch, DRIVER.utils.fill_tma_descriptor_tiled, DRIVER.utils.build_signature_metadata = launch_37, filled, tuple
    nvidia.PyKernelArg, nvidia.ARG_TUPLE, nvidia.ARG_KERNEL, nvidia.ARG_CONSTEXPR = (lambda nested_tuple, type: type), 0, 1, 2
else:
    DRIVER.utils.fill_tma_descriptor = filled
    nvidia.library_dirs, nvidia.compile_module_from_src = list, lambda **source: SimpleNamespace(launch=launch_36)


def launches(call):
    before = len(SEEN)
    call()
    return SEEN[before:]


@triton.jit
def added(x, more, y, count, BLOCK: tl.constexpr, factor=1.0):
    tile = x.load([0, count]) * factor
    if more is not None:
        tile += tl.load(more + tl.arange(0, BLOCK))[None, :]
    y.store([count, 0], tile.to(y.dtype))


@gluon.jit
def copied(x, y, count, LAYOUT: gl.constexpr):
    tile = gl.allocate_shared_memory(x.dtype, x.block_type.shape, LAYOUT)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, x.block_type.nbytes)
    tma.async_copy_global_to_shared(x, [0, count], barrier, tile)
    mbarrier.wait(barrier, 0)
    tma.async_copy_shared_to_global(y, [0, 0], tile)
    tma.store_wait(0)


def half(*shape, shift=0):
    return on_gpu(*shape, dtype=torch.float16, shift=shift)


OWN, GLUON = Described((16, 16)), Described((16, 16), SHARED)
RAGGED = Described((16, 16), None, (1000, 24), (24, 1))
ROOM = half(64, 32)
VARIED = [
    {},
    {"x": Block((half(32, 16), OWN))},
    {"x": Block((half(48, 64), OWN))},
    {"x": Block((half(48, 64)[:, :24], OWN))},
    {"x": Block((half(64, 24), RAGGED))},
    {"x": Block((half(48, 64), RAGGED))},
    {"y": Block((half(16, 16), RAGGED))},
    {"x": Block((on_gpu(32, 16), OWN)), "y": Block((on_gpu(32, 16), OWN))},
    {"x": Block((half(32, 32), Described((16, 16))))},
    {"more": None},
    {"more": half(16, shift=1)},
    *({"count": count} for count in (0, 1, 16, 17)),
    {"factor": 0.5},
]


def call_of(change):
    given = {"x": Block((ROOM, OWN)), "more": half(16), "y": Block((ROOM, RAGGED)), "count": 3, "BLOCK": 16, "num_warps": 4}
    return given | change


CALLS = [call_of(change) for change in VARIED]


def all_calls():
    for given in CALLS:
        launcher.launch(added, 3, CPU, given)


def copy(x):
    launcher.launch(copied, 3, CPU, {"x": Block((x, GLUON)), "y": Block((ROOM, GLUON)), "count": 3, "LAYOUT": SHARED, "num_warps": 4})


MATRICES = [half(32, 64), half(48, 64), half(48, 64)]


def gluon_calls():
    for x in MATRICES:
        copy(x)


def check_blocks_reach_the_device_as_triton_hands_over_descriptors():
    with switched(False):
        wanted = launches(all_calls)
    with switched(True):
        first = launches(all_calls)
        again = launches(lambda: triton_python_is_passed_by(all_calls))
    assert len(wanted) == len(VARIED)
    assert len({launched[2] for launched in wanted}) > 5
    assert first == wanted
    assert again == wanted


def check_blocks_of_gluon():
    with switched(False):
        wanted = launches(gluon_calls)
    with switched(True):
        copy(MATRICES[0])
        assert launches(lambda: triton_python_is_passed_by(gluon_calls)) == wanted
    assert len({launched[2] for launched in wanted}) == 1


def check_what_the_copy_engine_cannot_address_is_an_error_each_time():
    wrong = [half(32, 16, shift=1), half(32, 20)[:, :16], half(32, 32)[:, ::2]]
    with switched(True):
        all_calls()
        for _ in range(2):
            for x in wrong:
                with pytest.raises(AssertionError, match=r"aligned|contiguous"):
                    launcher.launch(added, 3, CPU, call_of({"x": Block((x, OWN))}))
        with pytest.raises(AssertionError, match="aligned"):
            launcher.launch(added, 3, CPU, call_of({"y": Block((half(64, 24, shift=1), RAGGED))}))


def check_a_launcher_of_another_kind_gets_descriptors():
    """Memory that a kernel wants for itself is Triton's to give."""
    with switched(True):
        wanted = launches(all_calls)
        launcher.forget()
        with patch.object(compiled, "_known", lambda run: False):
            assert launches(all_calls) == wanted
            assert launches(lambda: triton_python_is_passed_by(all_calls)) == wanted


def check_hooks_are_called_and_stream_and_device_are_the_current_ones():
    seen = []
    with switched(True):
        launches(all_calls)
        knobs.runtime.launch_enter_hook.add(seen.append)
        try:
            launcher.launch(added, 3, CPU, CALLS[0])
        finally:
            knobs.runtime.launch_enter_hook.remove(seen.append)
        assert len(seen) == 1
        try:
            DRIVER.device = 1
            there = launches(lambda: launcher.launch(added, 3, CPU, CALLS[0])) + launches(lambda: launcher.launch(added, 3, CPU, CALLS[0]))
        finally:
            DRIVER.device = 0
        (here,) = launches(lambda: triton_python_is_passed_by(lambda: launcher.launch(added, 3, CPU, CALLS[0])))
    assert [launched[1] for launched in (*there, here)] == [8, 8, 7]


def check_full_checks_compare_blocks_with_triton():
    with switched(True, GEM_CHECK="full"):
        for _ in range(3):
            all_calls()
        found = launcher.direct(added, CPU)[0]
        dearest = next(iter(found.kept.values()))
        found.kept = dict.fromkeys(found.kept, dearest)  # another kernel than Triton's
        found.hits = 0
        with pytest.raises(RequestError, match="Triton would launch another kernel"):
            launcher.launch(added, 3, CPU, call_of({"more": None}))


def check_what_is_remembered_has_an_end():
    with switched(True), patch.object(launcher, "MOST", 4):
        all_calls()
        assert 0 < len(launcher.direct(added, CPU)[0].kept) <= 4


def check_sizes_of_another_tensor_would_be_noticed():
    """The planted fault: a launch that keeps the sizes of the first tensor of its kind."""
    real = compiled._maps

    def stale(kernel, described):
        return [(i, meta, shape or (64, 32), strides or (32, 1)) for i, meta, shape, strides in real(kernel, described)]

    with switched(True), patch.object(compiled, "_maps", stale):
        wanted = launches(all_calls)
        assert launches(all_calls) != wanted


CHECKS = {name: check for name, check in globals().items() if name.startswith("check_")}

if __name__ == "__main__":
    run_checks(CHECKS)
