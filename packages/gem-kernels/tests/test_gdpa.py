"""The Triton gdpa beyond the conformance suite: half precision under the interpreter, layouts, launch limits, registration, FLOPs."""

import math
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from gem_core.ops import gdpa as public
from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.gdpa import flops, reference
from gem_core.spec import KernelRequest, KernelUnavailable, MachineError, RequestError
from gem_core.testing import assert_as_accurate, assert_close, jagged_lengths, plain_precision, poisoned_memory

pytest.importorskip("triton")

from gem_kernels.ops import attention, host
from gem_kernels.ops.gdpa import call, launch
from gem_kernels.ops.limits import check_attention as check

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


def compare(arguments, options, wanted=None):
    """Hold launch.gdpa to the accuracy of plain torch in the same dtype, forward and gradients."""
    wanted = list(arguments[:3]) if wanted is None else wanted
    exact = [t.detach().double().requires_grad_() for t in arguments[:3]]
    truth = results(reference, (*exact, *arguments[3:]), options, exact)
    with plain_precision():
        plain = results(reference, arguments, options, wanted)
    with poisoned_memory():
        actual = results(launch.gdpa, arguments, options, wanted)
    for name, a, p, t in zip(("output", "dq", "dk", "dv"), actual, plain, truth, strict=True):
        assert_as_accurate(a, p, t.view(a.shape), what=name)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"activation": "gelu_fast", "scale": 0.3, "scale_position": "after"}], ids=str)
def test_float16(options):
    arguments, limits = draw([1, 70, 0, 33], [20, 66, 3, 0], heads=2, kv_heads=1, dtype=torch.float16)
    compare(arguments, {**limits, **options})


@pytest.mark.parametrize(("dim", "v_dim"), [(40, 24), (8, 1)])
def test_head_sizes_that_are_not_powers_of_two_are_padded(dim, v_dim):
    compare(*draw([5, 0, 34], dim=dim, v_dim=v_dim))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(queries=jagged_lengths(max_rows=3, max_length=40), data=jagged_lengths(min_rows=3, max_rows=3, max_length=40))
def test_drawn_cross_lengths_with_a_window(queries, data):
    compare(*(lambda a, o: (a, {**o, "window": 5, "activation": "silu"}))(*draw(queries, data[: len(queries)])))


def test_views_of_a_fused_buffer_are_read_in_place():
    offsets = offsets_of([4, 0, 35])
    fused = torch.randn(39, 2, 48, requires_grad=True)
    q, k, v = fused.split(16, dim=-1)
    options = {"max_q": 35, "max_k": 35}
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a view was copied")):
        out = launch.gdpa(q, k, v, offsets, offsets, **options)
    assert_close(out, reference(q, k, v, offsets, offsets, **options), bound=1e-6)
    compare((q, k, v, offsets, offsets), options)


def test_a_view_with_a_strided_last_axis_is_copied_and_right():
    arguments, options = draw([4, 0, 20], heads=4)
    flipped = [t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in arguments[:3]]
    assert flipped[0].stride(-1) != 1
    compare((*flipped, *arguments[3:]), options)


def test_case_C08_a_token_stride_whose_tile_offsets_leave_32_bits_is_copied():
    wide, near = (torch.empty_strided((3, 2, 16), (stride, 16, 1), device="meta") for stride in (2**24, 2**24 - 1))
    with patch.object(torch.Tensor, "contiguous", lambda self: "copy"):
        assert host.readable(wide) == ["copy"]
        assert host.readable(near)[0] is near
    assert 127 * host.MAX_TOKEN_STRIDE + 256 < 2**31


def test_case_C09_tiles_beyond_the_grid_limit_are_strided_over():
    arguments, options = draw([3, 70, 0, 66], heads=1)
    full = results(launch.gdpa, arguments, options, list(arguments[:3]))
    with patch.object(attention, "MAX_GRID", 3):
        capped = results(launch.gdpa, arguments, options, list(arguments[:3]))
    assert all(torch.equal(a, b) for a, b in zip(full, capped, strict=True))


def test_case_C09_grids_have_one_axis():
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    names = {"forward_kernel", "query_grad_kernel", "key_grad_kernel"}
    kernels = call._kernels()
    arguments, options = draw([3, 70])
    with patch.multiple(kernels, **{name: Recorder() for name in names}):
        launch.gdpa(*arguments, **options).sum().backward()
    assert len(grids) == 3
    assert all(len(grid) == 1 for grid in grids)


