"""The Triton jagged_attention beyond the conformance suite: half precision under the interpreter, bias, statistics, limits, registration, FLOPs."""

import math
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from gem_core.ops import jagged_attention as public
from gem_core.ops.jagged_attention import flops, reference
from gem_core.spec import KernelUnavailable, MachineError
from gem_core.testing import assert_as_accurate, assert_close, plain_precision, poisoned_memory

pytest.importorskip("triton")

from gem_kernels.ops import attention, host
from gem_kernels.ops.jagged_attention import call, launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter; tests/gpu has the CUDA ones")


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def draw(q_lengths, k_lengths=None, *, heads=2, kv_heads=None, dim=16, v_dim=16, dtype=torch.float32, seed=0):
    """Leaves q, k, v and their offsets; no ``k_lengths`` makes it self-attention."""
    g = torch.Generator().manual_seed(seed)
    kv_heads = kv_heads or heads
    q_offsets = offsets_of(q_lengths)
    k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths)
    k_tokens = int(k_offsets[-1])
    shapes = ((sum(q_lengths), heads, dim), (k_tokens, kv_heads, dim), (k_tokens, kv_heads, v_dim))
    q, k, v = (torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes)
    return (q, k, v, q_offsets, k_offsets), {"max_q": max(q_lengths, default=0), "max_k": max(k_lengths or q_lengths, default=0)}


def results(function, arguments, options, wanted):
    """Output and gradients, with an upstream gradient that is the same for every dtype."""
    out = function(*arguments, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, wanted, upstream))


def compare(arguments, options):
    """Hold the kernel to the accuracy of plain torch in the same dtype, forward and gradients, that of a bias included."""
    leaves = [*arguments[:3], *([options["bias"]] if "bias" in options else [])]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    exact_options = {**options, "bias": exact[3]} if "bias" in options else options
    truth = results(reference, (*exact[:3], *arguments[3:]), exact_options, exact)
    with plain_precision():
        plain = results(reference, arguments, options, leaves)
    with poisoned_memory():
        actual = results(launch.triton, arguments, options, leaves)
    for name, a, p, t in zip(("output", "dq", "dk", "dv", "dbias"), actual, plain, truth, strict=False):
        assert_as_accurate(a, p, t.view(a.shape), what=name)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 4}, {"causal": True, "window": 30, "scale": -0.3}], ids=str)
def test_float16(options):
    arguments, limits = draw([1, 70, 0, 33], [20, 66, 3, 0], heads=2, kv_heads=1, dtype=torch.float16)
    compare(arguments, {**limits, **options})


@pytest.mark.parametrize(("dim", "v_dim"), [(40, 24), (8, 1)])
def test_head_sizes_that_are_not_powers_of_two_are_padded(dim, v_dim):
    compare(*draw([5, 0, 34], dim=dim, v_dim=v_dim))


@pytest.mark.parametrize("scale", [0.0, -2.0])
def test_scales_that_are_not_positive(scale):
    arguments, options = draw([5, 0, 34])
    compare(arguments, {**options, "scale": scale})


@settings(max_examples=8, deadline=None)
@given(
    queries=st.lists(st.integers(0, 40), min_size=2, max_size=3),
    keys=st.lists(st.integers(0, 40), min_size=3, max_size=3),
    causal=st.booleans(),
    window=st.none() | st.integers(0, 50),
)
def test_case_I02_drawn_lengths_under_every_mask(queries, keys, causal, window):
    arguments, options = draw(queries, keys[: len(queries)])
    compare(arguments, {**options, "causal": causal, "window": window})


def test_tiles_outside_the_window_are_not_read():
    (q, k, v, offsets, _), options = draw([200])
    spoilt = v.detach().clone()
    spoilt[:100] = math.nan
    out = launch.triton(q, k, spoilt, offsets, offsets, **options, window=5)
    expected = launch.triton(q, k, v, offsets, offsets, **options, window=5)
    assert torch.equal(out[192:], expected[192:])
    assert out[:100].isnan().all()
    causal = launch.triton(q, k, spoilt.flip(0), offsets, offsets, **options, causal=True)
    assert not causal[:64].isnan().any()


@pytest.mark.parametrize(("rows", "heads"), [(3, 4), (1, 4), (3, 1), (1, 1)])
def test_a_bias_and_its_gradient_are_added_over_what_shares_it(rows, heads):
    arguments, options = draw([5, 0, 70], [40, 3, 66], heads=4, kv_heads=2)
    bias = torch.randn(rows, heads, 70, 66, generator=torch.Generator().manual_seed(1)).requires_grad_()
    compare(arguments, {**options, "bias": bias, "causal": rows == 1})


