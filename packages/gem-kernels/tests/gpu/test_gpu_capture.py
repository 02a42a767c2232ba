"""CUDA graphs: every op of this package is captured forward and backward, and a replay with other values and other rows gives what a call gives. Tile
lists are shared within one capture and by nothing else."""

from unittest.mock import patch

import pytest
import torch

from gem_kernels.bench.backends import resolve
from gem_kernels.bench.measure import _results
from gem_kernels.bench.shapes import SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.bench.workloads import _tensors, build
from gem_kernels.common import capture, schedule
from gem_kernels.common.schedule import Layout, tiles
from gem_kernels.plugin import gem_kernel_impls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CALLS = [
    (impl.op, impl.backend, variant)
    for impl in gem_kernel_impls()
    if impl.backend in ("triton", "gluon", "gluon_fp8")
    for variant in VARIANTS_OF.get(impl.op, ("",))
]
BEFORE, AFTER = [70, 0, 300, 16, 129], [300, 129, 1, 85, 0]
"""Rows of as many tokens, and the longest of the same length: nothing else differs between the graph's two calls."""


def work_of(op, variant, lengths):
    return build(op, variant, SHAPES[SHAPES_OF[op][0]], lengths, torch.bfloat16, "cuda")


@torch.no_grad()
def fill(work, other):
    """Give the tensors of one call the values of another."""
    for old, new in zip(_tensors(list(work.arguments.values())), _tensors(list(other.arguments.values())), strict=True):
        old.copy_(new)


def captured(call):
    """The graph of a call, and the results that its replays write."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(("op", "backend", "variant"), CALLS)
def test_a_replay_with_other_rows_gives_the_bits_of_a_call(op, backend, variant):
    work = work_of(op, variant, BEFORE)
    function = resolve(work, backend)
    if not callable(function):
        pytest.skip(function)
    graph, results = captured(lambda: _results(function, work))
    for lengths, scale in ((AFTER, 0.5), (BEFORE, 1.0)):
        other = work_of(op, variant, lengths)
        with torch.no_grad():
            for leaf in other.leaves():
                leaf.mul_(scale)
        wanted = _results(function, other)
        fill(work, other)
        for result in results:
            result.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert same(results, wanted)
        assert any(bool(result.any()) for result in results)


def layout_of(offsets):
    tokens = 300
    return Layout(offsets, offsets, offsets.shape[0] - 1, tokens, tokens, tokens, tokens, offsets.device)


def listed(found):
    return found.records[: int(found.count)].tolist()


@pytest.fixture
def built():
    """Lists that were built."""
    seen, real = [], schedule._build
    with patch.object(schedule, "_build", lambda *a: seen.append(a) or real(*a)):
        yield seen


def test_the_driver_numbers_captures():
    device, numbers = torch.device("cuda", torch.cuda.current_device()), []
    assert capture.current(device)[1] == 0
    for _ in range(2):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=device)
            numbers += [capture.current(device)[1], capture.current(device)[1]]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]
    assert None not in numbers
    assert 0 not in numbers
    assert capture.current(device)[1] == 0


def test_a_list_is_shared_within_a_capture_and_follows_the_offsets_at_each_replay(built):
    offsets = torch.tensor([0, 100, 100, 300], device="cuda")
    layout, other = layout_of(offsets), torch.tensor([0, 7, 250, 260], device="cuda")
    outside = listed(tiles(layout, "q", 16))  # also compiles the kernels, which no capture can
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = tiles(layout, "q", 16)
        assert tiles(layout, "q", 16) is found
    assert len(built) == 2
    graph.replay()
    assert listed(found) == outside
    offsets.copy_(other)
    graph.replay()
    assert listed(found) == listed(tiles(layout_of(other), "q", 16)) != outside


def test_no_list_goes_from_one_capture_to_another_or_outside(built):
    layout = layout_of(torch.tensor([0, 100, 100, 300], device="cuda"))
    first = tiles(layout, "q", 16)
    graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(tiles(layout, "q", 16))
    assert tiles(layout, "q", 16) is first, "what was built outside is kept"
    assert len(built) == 3
    assert found[0] is not found[1]
    assert not any(key[0] for key in schedule._kept), "lists of captures are dropped"
    for graph, one in zip(graphs, found, strict=True):
        graph.replay()
        assert listed(one) == listed(first)


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_layers_and_directions_that_one_graph_captures_share_lists(built, backend):
    works = [work_of("gdpa", "", BEFORE) for _ in range(3)]
    for work in works:
        work.arguments.update({name: works[0].arguments[name] for name in ("q_offsets", "k_offsets")})
    function = resolve(works[0], backend)
    if not callable(function):
        pytest.skip(function)
    captured(lambda: _results(function, works[0]))
    alone = len(built)
    built.clear()
    captured(lambda: [_results(function, work) for work in works])
    assert len(built) <= alone


@pytest.fixture
def trees():
    """Graphs of the compiler, which are gone afterwards: where there are some, captures share no lists."""
    from torch._inductor import cudagraph_trees

    yield cudagraph_trees
    torch.compiler.reset()
    cudagraph_trees.reset_cudagraph_trees()


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_graphs_of_the_compiler_hold_no_list(trees, backend):
    """It fails where memory of its graphs is held that it does not know of."""
    works = [work_of("gdpa", "", lengths) for lengths in (BEFORE, AFTER) * 3]
    function = resolve(works[0], backend)
    if not callable(function):
        pytest.skip(function)
    compiled = torch.compile(lambda *given, **options: function(*given, **options) * 2, mode="reduce-overhead")
    for work in works:
        torch.compiler.cudagraph_mark_step_begin()
        found = [result.clone() for result in _results(compiled, work)]
        wanted = [2 * result for result in _results(function, work)]
        assert same(found, wanted)
    assert trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None, "it has recorded graphs"