def test_case_B08_rows_beyond_the_maximum_are_zero_not_garbage():
    """Only reachable past the public check, which refuses it on a CPU; on a GPU it is how such rows are cut."""
    arguments, _ = draw([2, 70, 1], [5, 40, 0])
    q, k, v = arguments[:3]
    with poisoned_memory():
        out, dq, dk, dv = results(launch.gdpa, arguments, {"max_q": 30, "max_k": 33}, [q, k, v])
    assert torch.equal(out[32:72], torch.zeros(40, 2, 16))
    assert torch.equal(dq[32:72], torch.zeros(40, 2, 16))
    assert torch.equal(dk[38:45], torch.zeros(7, 2, 16))
    assert torch.equal(dv[38:45], torch.zeros(7, 2, 16))
    cut_q, cut_k = [*range(32), 72], list(range(38))
    expected = reference(q[cut_q], k[cut_k], v[cut_k], offsets_of([2, 30, 1]), offsets_of([5, 33, 0]), max_q=30, max_k=33)
    assert_close(out[cut_q], expected, bound=1e-6)


def test_tokens_outside_every_row_are_zero():
    q, k, v = (torch.randn(9, 2, 16, requires_grad=True) for _ in range(3))
    offsets = offsets_of([2, 3])
    with poisoned_memory():
        out, dq, dk, dv = results(launch.gdpa, (q, k, v, offsets, offsets), {"max_q": 3, "max_k": 3}, [q, k, v])
    for tensor in (out, dq, dk, dv):
        assert torch.equal(tensor[5:], torch.zeros(4, 2, 16))


def test_offsets_that_point_outside_are_held_inside_the_tensor():
    q = torch.randn(6, 1, 16)
    bad = torch.tensor([0, 4, 900])
    out = launch.gdpa(q, q, q, bad, bad, max_q=600, max_k=600)
    assert_close(out, reference(q, q, q, offsets_of([4, 2]), offsets_of([4, 2]), max_q=4, max_k=4), bound=1e-6)


@pytest.mark.parametrize("maxima", [{"max_q": 0, "max_k": 3}, {"max_q": 3, "max_k": 0}])
def test_nothing_to_attend_to_gives_zeros(maxima):
    arguments, _ = draw([3], [3])
    for tensor in results(launch.gdpa, arguments, maxima, list(arguments[:3])):
        assert not tensor.any()


def test_only_the_gradients_that_are_wanted_are_computed():
    arguments, options = draw([5, 3])
    q, k, v = arguments[:3]
    kernels = call._kernels()
    for wanted, unused in ((q, "key_grad_kernel"), (v, "query_grad_kernel")):
        inputs = [t if t is wanted else t.detach() for t in (q, k, v)]
        with patch.object(kernels, unused, None):
            (gradient,) = torch.autograd.grad(launch.gdpa(*inputs, *arguments[3:], **options).sum(), [wanted])
        assert gradient.abs().sum() > 0


def test_second_derivatives_are_refused_not_wrong():
    arguments, options = draw([3])
    out = launch.gdpa(*arguments, **options)
    (first,) = torch.autograd.grad(out.square().sum(), [arguments[0]], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), [arguments[1]])


# ---- what is refused ------------------------------------------------------------------------------------------------------------------


def test_bf16_is_refused_under_the_interpreter():
    arguments, options = draw([3], dtype=torch.bfloat16)
    with pytest.raises(KernelUnavailable, match="interpreter computes bf16 products wrongly"):
        launch.gdpa(*arguments, **options)
    with pytest.raises(KernelUnavailable, match=r"bf16 .* interpreter"):
        public(*arguments, **options, backend="triton")
    request = KernelRequest(op="gdpa", device="interpreter", dtype="bf16", head_dim=16)
    assert "bf16" in check(request)[0]
    assert check(KernelRequest(op="gdpa", device="cuda", dtype="bf16", head_dim=256)) == []


def test_head_sizes_beyond_the_limit_are_refused():
    assert "head size 320 is above 256" in check(KernelRequest(op="gdpa", device="cuda", dtype="bf16", head_dim=320))
    arguments, options = draw([3], v_dim=257)
    with pytest.raises(KernelUnavailable, match="head size 257"):
        launch.gdpa(*arguments, **options)


def test_mixed_or_unknown_dtypes_are_refused():
    (q, k, v, a, b), options = draw([3])
    with pytest.raises(KernelUnavailable, match="same dtype"):
        launch.gdpa(q, k.half(), v, a, b, **options)
    with pytest.raises(KernelUnavailable, match="float64"):
        launch.gdpa(q.double(), k.double(), v.double(), a, b, **options)


def test_an_unknown_scale_position_is_refused():
    arguments, options = draw([3])
    with pytest.raises(RequestError, match="scale_position='outside'"):
        launch.gdpa(*arguments, **options, scale_position="outside")


