"""gdpa and jagged_attention on CUDA: head sizes, long rows, views, cut rows, determinism, addresses beyond 32 bits, and what is compiled."""

import importlib

import pytest
import torch

from gem_core import ops
from gem_core.testing import assert_as_accurate, assert_close, plain_precision, poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GLUON_DIMS = (64, 128)
OPS = ["gdpa", "jagged_attention"]
BACKENDS = ["triton", "gluon"]


class Kernel:
    """The op and backend under test, with the op's reference."""

    def __init__(self, op, backend):
        self.op, self.backend = op, backend
        self.reference = importlib.import_module(f"gem_core.ops.{op}").reference

    def __call__(self, q, *arguments, **options):
        if self.backend == "gluon" and (q.dtype is torch.float32 or q.shape[-1] not in GLUON_DIMS):
            pytest.skip("gluon takes 16-bit dtypes and head sizes of 64 and 128")
        return getattr(ops, self.op)(q, *arguments, **self.options(options), backend=self.backend)

    def exact(self, *arguments, **options):
        return self.reference(*arguments, **self.options(options))

    def options(self, options):
        return options if self.op == "gdpa" else {name: value for name, value in options.items() if name != "activation"}


@pytest.fixture(params=[(op, backend) for op in OPS for backend in BACKENDS], ids="-".join)
def kernel(request):
    return Kernel(*request.param)


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DTYPE_IDS = ["bf16", "fp16", "fp32"]


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64, device="cuda").cumsum(0)


def draw(q_lengths, k_lengths=None, *, heads=2, kv_heads=None, dim=64, v_dim=None, dtype=torch.bfloat16, seed=0):
    """Leaves q, k, v on the GPU and their offsets; no ``k_lengths`` makes it self-attention."""
    g = torch.Generator().manual_seed(seed)
    k_lengths_here = q_lengths if k_lengths is None else k_lengths
    q_offsets = offsets_of(q_lengths)
    k_offsets = q_offsets if k_lengths is None else offsets_of(k_lengths)
    kv = (sum(k_lengths_here), kv_heads or heads)
    shapes = ((sum(q_lengths), heads, dim), (*kv, dim), (*kv, v_dim or dim))
    q, k, v = (torch.randn(shape, generator=g).to("cuda", dtype).requires_grad_() for shape in shapes)
    return (q, k, v, q_offsets, k_offsets), {"max_q": max(q_lengths), "max_k": max(k_lengths_here)}


