"""hstu_attention and pooled_attention on CUDA: head sizes, rows long enough for the large tiles, one row of 100,000 tokens."""

import pytest
import torch

from gem_core.ops import hstu_attention, pooled_attention
from gem_core.testing import assert_close
from gem_kernels.bench.measure import wrong
from gem_kernels.bench.workloads import Workload
from gem_kernels.ops.pooled_attention.hopper import gluon

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = (700, 0, 65, 1)


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64, device="cuda").cumsum(0)


def leaf(*shape, dtype):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype).requires_grad_()


def by_triton(op):
    return lambda first, **options: op(first, **options, backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_head_sizes(dim, dtype):
    offsets = offsets_of(LENGTHS)
    qkv = {name: leaf(766, 2, dim, dtype=dtype) for name in ("q", "k", "v")}
    mask = {"contextual": torch.tensor([3, 0, 1, 0], device="cuda"), "targets": torch.tensor([9, 0, 2, 0], device="cuda"), "window": 300}
    for options in ({}, {"causal": False}, mask):
        work = Workload("hstu_attention", {**qkv, "offsets": offsets, "max_length": 700, "norm_length": 8, **options}, 0, 0.0)
        assert wrong(by_triton(hstu_attention), work) is None
    seeds = leaf(40, 2, dim, dtype=dtype)
    work = Workload("pooled_attention", {"seeds": seeds, "k": qkv["k"], "v": qkv["v"], "k_offsets": offsets, "max_k": 700}, 0, 0.0)
    assert wrong(by_triton(pooled_attention), work) is None


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seeds", [33, 64, 65, 128])
def test_seeds_of_each_row_by_the_kernel_of_all_gradients(seeds, dim, dtype):
    """Keys and values lie in one tensor, a row is cut, one has no keys, and there are more items than programs. Scores of about -300 overflow where
    what lies past a row's end is not hidden."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("made for Hopper")
    lengths = (700, 0, 65, 1, 128, *range(1, 120))
    tokens, heads = sum(lengths) + 9, 3
    kv = leaf(tokens, 2, heads, dim, dtype=dtype).detach()
    for low in (0.0, -300.0):
        own = leaf(len(lengths), seeds, heads, dim, dtype=dtype).detach()
        k = kv[:, 0].clone()
        if low:
            own[..., 0], k[..., 0] = low * dim**0.5 / 16, 16.0
        both = torch.stack((k, kv[:, 1]), 1)
        given = {"seeds": own.requires_grad_(), "k": both[:, 0].requires_grad_(), "v": both[:, 1].requires_grad_(), "k_offsets": offsets_of(lengths)}
        work = Workload("pooled_attention", {**given, "max_k": 600}, 0, 0.0)
        assert wrong(gluon, work) is None


def test_a_pooled_row_of_100_000_tokens_is_split_and_right():
    k, v = (leaf(100_003, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    seeds = leaf(4, 1, 64, dtype=torch.bfloat16)
    out = pooled_attention(seeds, k, v, offsets_of([3, 100_000]), max_k=100_000, backend="triton")
    scores = seeds.detach()[:, 0].double() @ k.detach()[3:, 0].double().T / 8
    assert_close(out[1, :, 0], scores.softmax(-1) @ v.detach()[3:, 0].double(), bound=2e-2)


def test_an_hstu_row_of_100_000_tokens():
    """A window keeps what the comparison has to hold small."""
    q, k, v = (leaf(100_003, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    out = hstu_attention(q, k, v, offsets_of([3, 100_000]), max_length=100_000, window=64, norm_length=1, backend="triton")
    last = slice(100_003 - 65, 100_003)
    scores = torch.nn.functional.silu(k.detach()[last, 0].double() @ q.detach()[-1, 0].double() / 8)
    assert_close(out[-1, 0], scores @ v.detach()[last, 0].double(), bound=2e-2)