def test_a_bias_for_a_shared_query():
    g = torch.Generator().manual_seed(1)
    q = torch.randn(4, 2, 16, generator=g, requires_grad=True)
    k, v = (torch.randn(31, 2, 16, generator=g, requires_grad=True) for _ in range(2))
    bias = torch.randn(1, 2, 4, 20, generator=g).requires_grad_()
    compare((q, k, v, None, offsets_of([3, 0, 20, 7, 1])), {"max_q": 4, "max_k": 20, "bias": bias})


def test_a_strided_bias_is_read_in_place():
    arguments, options = draw([20, 7])
    bias = torch.randn(20, 20, 2, 1).permute(3, 2, 1, 0)
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a view was copied")):
        out = launch.triton(*arguments, **options, bias=bias)
    assert_close(out, reference(*arguments, **options, bias=bias), bound=1e-6)


def test_the_lowest_finite_bias_hides_nothing_when_all_have_it():
    arguments, options = draw([6])
    bias = torch.full((1, 1, 6, 6), torch.finfo(torch.float32).min)
    out = launch.triton(*arguments, **options, bias=bias)
    assert_close(out, reference(*arguments, **options, bias=bias), bound=1e-6)
    assert out.abs().sum() > 0


def test_large_scores_keep_the_statistics_finite():
    arguments, options = draw([40, 3])
    out, lse = launch.triton(*arguments, **options, scale=-300.0, return_lse=True)
    expected, expected_lse = reference(*arguments, **options, scale=-300.0, return_lse=True)
    assert_close(out, expected, bound=1e-5)
    assert_close(lse, expected_lse, bound=1e-6)
    assert lse.shape == (43, 2)
    assert not lse.requires_grad


def test_views_of_a_fused_buffer_are_read_in_place():
    offsets = offsets_of([4, 0, 35])
    fused = torch.randn(39, 2, 48, requires_grad=True)
    q, k, v = fused.split(16, dim=-1)
    options = {"max_q": 35, "max_k": 35}
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a view was copied")):
        out = launch.triton(q, k, v, offsets, offsets, **options)
    assert_close(out, reference(q, k, v, offsets, offsets, **options), bound=1e-6)
    compare((q, k, v, offsets, offsets), options)


def test_case_C09_tiles_beyond_the_grid_limit_are_strided_over_on_one_axis():
    arguments, options = draw([3, 70, 0, 66], heads=1)
    bias = torch.randn(1, 1, 70, 70, requires_grad=True)
    wanted = [*arguments[:3], bias]
    full = results(launch.triton, arguments, {**options, "bias": bias}, wanted)
    with patch.object(attention, "MAX_GRID", 3):
        capped = results(launch.triton, arguments, {**options, "bias": bias}, wanted)
    assert all(torch.equal(a, b) for a, b in zip(full, capped, strict=True))
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    names = ("forward_kernel", "query_grad_kernel", "key_grad_kernel", "bias_grad_kernel")
    with patch.multiple(call._kernels(), **{name: Recorder() for name in names}):
        launch.triton(*arguments, **options, bias=bias).sum().backward()
    assert [len(grid) for grid in grids] == [1, 1, 1, 1]


def test_case_B08_rows_beyond_the_maximum_are_zero_not_garbage():
    """Only reachable past the public check, which refuses it on a CPU; on a GPU it is how such rows are cut."""
    arguments, _ = draw([2, 70, 1], [5, 40, 0])
    q, k, v = arguments[:3]
    with poisoned_memory():
        out, dq, dk, dv = results(launch.triton, arguments, {"max_q": 30, "max_k": 33}, [q, k, v])
        _, lse = launch.triton(*arguments, max_q=30, max_k=33, return_lse=True)
    for tensor, first, last in ((out, 32, 72), (dq, 32, 72), (dk, 38, 45), (dv, 38, 45)):
        assert not tensor[first:last].any()
    assert (lse[32:] == -torch.inf).all()
    cut_q, cut_k = [*range(32), 72], list(range(38))
    expected = reference(q[cut_q], k[cut_k], v[cut_k], offsets_of([2, 30, 1]), offsets_of([5, 33, 0]), max_q=30, max_k=33)
    assert_close(out[cut_q], expected, bound=1e-6)


def test_tokens_outside_every_row_are_zero():
    q, k, v = (torch.randn(9, 2, 16, requires_grad=True) for _ in range(3))
    offsets = offsets_of([2, 3])
    with poisoned_memory():
        for tensor in results(launch.triton, (q, k, v, offsets, offsets), {"max_q": 3, "max_k": 3}, [q, k, v]):
            assert not tensor[5:].any()


@pytest.mark.parametrize("maxima", [{"max_q": 0, "max_k": 3}, {"max_q": 3, "max_k": 0}])
def test_nothing_to_attend_to_gives_zeros(maxima):
    arguments, _ = draw([3], [3])
    for tensor in results(launch.triton, arguments, maxima, list(arguments[:3])):
        assert not tensor.any()