def results(function, arguments, options, wanted):
    out = function(*arguments, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cuda").view(out.shape).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, wanted, upstream))


def compare(kernel, arguments, options, wanted=None):
    """Hold the kernel to the accuracy of plain torch in the same dtype, forward and gradients, with poisoned memory."""
    wanted = list(arguments[:3]) if wanted is None else wanted
    exact = [t.detach().double().requires_grad_() for t in arguments[:3]]
    truth = results(kernel.exact, (*exact, *arguments[3:]), options, exact)
    with plain_precision():
        plain = results(kernel.exact, arguments, options, wanted)
    with poisoned_memory():
        actual = results(kernel, arguments, options, wanted)
    for name, a, p, t in zip(("output", "dq", "dk", "dv"), actual, plain, truth, strict=True):
        assert_as_accurate(a, p, t.view(a.shape), what=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_head_sizes(kernel, dim, dtype):
    compare(kernel, *draw([1, 0, 200, 65], dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("dim", "v_dim"), [(96, 40), (8, 128)])
def test_head_sizes_that_are_not_powers_of_two(kernel, dim, v_dim, dtype):
    compare(kernel, *draw([70, 0, 3], dim=dim, v_dim=v_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_long_enough_for_the_large_tiles(kernel, dtype):
    arguments, options = draw([1500, 7, 0, 600], [300, 1100, 5, 1], heads=4, kv_heads=2, dim=128, dtype=dtype)
    compare(kernel, arguments, options)
    compare(kernel, arguments, {**options, "window": 100, "activation": "silu"})


def test_a_row_of_100_000_tokens(kernel):
    """The reference cannot hold its scores: each query is compared with a float64 sum over the keys, for a sample of queries."""
    length, dim = 100_000, 64
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(length + 3, 1, dim, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_() for _ in range(3))
    offsets = offsets_of([3, length])
    out = kernel(q, k, v, offsets, offsets, max_q=length, max_k=length, scale=0.125)
    sample = torch.tensor([3, 4, 5003, 64_000, 99_999, length + 2], device="cuda")
    exact_q, exact_k, exact_v = (t.detach().double().requires_grad_() for t in (q[sample, 0], k[3:, 0], v[3:, 0]))
    scores = exact_q @ exact_k.T * 0.125
    weights = torch.nn.functional.gelu(scores) if kernel.op == "gdpa" else scores.softmax(-1)
    expected = weights @ exact_v
    assert_close(out[sample, 0], expected, bound=1e-2)
    upstream = torch.randn(len(sample), dim, device="cuda", dtype=torch.bfloat16, generator=g)
    dout = torch.zeros_like(out)
    dout[sample, 0] = upstream
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    true_dq, true_dk, true_dv = torch.autograd.grad(expected, (exact_q, exact_k, exact_v), upstream.double())
    assert_close(dq[sample, 0], true_dq, bound=2e-2)
    assert_close(dk[3:, 0], true_dk, bound=2e-2)
    assert_close(dv[3:, 0], true_dv, bound=2e-2)
    assert not dq[0].any()


def test_case_C08_addresses_beyond_32_bits(kernel):
    """More than 2^31 elements a tensor: the last rows must read and write their own memory."""
    heads, dim, length = 8, 128, 2048
    rows = 2**31 // (heads * dim * length) + 2
    tokens = rows * length
    assert tokens * heads * dim > 2**31
    offsets = torch.arange(rows + 1, device="cuda") * length
    q = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    tail = slice(tokens - length, tokens)
    q[tail] = torch.randn(length, heads, dim, device="cuda").bfloat16()
    q.requires_grad_()
    with torch.no_grad():
        out = kernel(q, q, q, offsets, offsets, max_q=length, max_k=length, scale=0.1)
    own = q.detach()[tail].clone().requires_grad_()
    one = offsets_of([length])
    alone = kernel(own, own, own, one, one, max_q=length, max_k=length, scale=0.1)
    assert torch.equal(out[tail], alone)
    assert not out[:length].any()
    del out
    out = kernel(q, q.detach(), q.detach(), offsets, offsets, max_q=length, max_k=length, scale=0.1)
    dout = torch.zeros_like(out)
    dout[tail] = 1
    (dq,) = torch.autograd.grad(out, [q], dout)
    kept = own.detach()
    small = own.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(kernel(small, kept, kept, one, one, max_q=length, max_k=length, scale=0.1), [small], torch.ones_like(alone))
    assert torch.equal(dq[tail], expected)
    assert not dq[: tokens - length].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_views_of_a_fused_buffer(kernel, dtype):
    offsets = offsets_of([4, 0, 135])
    fused = torch.randn(139, 2, 192, device="cuda").to(dtype).requires_grad_()
    q, k, v = fused.split(64, dim=-1)
    compare(kernel, (q, k, v, offsets, offsets), {"max_q": 135, "max_k": 135}, [q, k, v])


def test_heads_before_tokens_are_read_by_stride(kernel):
    offsets = offsets_of([40, 100])
    q, k, v = (torch.randn(2, 140, 64, device="cuda").bfloat16().transpose(0, 1).requires_grad_() for _ in range(3))
    compare(kernel, (q, k, v, offsets, offsets), {"max_q": 100, "max_k": 100})


def test_case_B08_rows_beyond_the_maximum_give_zeros(kernel):
    (q, k, v, q_offsets, k_offsets), _ = draw([2, 400, 1], [5, 300, 0])
    with poisoned_memory():
        out, dq, dk, dv = results(kernel, (q, k, v, q_offsets, k_offsets), {"max_q": 130, "max_k": 140}, [q, k, v])
    for tensor, first, last in ((out, 132, 402), (dq, 132, 402), (dk, 145, 305), (dv, 145, 305)):
        assert not tensor[first:last].any()
    cut_q, cut_k = [*range(132), 402], list(range(145))
    expected = kernel.exact(q[cut_q], k[cut_k], v[cut_k], offsets_of([2, 130, 1]), offsets_of([5, 140, 0]), max_q=130, max_k=140)
    assert_close(out[cut_q], expected, bound=1e-2)


@pytest.mark.parametrize("shared", [False, True])
def test_repeats_to_the_bit(kernel, shared):
    lengths = torch.randint(0, 300, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    (q, k, v, offsets, _), options = draw(lengths, heads=4, kv_heads=2, dim=64)
    if shared:
        q = torch.randn(40, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options["max_q"] = 40
    arguments = (q, k, v, None if shared else offsets, offsets)
    first = results(kernel, arguments, options, [q, k, v])
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(kernel, arguments, options, [q, k, v]), strict=True))


def test_no_step_synchronises_with_the_host(kernel):
    arguments, options = draw([100, 0, 300])
    results(kernel, arguments, options, list(arguments[:3]))
    out_like = torch.ones(400, 2, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(kernel(*arguments, **options), arguments[:3], out_like)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_in_a_cuda_graph(kernel):
    arguments, options = draw([100, 0, 300])
    with torch.no_grad():
        expected = kernel(*arguments, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(*arguments, **options)
        out.zero_()
        graph.replay()
    assert torch.equal(out, expected)


def test_torch_compile_agrees(kernel):
    arguments, options = draw([100, 0, 300])

    def step(*a):
        return kernel(*a, **options) * 2

    compiled = torch.compile(step)
    for a, b in zip(results(compiled, arguments, {}, list(arguments[:3])), results(step, arguments, {}, list(arguments[:3])), strict=True):
        assert_close(a, b, bound=1e-2)


def test_case_I06_fifty_batch_shapes_compile_a_bounded_number_of_kernels(kernel):
    from triton import knobs

    compiled = []

    def seen(*args, **kwargs):
        compiled.append(kwargs.get("repr", "kernel"))
        return False

    generator = torch.Generator().manual_seed(0)
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = seen
    try:
        for _ in range(50):
            rows = int(torch.randint(1, 40, (1,), generator=generator))
            lengths = torch.randint(1, 400, (rows,), generator=generator).tolist()
            arguments, options = draw(lengths, heads=2, dim=32, v_dim=24, dtype=torch.float16)  # no other test compiles these
            results(kernel, arguments, {**options, "activation": "hardswish"}, list(arguments[:3]))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert 1 <= len(compiled) <= 6, compiled


def test_half_precision_is_as_close_to_float64_as_it_should_be(kernel):
    """An absolute figure beside the relative ones: 5e-3 of the largest value; 8e-3 for softmax, whose gradients are differences."""
    arguments, options = draw([1000, 3], heads=4, dim=128)
    exact = [t.detach().double().requires_grad_() for t in arguments[:3]]
    options = {**options, "scale": 128**-0.5}
    for ours, truth in zip(
        results(kernel, arguments, options, list(arguments[:3])), results(kernel.exact, (*exact, *arguments[3:]), options, exact), strict=True
    ):
        assert_close(ours, truth, bound=5e-3 if kernel.op == "gdpa" else 8e-3)


def test_another_current_device_does_not_matter(kernel):
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    arguments, options = draw([70, 3])
    moved = [t.detach().to("cuda:1") for t in arguments]
    assert_close(kernel(*moved, **options), kernel(*arguments, **options), bound=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [1.0, -0.25])
def test_gelu_of_bfloat16_is_as_close_as_stated(backend, scale):
    """The hardware's tanh included: one key of value one makes the output f(q k scale), and the gradient of q its slope."""
    from gem_core.ops import gdpa

    x = (torch.cat([torch.linspace(-6, 6, 4001), torch.tensor([-60.0, 60.0])]) / scale).bfloat16()
    q = torch.zeros(len(x), 1, 64, device="cuda", dtype=torch.bfloat16)
    q[:, 0, 0] = x.cuda()
    one = torch.zeros(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    one[..., 0] = 1
    q.requires_grad_()
    out = gdpa(q, one, one, offsets_of([len(x)]), offsets_of([1]), max_q=len(x), max_k=1, scale=scale, backend=backend)
    (dq,) = torch.autograd.grad(out, [q], one.expand(len(x), 1, 64))
    exact = (x.double() * scale).requires_grad_()
    value = torch.nn.functional.gelu(exact)
    (slope,) = torch.autograd.grad(value.sum(), [exact])
    error = (out[:, 0, 0].cpu().double() - value).abs()
    assert bool((error <= 2.8e-4 + exact.abs() * 2**-12 + value.abs() * 2**-8).all())
    rise = exact.abs() * (0.8 + 0.105 * exact**2)  # x u' of gates.py: the slope moves by at most 1/2 + x u' times the error of tanh
    error = (dq[:, 0, 0].cpu().double() / scale - slope).abs()
    assert bool((error <= 8.8e-4 + (0.5 + rise) * 2**-11 + slope.abs() * 2**-8).all())


@pytest.mark.parametrize("op", OPS)
def test_a_shared_query_and_reserved_sms(op, monkeypatch):
    lengths = [40, 0, 700, 3]
    g = torch.Generator().manual_seed(0)
    q = torch.randn(70, 4, 64, generator=g).to("cuda", torch.bfloat16).requires_grad_()
    k, v = (torch.randn(sum(lengths), 2, 64, generator=g).to("cuda", torch.bfloat16).requires_grad_() for _ in range(2))
    arguments, options = (q, k, v, None, offsets_of(lengths)), {"max_q": 70, "max_k": 700}
    for backend in BACKENDS:
        kernel = Kernel(op, backend)
        compare(kernel, arguments, options)
        free = results(kernel, arguments, options, [q, k, v])
        monkeypatch.setenv("GEM_RESERVED_SMS", "130")
        assert all(torch.equal(a, b) for a, b in zip(free, results(kernel, arguments, options, [q, k, v]), strict=True))
        monkeypatch.delenv("GEM_RESERVED_SMS")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [{"causal": True}, {"causal": True, "window": 130}, {"scale": -0.2}, {"scale": 0.0}], ids=str)
def test_softmax_masks_and_scales_on_long_rows(backend, mask):
    arguments, options = draw([300, 1, 0, 515], [700, 90, 4, 100], heads=4, kv_heads=2, dim=128)
    compare(Kernel("jagged_attention", backend), arguments, {**options, **mask})


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp(backend):
    (q, k, v, a, b), options = draw([300, 5, 20], [700, 0, 9], dim=64)
    kernel = Kernel("jagged_attention", backend)
    _, lse = kernel(q, k, v, a, b, **options, causal=True, return_lse=True)
    _, expected = kernel.reference(q.double(), k.double(), v.double(), a, b, **options, causal=True, return_lse=True)
    assert_close(lse, expected, bound=1e-4)
