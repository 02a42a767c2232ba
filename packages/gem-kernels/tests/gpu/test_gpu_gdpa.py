"""The Triton gdpa on CUDA: head sizes, long rows, views, cut rows, determinism, addresses beyond 32 bits, and what is compiled."""

import pytest
import torch

from gem_core.ops import gdpa
from gem_core.ops.gdpa import reference
from gem_core.testing import assert_as_accurate, assert_close, plain_precision, poisoned_memory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

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


def triton(*arguments, **options):
    return gdpa(*arguments, **options, backend="triton")


def compare(arguments, options, wanted=None):
    """Hold the kernel to the accuracy of plain torch in the same dtype, forward and gradients, with poisoned memory."""
    wanted = list(arguments[:3]) if wanted is None else wanted
    exact = [t.detach().double().requires_grad_() for t in arguments[:3]]
    truth = results(reference, (*exact, *arguments[3:]), options, exact)
    with plain_precision():
        plain = results(reference, arguments, options, wanted)
    with poisoned_memory():
        actual = results(triton, arguments, options, wanted)
    for name, a, p, t in zip(("output", "dq", "dk", "dv"), actual, plain, truth, strict=True):
        assert_as_accurate(a, p, t.view(a.shape), what=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("dim", [16, 32, 64, 128, 256])
def test_head_sizes(dim, dtype):
    compare(*draw([1, 0, 200, 65], dim=dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize(("dim", "v_dim"), [(96, 40), (8, 128)])
def test_head_sizes_that_are_not_powers_of_two(dim, v_dim, dtype):
    compare(*draw([70, 0, 3], dim=dim, v_dim=v_dim, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_rows_long_enough_for_the_large_tiles(dtype):
    arguments, options = draw([1500, 7, 0, 600], [300, 1100, 5, 1], heads=4, kv_heads=2, dim=128, dtype=dtype)
    compare(arguments, options)
    compare(arguments, {**options, "window": 100, "activation": "silu"})


def test_a_row_of_100_000_tokens():
    """The reference cannot hold its scores: each query is compared with a float64 sum over the keys, for a sample of queries."""
    length, dim = 100_000, 64
    g = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (torch.randn(length + 3, 1, dim, device="cuda", dtype=torch.bfloat16, generator=g).requires_grad_() for _ in range(3))
    offsets = offsets_of([3, length])
    out = triton(q, k, v, offsets, offsets, max_q=length, max_k=length, scale=0.125)
    sample = torch.tensor([3, 4, 5003, 64_000, 99_999, length + 2], device="cuda")
    scores = q.detach()[sample, 0].double() @ k.detach()[3:, 0].double().T * 0.125
    expected = torch.nn.functional.gelu(scores) @ v.detach()[3:, 0].double()
    assert_close(out[sample, 0], expected, bound=1e-2)
    dout = torch.zeros_like(out)
    dout[sample] = 1
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    weights = torch.nn.functional.gelu(scores)
    assert_close(dv[3:, 0], weights.sum(0)[:, None].expand(-1, dim), bound=1e-2)
    cdf = 0.5 + 0.5 * torch.erf(scores / 2**0.5)
    slope = cdf + scores * torch.exp(-scores.square() / 2) / (2 * torch.pi) ** 0.5
    ds = slope * v.detach()[3:, 0].double().sum(-1)[None] * 0.125
    assert_close(dq[sample, 0], ds @ k.detach()[3:, 0].double(), bound=1e-2)
    assert_close(dk[3:, 0], ds.T @ q.detach()[sample, 0].double(), bound=1e-2)
    assert not dq[0].any()


def test_case_C08_addresses_beyond_32_bits():
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
        out = triton(q, q, q, offsets, offsets, max_q=length, max_k=length, scale=0.1)
    own = q.detach()[tail].clone().requires_grad_()
    one = offsets_of([length])
    alone = triton(own, own, own, one, one, max_q=length, max_k=length, scale=0.1)
    assert torch.equal(out[tail], alone)
    assert not out[:length].any()
    del out
    out = triton(q, q.detach(), q.detach(), offsets, offsets, max_q=length, max_k=length, scale=0.1)
    dout = torch.zeros_like(out)
    dout[tail] = 1
    (dq,) = torch.autograd.grad(out, [q], dout)
    kept = own.detach()
    small = own.detach().clone().requires_grad_()
    (expected,) = torch.autograd.grad(triton(small, kept, kept, one, one, max_q=length, max_k=length, scale=0.1), [small], torch.ones_like(alone))
    assert torch.equal(dq[tail], expected)
    assert not dq[: tokens - length].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_views_of_a_fused_buffer(dtype):
    offsets = offsets_of([4, 0, 135])
    fused = torch.randn(139, 2, 192, device="cuda").to(dtype).requires_grad_()
    q, k, v = fused.split(64, dim=-1)
    compare((q, k, v, offsets, offsets), {"max_q": 135, "max_k": 135}, [q, k, v])


def test_heads_before_tokens_are_read_by_stride():
    offsets = offsets_of([40, 100])
    q, k, v = (torch.randn(2, 140, 64, device="cuda").bfloat16().transpose(0, 1).requires_grad_() for _ in range(3))
    compare((q, k, v, offsets, offsets), {"max_q": 100, "max_k": 100})


def test_case_B08_rows_beyond_the_maximum_give_zeros():
    (q, k, v, q_offsets, k_offsets), _ = draw([2, 400, 1], [5, 300, 0])
    with poisoned_memory():
        out, dq, dk, dv = results(triton, (q, k, v, q_offsets, k_offsets), {"max_q": 130, "max_k": 140}, [q, k, v])
    for tensor, first, last in ((out, 132, 402), (dq, 132, 402), (dk, 145, 305), (dv, 145, 305)):
        assert not tensor[first:last].any()
    cut_q, cut_k = [*range(132), 402], list(range(145))
    expected = reference(q[cut_q], k[cut_k], v[cut_k], offsets_of([2, 130, 1]), offsets_of([5, 140, 0]), max_q=130, max_k=140)
    assert_close(out[cut_q], expected, bound=1e-2)


@pytest.mark.parametrize("shared", [False, True])
def test_repeats_to_the_bit(shared):
    lengths = torch.randint(0, 300, (700,), generator=torch.Generator().manual_seed(0)).tolist()
    (q, k, v, offsets, _), options = draw(lengths, heads=4, kv_heads=2, dim=64)
    if shared:
        q = torch.randn(40, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        options["max_q"] = 40
    arguments = (q, k, v, None if shared else offsets, offsets)
    first = results(triton, arguments, options, [q, k, v])
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, results(triton, arguments, options, [q, k, v]), strict=True))


def test_no_step_synchronises_with_the_host():
    arguments, options = draw([100, 0, 300])
    results(triton, arguments, options, list(arguments[:3]))
    out_like = torch.ones(400, 2, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(triton(*arguments, **options), arguments[:3], out_like)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_in_a_cuda_graph():
    arguments, options = draw([100, 0, 300])
    with torch.no_grad():
        expected = triton(*arguments, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = triton(*arguments, **options)
        out.zero_()
        graph.replay()
    assert torch.equal(out, expected)


def test_torch_compile_agrees():
    arguments, options = draw([100, 0, 300])

    def step(*a):
        return triton(*a, **options) * 2

    compiled = torch.compile(step)
    for a, b in zip(results(compiled, arguments, {}, list(arguments[:3])), results(step, arguments, {}, list(arguments[:3])), strict=True):
        assert_close(a, b, bound=1e-2)


def test_case_I06_fifty_batch_shapes_compile_a_bounded_number_of_kernels():
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
            arguments, options = draw(lengths, heads=2, dim=32, dtype=torch.float16)
            results(triton, arguments, {**options, "activation": "hardswish"}, list(arguments[:3]))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert 1 <= len(compiled) <= 6, compiled


def test_half_precision_is_as_close_to_float64_as_it_should_be():
    """An absolute figure beside the relative ones: 5e-3 of the largest value."""
    arguments, options = draw([1000, 3], heads=4, dim=128)
    exact = [t.detach().double().requires_grad_() for t in arguments[:3]]
    options = {**options, "scale": 128**-0.5}
    for ours, truth in zip(
        results(triton, arguments, options, list(arguments[:3])), results(reference, (*exact, *arguments[3:]), options, exact), strict=True
    ):
        assert_close(ours, truth, bound=5e-3)


def test_another_current_device_does_not_matter():
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    arguments, options = draw([70, 3])
    moved = [t.detach().to("cuda:1") for t in arguments]
    assert_close(triton(*moved, **options), triton(*arguments, **options), bound=0.0)
