"""Thousands of short tiles one after another: a Hopper kernel that hands memory on too early is wrong in some of them, in others each time."""

import pytest
import torch

from gem_core.ops import gdpa, hstu_attention, jagged_attention, pffn, pooled_attention

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="no Hopper GPU")]

ROWS, HEADS, DIM, LONGEST = 1024, 8, 128, 1024
TURNS = 6


def lengths():
    """Lognormal, of 70 on average: most rows are one tile or a part of it, some are many."""
    draw = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
    return (1.04 * draw + 3.7).exp().round().clamp(0, LONGEST).long()


def leaf(*shape):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(len(shape) + shape[0]), device="cuda").bfloat16().requires_grad_()


def attention(op, *, keys=None, **options):
    """The op over all rows, self or to so many keys of each row, and its leaves."""
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths().cumsum(0)]).cuda()
    tokens = int(offsets[-1])
    if op is hstu_attention:
        q, k, v = (leaf(tokens, HEADS, DIM) for _ in range(3))
        return (lambda backend: op(q, k, v, offsets, max_length=LONGEST, backend=backend, **options)), (q, k, v)
    if op is pooled_attention:
        q, k, v = leaf(ROWS, keys, HEADS, DIM), leaf(tokens, HEADS, DIM), leaf(tokens, HEADS, DIM)
        return (lambda backend: op(q, k, v, offsets, max_k=LONGEST, backend=backend)), (q, k, v)
    q = leaf(tokens, HEADS, DIM)
    if keys is None:
        k, v = leaf(tokens, HEADS, DIM), leaf(tokens, HEADS, DIM)
        return (lambda backend: op(q, k, v, offsets, offsets, max_q=LONGEST, max_k=LONGEST, backend=backend, **options)), (q, k, v)
    k, v = leaf(ROWS, keys, HEADS, DIM), leaf(ROWS, keys, HEADS, DIM)
    if op is pffn:
        return (lambda backend: op(q, k, v, offsets, max_q=LONGEST, scale=DIM**-0.5, backend=backend)), (q, k, v)
    if op is jagged_attention:
        k_offsets = torch.arange(ROWS + 1, device="cuda") * keys
        k, v = leaf(ROWS * keys, HEADS, DIM), leaf(ROWS * keys, HEADS, DIM)
        return (lambda backend: op(q, k, v, offsets, k_offsets, max_q=LONGEST, max_k=keys, backend=backend, **options)), (q, k, v)
    return (lambda backend: op(q, k, v, offsets, None, max_q=LONGEST, max_k=keys, scale=DIM**-0.5, backend=backend)), (q, k, v)


CALLS = {
    "gdpa-64": (gdpa, {"keys": 64}),
    "gdpa-128": (gdpa, {"keys": 128}),
    "gdpa-256": (gdpa, {"keys": 256}),
    "pffn-128": (pffn, {"keys": 128}),
    "jagged-64": (jagged_attention, {"keys": 64}),
    "jagged-128": (jagged_attention, {"keys": 128}),
    "jagged-self": (jagged_attention, {}),
    "jagged-causal": (jagged_attention, {"causal": True}),
    "hstu": (hstu_attention, {}),
    "hstu-window": (hstu_attention, {"window": 60}),
    "hstu-all": (hstu_attention, {"causal": False}),
    "pooled-32": (pooled_attention, {"keys": 32}),
    "pooled-64": (pooled_attention, {"keys": 64}),
    "pooled-128": (pooled_attention, {"keys": 128}),
}


def found(call, leaves, backend):
    out = call(backend)
    dout = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("name", CALLS)
def test_case_B03_every_tile_of_many_short_rows_is_right_each_time(name):
    op, options = CALLS[name]
    call, leaves = attention(op, **options)
    first = found(call, leaves, "gluon")
    for part, mine, other in zip(("out", "q", "k", "v"), first, found(call, leaves, "triton"), strict=True):
        # a tile that is wrong is so by the size of its values; rounding is a hundredth of them at most
        off = (mine.float() - other.float()).abs().max() / other.float().abs().max()
        assert float(off) < 0.03, f"{part} by {float(off):.3f} of the largest"
    for _ in range(TURNS):
        for part, mine, again in zip(("out", "q", "k", "v"), first, found(call, leaves, "gluon"), strict=True):
            assert torch.equal(mine, again), f"{part} of another call has other bits in {int((mine != again).any(-1).sum())} places"
