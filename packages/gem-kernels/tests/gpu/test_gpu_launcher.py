"""Direct launches on CUDA: the same bits as through Triton, for every op and backend of this package; streams, graphs and profilers."""

import pytest
import torch

from gem_kernels.bench.backends import resolve
from gem_kernels.bench.measure import _results
from gem_kernels.bench.shapes import SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.bench.workloads import build
from gem_kernels.common import launcher
from gem_kernels.common.direct_launch import SWITCH, why_through_triton
from gem_kernels.plugin import gem_kernel_impls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CALLS = [
    (impl.op, impl.backend, variant)
    for impl in gem_kernel_impls()
    if impl.backend in ("triton", "gluon")
    for variant in VARIANTS_OF.get(impl.op, ("",))
]


@pytest.fixture
def switch(monkeypatch):
    """Direct launches on or off; under full checks."""
    monkeypatch.setenv("GEM_CHECK", "full")

    def to(on):
        monkeypatch.setenv(SWITCH, str(int(on)))
        launcher.forget()
        if on and why_through_triton() is not None:
            pytest.skip(why_through_triton())

    yield to
    monkeypatch.undo()
    launcher.forget()


def call_of(op, backend, variant, lengths):
    work = build(op, variant, SHAPES[SHAPES_OF[op][0]], lengths, torch.bfloat16, "cuda")
    function = resolve(work, backend)
    return (lambda: _results(function, work)) if callable(function) else pytest.skip(function)


@pytest.mark.parametrize(("op", "backend", "variant"), CALLS)
def test_the_same_bits_as_through_triton(switch, op, backend, variant):
    calls = [call_of(op, backend, variant, lengths) for lengths in ([70, 0, 300], [1], [16, 16], [129, 5, 64, 2000])]
    switch(False)
    wanted = [call() for call in calls]
    switch(True)
    for _ in range(3):
        for call, results in zip(calls, wanted, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(call(), results, strict=True))
    assert any(found.kept for found in launcher._launchers.values())


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_a_stream_and_a_graph(switch, backend):
    work = build("gdpa", "", SHAPES["self-L256"], [100, 0, 300], torch.bfloat16, "cuda")
    function = resolve(work, backend)
    if not callable(function):
        pytest.skip(function)
    switch(True)
    with torch.no_grad():
        expected = work.call(function)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # a stream of its own
            out = work.call(function)
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_profilers_hook_is_called(switch):
    from triton import knobs

    call, seen = call_of("gated_residual", "triton", "", [70]), []

    def see(metadata):
        seen.append(metadata.get()["name"])

    switch(True)
    call()
    knobs.runtime.launch_enter_hook.add(see)
    try:
        call()
    finally:
        knobs.runtime.launch_enter_hook.remove(see)
    assert seen == ["forward_kernel", "backward_kernel"]