def test_cpu_tensors_without_the_interpreter_are_refused():
    arguments, options = draw([3])
    with patch.object(host, "interpreted", lambda: False), pytest.raises(MachineError, match="TRITON_INTERPRET=1"):
        launch.gdpa(*arguments, **options)


# ---- registration ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "window"), [(False, 2), (True, None)])
def test_opcheck(shared, window):
    (q, k, v, offsets, _), _ = draw([4, 7], heads=1)
    q = torch.randn(3, 1, 16, requires_grad=True) if shared else q
    settings = (3 if shared else 7, 7, "gelu", 0.5, False, window, "triton")
    tensors = (q, k, v, None if shared else offsets, offsets)
    opcheck(torch.ops.gem_kernels.gdpa.default, (*tensors, *settings))
    detached = tuple(t.detach() if t is not None else None for t in tensors)
    dout = torch.randn(6 if shared else 11, 1, 16)
    opcheck(torch.ops.gem_kernels.gdpa_query_grad.default, (dout, *detached, *settings))
    opcheck(torch.ops.gem_kernels.gdpa_key_grad.default, (dout, *detached, *settings))


def test_opcheck_dense_keys():
    (q, _, _, offsets, _), _ = draw([4, 7], heads=2)
    k, v = (torch.randn(2, 5, 1, 16, requires_grad=True) for _ in range(2))
    opcheck(torch.ops.gem_kernels.gdpa.default, (q, k, v, offsets, None, 7, 5, "silu", 1.0, True, None, "triton"))


def test_opcheck_goes_red_on_a_wrong_shape_function():
    """The planted fault: an output that the shape function describes wrongly."""

    @torch.library.custom_op("gem_kernels_test::wrong", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape)

    wrong.register_fake(lambda x: x.new_empty(x.shape[0] + 1))
    with pytest.raises(Exception, match=r"(?i)shape|size|fake"):
        opcheck(wrong, (torch.zeros(3),))


def test_a_compiler_sees_one_op():
    arguments, options = draw([4, 0, 7])
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda *a: launch.gdpa(*a, **options) * 2, backend=backend, fullgraph=True)
    assert_close(compiled(*arguments), 2 * launch.gdpa(*arguments, **options), bound=0.0)
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in calls if "gdpa" in name] == ["gem_kernels.gdpa.default"]
    torch._dynamo.reset()