@pytest.mark.parametrize("rows", [0, 2])
def test_case_B03_all_rows_empty(rows):
    arguments, options = draw([0] * rows)
    out, dq, dk, dv = results(launch.triton, arguments, options, list(arguments[:3]))
    assert out.shape == dq.shape == dk.shape == dv.shape == (0, 2, 16)


# ---- what is refused ------------------------------------------------------------------------------------------------------------------


def test_what_the_backend_does_not_take_is_refused():
    (q, k, v, a, b), options = draw([3])
    with pytest.raises(KernelUnavailable, match="interpreter computes bf16 products wrongly"):
        launch.triton(q.bfloat16(), k.bfloat16(), v.bfloat16(), a, b, **options)
    with pytest.raises(KernelUnavailable, match=r"bf16 .* interpreter"):
        public(q.bfloat16(), k.bfloat16(), v.bfloat16(), a, b, **options, backend="triton")
    with pytest.raises(KernelUnavailable, match="same dtype"):
        launch.triton(q, k.half(), v, a, b, **options)
    with pytest.raises(KernelUnavailable, match="head size 257"):
        launch.triton(q, k, torch.zeros(3, 2, 257), a, b, **options)
    with patch.object(host, "interpreted", lambda: False), pytest.raises(MachineError, match="TRITON_INTERPRET=1"):
        launch.triton(q, k, v, a, b, **options)


def test_gluon_is_no_backend_for_this_machine():
    arguments, options = draw([3], dim=64, v_dim=64, dtype=torch.float16)
    with pytest.raises(KernelUnavailable, match="gluon"):
        public(*arguments, **options, backend="gluon")


# ---- registration ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_opcheck(shared):
    (q, k, v, offsets, _), _ = draw([4, 7], heads=1)
    q = torch.randn(3, 1, 16, requires_grad=True) if shared else q
    longest = 3 if shared else 7
    bias = torch.randn(1, 1, longest, 7, requires_grad=True)
    settings = (longest, 7, 0.5, True, 3, "triton")
    tensors = (q, k, v, None if shared else offsets, offsets, bias)
    opcheck(torch.ops.gem_kernels.jagged_attention.default, (*tensors, *settings))
    detached = tuple(t.detach() if t is not None else None for t in tensors)
    out, lse = torch.ops.gem_kernels.jagged_attention(*detached, *settings)
    dout = torch.randn_like(out)
    opcheck(torch.ops.gem_kernels.jagged_attention_query_grad.default, (dout, out, lse, *detached, *settings))
    _, delta = torch.ops.gem_kernels.jagged_attention_query_grad(dout, out, lse, *detached, *settings)
    opcheck(torch.ops.gem_kernels.jagged_attention_key_grad.default, (dout, delta, lse, *detached, *settings))
    opcheck(torch.ops.gem_kernels.jagged_attention_bias_grad.default, (dout, delta, lse, *detached, *settings))


def test_a_compiler_sees_one_op():
    arguments, options = draw([4, 0, 7])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *a: launch.triton(*a, **options) * 2, backend=backend, fullgraph=True)
    assert_close(compiled(*arguments), 2 * launch.triton(*arguments, **options), bound=0.0)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in calls if "jagged" in name] == ["gem_kernels.jagged_attention.default"]
    torch._dynamo.reset()


def test_activation_checkpoints_give_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    arguments, options = draw([4, 0, 7])
    wanted = list(arguments[:3])
    again = results(lambda *a, **o: checkpoint(launch.triton, *a, use_reentrant=False, **o), arguments, options, wanted)
    assert all(torch.equal(a, b) for a, b in zip(results(launch.triton, arguments, options, wanted), again, strict=True))


def test_a_surrounding_autocast_does_not_change_the_result():
    arguments, options = draw([4, 0, 7], heads=1)
    plain = launch.triton(*arguments, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(launch.triton(*arguments, **options), plain)


@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": 3}], ids=str)
def test_flops_are_counted_by_real_lengths(mask):
    q_lengths, k_lengths = [3, 0, 9, 2], [4, 5, 7, 0]
    arguments, options = draw(q_lengths, k_lengths, heads=4, kv_heads=2, dim=16, v_dim=32)
    expected = flops(q_lengths=q_lengths, k_lengths=k_lengths, heads=4, dim=16, v_dim=32, **mask)
    with FlopCounterMode(display=False) as counter:
        out = launch.triton(*arguments, **options, **mask)
    assert counter.get_total_flops() == expected > 0
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * expected


# ---- planted faults: the comparisons above go red -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "options"),
    [({"window": None}, {"window": 2}), ({"causal": False}, {"causal": True}), ({"scale": 0.3}, {}), ({"max_k": 19}, {})],
    ids=str,
)
def test_a_planted_fault_is_noticed(fault, options):
    arguments, limits = draw([3, 20])
    real = launch.triton
    with patch.object(launch, "triton", lambda *a, **o: real(*a, **{**o, **fault})), pytest.raises(AssertionError):
        compare(arguments, {**limits, **options})
