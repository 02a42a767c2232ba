"""Gradients of hstu_attention with slopes kept between two passes: the plan of its warpgroups on a CPU. What the assembler says, and how it is
launched, is in ``test_hopper_hstu``."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gem_kernels_emulated import Blocks, Late, Pointer, emulate

from gem_core.ops.hstu_attention import reference
from gem_core.testing import assert_close
from gem_kernels.common import activations
from gem_kernels.common.hopper import items, language
from gem_kernels.common.schedule import Layout, tiles
from gem_kernels.ops.hstu_attention import hopper, hopper_key_grad, hopper_query_grad, hopper_slopes, launch

SCALE, NORM = 0.1, 0.25


def seen(s):
    return torch.arange(64)[:, None] <= torch.arange(64)[None, :]


def turned(x):
    """Eight by eight values of each warp, transposed as the hardware does: two of a row are one thread's, who gets two of a column."""
    squares = x.view(4, 4, 8, 4, 2, 2, 2).permute(0, 1, 4, 5, 2, 3, 6).reshape(4, 4, 2, 2, 8, 8)
    return squares.mT.reshape(4, 4, 2, 2, 8, 4, 2).permute(0, 1, 4, 5, 2, 3, 6).reshape(64, 64)


class Records(Pointer):
    """A tile list, of which nobody may read what comes before it."""

    def __add__(self, offset):
        return Records(self.data, self.offset + offset)

    def load(self):
        assert int(self.offset) >= 0
        return super().load()


def but(described, *names):
    return {name: value for name, value in described.items() if name.removesuffix("_desc") not in names}


def emulated(lengths, heads, width, longest, programs=2, long=0, **replaced):
    """``(dq, dk, dv)``, with slopes of rows of ``long`` tokens or more, and the tensors that they are gradients of and for."""
    generator = torch.Generator().manual_seed(sum(lengths))
    q, k, v, dout = (torch.randn(sum(lengths), heads, width, generator=generator).bfloat16() for _ in range(4))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    call = launch._Inputs(q, k, v, offsets, None, None, None, longest, SCALE, NORM, True, None, True)
    blocks, squares = hopper._squares(call)
    found = tiles(Layout(offsets, offsets, len(lengths), longest, longest, q.shape[0], q.shape[0], q.device), "q", 128)
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    slopes = torch.full((squares * heads * 64, 1, 64), float("nan")).bfloat16()
    part = [1, 1, 64, width]
    shared = {"records": Records(found.records), "count": Pointer(found.count), "heads": heads, "long": long}
    kept = {"longest": blocks, "squares": squares}
    scores = {"scale": SCALE, "factor": SCALE * NORM, "window": 0, "q_head": width, "k_head": width, "v_head": width, "D": width, "V": width}
    scores |= {"STAGES": 3, "ACTIVATION": "silu_bf16", "CAUSAL": True, "WINDOW": False}
    described = {f"{name}_desc": Blocks(x, part) for name, x in (("q", q), ("do", dout), ("k", k), ("v", v), ("dq", dq), ("dk", dk), ("dv", dv))}
    modules = [language, items, activations, hopper_slopes]
    replaced = {"_seen": seen, "turned": turned} | replaced
    emulate(
        hopper_key_grad.key_grad_kernel, [hopper_key_grad, *modules], programs, replaced, **shared, **kept, **scores, **but(described, "dq"),
        slopes=Pointer(slopes), norm=NORM, BLOCK_M=64, BLOCK_N=128,
    )  # fmt: skip
    emulate(
        hopper_slopes.query_product_kernel, modules, programs, replaced, **shared, **kept, slopes_desc=Blocks(slopes, [1, 1, 64, 64]),
        k_desc=described["k_desc"], dq=Pointer(dq), dq_token=heads * width, k_head=width, D=width, BLOCK_M=128, STAGES=3,
    )  # fmt: skip
    emulate(
        hopper_query_grad.query_grad_kernel, [hopper_query_grad, *modules], programs, replaced, **shared, **scores, **but(described, "dk", "dv"),
        BLOCK_M=128, BLOCK_N=64,
    )  # fmt: skip
    return (dq, dk, dv), (q, k, v, dout)


def compare(lengths, heads=1, width=64, longest=None, **replaced):
    longest = longest or max(lengths)
    got, (q, k, v, dout) = emulated(lengths, heads, width, longest, **replaced)
    kept = torch.cat([torch.arange(n) < longest for n in lengths])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    cut = torch.tensor([0, *(min(n, longest) for n in lengths)]).cumsum(0)
    out = reference(*(x[kept] for x in leaves), cut, max_length=longest, scale=SCALE, causal=True, norm_length=4)
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout[kept].double()), strict=True):
        assert_close(a, b, bound=1e-2)


@pytest.mark.parametrize("lengths", [(200, 0, 64, 1, 129), (128,), (63, 65), (1, 1, 300)])
def test_case_I03_lengths_around_tiles(lengths):
    compare(lengths)


@pytest.mark.parametrize("long", [0, 200])
def test_case_I03_two_heads_of_128_and_many_programs(long):
    compare((257, 130), heads=2, width=128, programs=5, long=long)


@pytest.mark.parametrize("long", [1, 64, 65, 200, 201])
def test_case_I03_short_rows_make_their_scores_again(long):
    compare((200, 0, 64, 1, 129), long=long)
    compare((64, 200), long=long)


@pytest.mark.parametrize("long", [0, 100, 1000])
def test_case_I03_what_is_read_as_late_as_it_may_be(long):
    compare((70, 200, 0, 64, 1, 129, 60), long=long, **Late(0.005).names)


def test_slopes_of_short_rows_are_not_stored():
    """The planted fault: the product takes tiles of short rows too, whose squares nobody wrote."""
    with pytest.raises(AssertionError):
        compare((200, 40), long=100, tiles_of_long_rows=lambda records, count, long: count)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 150), min_size=1, max_size=5).filter(any),
    programs=st.integers(1, 4),
    cut=st.integers(0, 70),
    long=st.integers(0, 160),
)
def test_case_I03_any_lengths(lengths, programs, cut, long):
    compare(lengths, programs=programs, longest=max(1, max(lengths) - cut), long=long)


@pytest.mark.parametrize("long", [0, 100, 140])
def test_tokens_beyond_the_maximum_get_zeros(long):
    compare((200, 40, 150), longest=130, long=long)


def test_squares_of_a_row_end_where_those_of_the_next_begin():
    """The planted fault: rows that are told apart by their tokens alone, where short ones share a block of 64."""

    def nearer(records, item, heads, start, block, longest, squares):
        return item % heads * squares + start // 64 * (longest + 1) // 2 + block * (block + 1) // 2

    with pytest.raises(AssertionError):
        compare((5, 60, 130, 3), first_square=nearer)


def test_squares_that_are_not_turned_are_noticed():
    with pytest.raises(AssertionError):
        compare((128,), turned=lambda x: x)