def test_a_surrounding_autocast_does_not_change_the_result():
    arguments, options = draw([4, 0, 7], heads=1)
    plain = results(launch.gdpa, arguments, options, list(arguments[:3]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = launch.gdpa(*arguments, **options)
    assert torch.equal(out, plain[0])


# ---- FLOPs ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 3])
def test_flops_are_counted_by_real_lengths(window):
    q_lengths, k_lengths = [3, 0, 9, 2], [4, 5, 7, 0]
    arguments, options = draw(q_lengths, k_lengths, heads=4, kv_heads=2, dim=16, v_dim=32)
    pairs = sum(
        1 for q, k in zip(q_lengths, k_lengths, strict=True) for i in range(q) for j in range(k) if window is None or abs(i + k - q - j) <= window
    )
    forward = 2 * 4 * (16 + 32) * pairs
    with FlopCounterMode(display=False) as counter:
        out = launch.gdpa(*arguments, **options, window=window)
    assert counter.get_total_flops() == forward == flops(q_lengths=q_lengths, k_lengths=k_lengths, heads=4, dim=16, v_dim=32, window=window)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * forward


def test_flops_of_a_shared_query_over_dense_keys():
    q, k = torch.randn(3, 2, 16), torch.randn(4, 5, 2, 16)
    with FlopCounterMode(display=False) as counter:
        launch.gdpa(q, k, k, None, None, max_q=3, max_k=5)
    assert counter.get_total_flops() == 4 * 2 * 16 * 4 * 3 * 5


def test_flops_without_data_are_bounded_by_the_longest_row():
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments, options = draw([3, 1])
    mode = FakeTensorMode()
    arguments = [mode.from_tensor(t.detach()) for t in arguments]
    with mode, FlopCounterMode(display=False) as counter:
        launch.gdpa(*arguments, **options)
    assert counter.get_total_flops() == 4 * 2 * 16 * 2 * 3 * 3


# ---- numbers that are shared with the reference ---------------------------------------------------------------------------------------


def test_every_activation_of_the_contract_is_there():
    from gem_kernels.plugin import _GDPA_FEATURES

    assert {f"act_{name}" for name in ACTIVATIONS} <= set(_GDPA_FEATURES)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_and_slopes_of_activations(name):
    """One key of value one: the output is f(q k), and its gradient is the slope, over the whole range including the joints."""
    x = torch.linspace(-6, 6, 101)
    q = torch.zeros(101, 1, 16).index_fill_(2, torch.tensor([0]), 1.0) * x[:, None, None]
    q.requires_grad_()
    one = torch.zeros(1, 1, 16)
    one[..., 0] = 1
    out = launch.gdpa(q, one, one, offsets_of([101]), offsets_of([1]), max_q=101, max_k=1, activation=name)
    (slope,) = torch.autograd.grad(out[..., 0].sum(), [q])
    exact = x.double().requires_grad_()
    value = ACTIVATIONS[name](exact)
    (expected,) = torch.autograd.grad(value.sum(), [exact])
    assert_close(out[:, 0, 0], value, bound=1e-6)
    assert_close(slope[:, 0, 0], expected, bound=2e-6)


def test_gelu_of_16_bit_inputs_stays_within_its_stated_error():
    """Computed here on float32 inputs, so that their rounding does not hide it."""
    x = torch.cat([torch.linspace(-6, 6, 401), torch.tensor([-30.0, 30.0])])
    q = torch.zeros(403, 1, 16)
    q[:, 0, 0] = x
    q.requires_grad_()
    one = torch.zeros(1, 1, 16)
    one[..., 0] = 1
    with patch.object(call, "kernel_activation", lambda activation, dtype: "gelu_16bit"):
        out = launch.gdpa(q, one, one, offsets_of([403]), offsets_of([1]), max_q=403, max_k=1)
        (slope,) = torch.autograd.grad(out[..., 0].sum(), [q])
    exact = x.double().requires_grad_()
    value = torch.nn.functional.gelu(exact)
    (expected,) = torch.autograd.grad(value.sum(), [exact])
    assert 1e-5 < float((out[:, 0, 0] - value).detach().abs().max()) < 7.6e-5
    assert 1e-5 < float((slope[:, 0, 0] - expected).abs().max()) < 1.9e-4


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "gelu_16bit"), (torch.float32, "gelu"), (torch.bfloat16, "gelu_bf16")])
def test_each_dtype_gets_the_gelu_that_it_needs(dtype, name):
    assert call.kernel_activation("gelu", dtype) == name
    assert call.kernel_activation("relu", dtype) == "relu"


def test_gelu_of_bfloat16_is_as_close_as_stated_before_the_hardware_rounds_tanh():
    """The formula of the kernel, with an exact tanh: the kernel itself needs the hardware's."""
    from gem_kernels.common.activations import U1, U3

    x = torch.linspace(-40, 40, 16001, dtype=torch.float64)
    tanh = (x * (U1.value + U3.value * x * x)).tanh()
    value = 0.5 * x * (1 + tanh)
    slope = 0.5 * (1 + tanh) + 0.5 * (1 - tanh**2) * x * (U1.value + 3 * U3.value * x * x)
    exact = x.clone().requires_grad_()
    (true_slope,) = torch.autograd.grad(torch.nn.functional.gelu(exact).sum(), [exact])
    assert 2e-4 < float((value - torch.nn.functional.gelu(x)).abs().max()) < 2.8e-4
    assert float((slope - true_slope).abs().max()) < 8.8e-4


def test_gelu_fast_is_the_polynomial_and_stays_near_gelu():
    x = torch.linspace(-5, 5, 301)
    q = (torch.eye(16)[0] * x[:, None])[:, None, :]
    one = torch.eye(16)[None, :1]
    fast, exact = (
        launch.gdpa(q, one, one, offsets_of([301]), offsets_of([1]), max_q=301, max_k=1, activation=a)[:, 0, 0] for a in ("gelu_fast", "gelu")
    )
    assert 1e-4 < float((fast - exact).abs().max()) < 7.8e-3
    steps = [float(b - a) for a, b in pairwise(fast)]
    assert max(map(math.fabs, steps)) < 0.05, "no jump where the polynomial ends"


# ---- planted faults: the comparisons above go red -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ({"window": None}, {"window": 2}),
        ({"activation": "gelu_tanh"}, {"activation": "gelu"}),
        ({"scale_position": "inside"}, {"scale": 0.5, "scale_position": "after"}),
        ({"max_q": 19, "max_k": 19}, {}),
    ],
    ids=lambda value: str(value),
)
def test_a_planted_fault_is_noticed(fault, options):
    arguments, limits = draw([3, 20])
    real = launch.gdpa
    with patch.object(launch, "gdpa", lambda *a, **o: real(*a, **{**o, **fault})), pytest.raises(AssertionError):
        compare(arguments, {**limits, **options})
