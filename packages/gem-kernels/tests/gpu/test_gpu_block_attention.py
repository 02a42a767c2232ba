"""Block attention on CUDA: head sizes, blocks, rotation over long rows, addresses beyond 32 bits, and what is compiled."""

import pytest
import torch

from gem_core.ops.block_attention import reference
from gem_core.testing import assert_as_accurate, plain_precision, poisoned_memory
from gem_kernels.ops.block_attention.launch import block_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64, device="cuda").cumsum(0)


def results(function, arguments, options, wanted):
    out = function(*arguments, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device="cuda").view(out.shape).to(out.dtype)
    return (out.detach(), *torch.autograd.grad(out, wanted, upstream))


def drawn(lengths, *, heads=2, dim=128, v_dim=None, dtype=torch.bfloat16):
    """Leaves q, k and v, and offsets."""
    g = torch.Generator().manual_seed(0)
    widths = (dim, dim, v_dim or dim)
    return [torch.randn(sum(lengths), heads, d, generator=g).to("cuda", dtype).requires_grad_() for d in widths], offsets_of(lengths)


def compare(lengths, *, heads=2, dim=128, v_dim=None, dtype=torch.bfloat16, rope=False, **options):
    """Hold the kernel to the accuracy of plain torch in the same dtype, forward and gradients, with poisoned memory."""
    g = torch.Generator().manual_seed(1)
    tokens = sum(lengths)
    leaves, offsets = drawn(lengths, heads=heads, dim=dim, v_dim=v_dim, dtype=dtype)
    options = {"max_length": max(lengths), **options}
    exact = [t.detach().double().requires_grad_() for t in leaves]
    turns = None
    if rope:
        turns = (torch.arange(tokens, device="cuda")[:, None] * torch.rand(dim // 2, generator=g).cuda()).float()
    truth = results(reference, (*exact, offsets), {**options, "rope": None if turns is None else turns.double()}, exact)
    options["rope"] = turns
    with plain_precision():
        plain = results(reference, (*leaves, offsets), options, leaves)
    with poisoned_memory():
        actual = results(block_attention, (*leaves, offsets), options, leaves)
    for name, a, p, t in zip(("output", "dq", "dk", "dv"), actual, plain, truth, strict=True):
        assert_as_accurate(a, p, t, what=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("dim", "block"), [(32, 64), (64, 64), (128, 64), (128, 128), (96, 100), (128, 20)])
def test_head_sizes_and_blocks(dim, block, dtype):
    if dtype is torch.float32 and block > 64:
        pytest.skip("float32 blocks end at 64")
    compare([1, 0, 700, 65, 128], dim=dim, block=block, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("on_v", [False, True])
def test_rotation_by_positions_of_a_long_row(dtype, on_v):
    compare([3, 20_000, 0, 65], rope=True, rope_on_v=on_v, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 8},
        {"heads": 3, "dim": 64},
        {"dim": 64, "v_dim": 128},
        {"block": 20},
        {"block": 7, "heads": 4},
        {"max_length": 90},
    ],
    ids=str,
)
def test_turned_heads_of_rows_of_any_length(options, dtype):
    compare([0, 1, 64, 65, 700, 0, 3, 128, 63], rope=True, dtype=dtype, **options)


@pytest.mark.parametrize("rope", [False, True])
def test_normed_heads_give_gradients_of_gains(rope):
    (q, k, v), offsets = drawn([130, 0, 1, 300], heads=8)
    gains = {name: torch.linspace(0.5, 1.5, 128, device="cuda").bfloat16().requires_grad_() for name in ("q_gain", "k_gain")}
    turns = torch.rand(431, 64, device="cuda") * 100 if rope else None
    leaves = [q, k, v, *gains.values()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    wide = {"max_length": 300, "rope": None if turns is None else turns.double(), "q_gain": exact[3], "k_gain": exact[4]}
    truth = results(reference, (*exact[:3], offsets), wide, exact)
    options = {"max_length": 300, "rope": turns, **gains}
    with plain_precision():
        plain = results(reference, (q, k, v, offsets), options, leaves)
    with poisoned_memory():
        actual = results(block_attention, (q, k, v, offsets), options, leaves)
    for name, a, p, t in zip(("output", "dq", "dk", "dv", *gains), actual, plain, truth, strict=True):
        assert_as_accurate(a, p, t, what=name)


def test_the_same_call_gives_the_same_bits():
    """Over more tiles than programs run at once; a step that some warp does not wait for would show."""
    lengths = [(37 * r) % 900 for r in range(500)]
    (q, k, v), offsets = drawn(lengths, heads=8)
    options = {"max_length": max(lengths), "rope": torch.rand(sum(lengths), 64, device="cuda") * 100}
    first = results(block_attention, (q, k, v, offsets), options, [q, k, v])
    for _ in range(5):
        again = results(block_attention, (q, k, v, offsets), options, [q, k, v])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_case_C08_addresses_beyond_32_bits():
    """More than 2^31 elements a tensor: the last row must read and write its own memory."""
    heads, dim, length = 8, 128, 2048
    rows = 2**31 // (heads * dim * length) + 2
    tokens = rows * length
    offsets = torch.arange(rows + 1, device="cuda") * length
    q = torch.zeros(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    tail = slice(tokens - length, tokens)
    q[tail] = torch.randn(length, heads, dim, device="cuda").bfloat16()
    q.requires_grad_()
    out = block_attention(q, q.detach(), q.detach(), offsets, max_length=length)
    own = q.detach()[tail].clone().requires_grad_()
    alone = block_attention(own, own.detach(), own.detach(), offsets_of([length]), max_length=length)
    assert torch.equal(out.detach()[tail], alone.detach())
    upstream = torch.zeros_like(out)
    upstream[tail] = 1
    (dq,) = torch.autograd.grad(out, [q], upstream)
    (expected,) = torch.autograd.grad(alone, [own], torch.ones_like(alone))
    assert torch.equal(dq[tail], expected)
    assert not dq[: tokens - length].any()


def test_case_I06_lengths_and_batch_sizes_compile_nothing_new():
    from gem_kernels.ops.block_attention import triton as kernels

    def compiled():
        return sum(len(cache[0]) for cache in kernels.forward_kernel.device_caches.values())

    def call(rows):
        lengths = [(7 * r) % 90 + 1 for r in range(rows)]
        q = torch.randn(sum(lengths), 2, 64, device="cuda", dtype=torch.bfloat16)
        block_attention(q, q, q, offsets_of(lengths), max_length=max(lengths))

    call(2)
    before = compiled()
    for rows in range(1, 50):
        call(rows)
    assert compiled() - before <= 1
