import math

import pytest
import torch

from gem_core.ops import block_attention, jagged_attention
from gem_core.ops.block_attention import flops, reference, rotate
from gem_core.spec import RequestError
from gem_core.testing import assert_close

LENGTHS = [0, 3, 9, 4, 1]
TOKENS = sum(LENGTHS)


@pytest.mark.parametrize("block", [1, 3, 4, 64])
def test_it_is_softmax_inside_the_blocks_of_each_row(brute, softmax, offsets_of, randn, block):
    q, k, v = randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 2, 4)
    got = block_attention(q, k, v, offsets_of(LENGTHS), max_length=9, block=block)
    rows = list(zip(*(torch.split(t, LENGTHS) for t in (q, k, v))))
    want = brute(rows, scale=6**-0.5, weights=softmax, sees=lambda row, i, j, lq, lk: i // block == j // block)
    assert_close(got, want, bound=1e-13)
    upstream = randn(TOKENS, 2, 4, grad=False)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(want, (q, k, v), upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_a_block_as_long_as_the_row_is_full_attention(offsets_of, randn):
    q, k, v, offsets = randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), offsets_of(LENGTHS)
    full = jagged_attention(q, k, v, offsets, offsets, max_q=9, max_k=9, scale=0.4)
    assert_close(block_attention(q, k, v, offsets, max_length=9, block=100, scale=0.4), full, bound=1e-14)


@pytest.mark.parametrize("on_v", [False, True])
def test_rope_turns_interleaved_pairs(offsets_of, randn, on_v):
    q, k, v = randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 2, 6)
    angles = randn(TOKENS, 3, grad=False) * 3

    def turned(x):
        out = x.detach().clone()
        for t in range(TOKENS):
            for pair in range(3):
                c, s = math.cos(angles[t, pair]), math.sin(angles[t, pair])
                a, b = x[t, :, 2 * pair].detach(), x[t, :, 2 * pair + 1].detach()
                out[t, :, 2 * pair], out[t, :, 2 * pair + 1] = a * c - b * s, a * s + b * c
        return out

    got = block_attention(q, k, v, offsets_of(LENGTHS), max_length=9, block=4, rope=angles, rope_on_v=on_v)
    want = block_attention(turned(q), turned(k), turned(v) if on_v else v, offsets_of(LENGTHS), max_length=9, block=4)
    assert_close(got, want, bound=1e-13)


def test_norms_divide_each_head_by_its_root_mean_square_before_the_rotation(offsets_of, randn):
    q, k, v, angles = randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 3, grad=False)
    gains = {"q_gain": randn(6), "k_gain": randn(6)}

    def normed(x, gain):
        out = torch.zeros_like(x)
        for t in range(TOKENS):
            for head in range(2):
                out[t, head] = x[t, head] / math.sqrt(sum(float(e) ** 2 for e in x[t, head].detach()) / 6 + 0.01) * gain
        return out.detach()

    got = block_attention(q, k, v, offsets_of(LENGTHS), max_length=9, block=4, rope=angles, **gains, eps=0.01)
    want = block_attention(normed(q, gains["q_gain"]), normed(k, gains["k_gain"]), v, offsets_of(LENGTHS), max_length=9, block=4, rope=angles)
    assert_close(got, want, bound=1e-13)


def test_normed_scores_do_not_depend_on_the_size_of_queries(offsets_of, randn):
    q, k, v, offsets = randn(TOKENS, 1, 4), randn(TOKENS, 1, 4), randn(TOKENS, 1, 4), offsets_of(LENGTHS)
    gains = {"q_gain": randn(4), "k_gain": randn(4)}
    here = block_attention(q, k, v, offsets, max_length=9, **gains, eps=1e-12)
    assert_close(block_attention(q * 1000, k * 0.01, v, offsets, max_length=9, **gains, eps=1e-12), here, bound=1e-5)


def test_rope_scores_depend_on_angle_differences_only(offsets_of, randn):
    q, k, v, offsets = randn(TOKENS, 1, 4), randn(TOKENS, 1, 4), randn(TOKENS, 1, 4), offsets_of(LENGTHS)
    angles = randn(TOKENS, 2, grad=False)
    here = block_attention(q, k, v, offsets, max_length=9, rope=angles)
    there = block_attention(q, k, v, offsets, max_length=9, rope=angles + 1.25)
    assert_close(there, here, bound=1e-12)


def test_rotation_keeps_lengths_and_turning_back_undoes_it(randn):
    x, angles = randn(5, 2, 6), randn(5, 3, grad=False)
    turned = rotate(x, angles)
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), bound=1e-14)
    assert_close(rotate(turned, -angles), x, bound=1e-14)


def test_large_angles_keep_their_precision_in_low_precision_inputs(offsets_of, randn):
    q, k, v = (randn(TOKENS, 1, 4, dtype=torch.bfloat16, grad=False) for _ in range(3))
    angles = (torch.arange(TOKENS)[:, None] * torch.tensor([[101.0, 0.5]])).float()
    got = block_attention(q, k, v, offsets_of(LENGTHS), max_length=9, rope=angles)
    want = block_attention(q.double(), k.double(), v.double(), offsets_of(LENGTHS), max_length=9, rope=angles.double())
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("options", [{}, {"rope": True}, {"rope": True, "rope_on_v": True}])
def test_gradcheck(offsets_of, randn, options):
    q, k, v = randn(6, 2, 4), randn(6, 2, 4), randn(6, 2, 4)
    options = {**options, "rope": randn(6, 2, grad=False)} if options else {}
    offsets = offsets_of([2, 0, 4])
    assert torch.autograd.gradcheck(lambda q, k, v: block_attention(q, k, v, offsets, max_length=4, block=3, **options), (q, k, v))


def test_gradcheck_of_norms(offsets_of, randn):
    q, k, v, q_gain, k_gain = randn(6, 2, 4), randn(6, 2, 4), randn(6, 2, 4), randn(4), randn(4)
    offsets, angles = offsets_of([2, 0, 4]), randn(6, 2, grad=False)

    def call(q, k, v, q_gain, k_gain):
        return block_attention(q, k, v, offsets, max_length=4, block=3, rope=angles, q_gain=q_gain, k_gain=k_gain)

    assert torch.autograd.gradcheck(call, (q, k, v, q_gain, k_gain))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
@pytest.mark.parametrize("maximum", [0, 70])
def test_case_B01_empty_batches_and_rows(offsets_of, randn, lengths, maximum):
    q = randn(0, 2, 4)
    out = block_attention(q, q, q, offsets_of(lengths), max_length=maximum)
    assert out.shape == (0, 2, 4)
    assert torch.autograd.grad(out.sum(), q)[0].shape == (0, 2, 4)


@pytest.mark.parametrize("maximum", [3, 5])
def test_rows_beyond_the_maximum_are_cut_where_they_are_no_error(offsets_of, randn, maximum):
    q, k, v = randn(8, 1, 4), randn(8, 1, 4), randn(8, 1, 4)
    out = reference(q, k, v, offsets_of([7, 1]), max_length=maximum, block=4)
    kept = [*range(maximum), 7]
    want = block_attention(q[kept], k[kept], v[kept], offsets_of([maximum, 1]), max_length=maximum, block=4)
    assert_close(out[kept], want, bound=1e-14)
    assert torch.equal(out[maximum:7], torch.zeros(7 - maximum, 1, 4, dtype=torch.float64))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient[maximum:7], torch.zeros(7 - maximum, 1, 4, dtype=torch.float64))


def test_flops_charge_a_short_block_for_its_own_tokens_only():
    lengths = [0, 64, 65, 130, 7]
    count = sum(i // 64 == j // 64 for length in lengths for i in range(length) for j in range(length))
    assert flops(lengths=lengths, heads=2, dim=16, v_dim=8) == 2 * 2 * 24 * count
    assert flops(lengths=[7], heads=1, dim=1, block=3) == 4 * (9 + 9 + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 0}, "block is 0"),
        ({"max_length": 2}, "a row of q has 3 values, longer than the given maximum 2"),
        ({"k": torch.randn(5, 1, 4).double()}, "k has shape"),
        ({"rope": torch.zeros(5, 2)}, "rope is torch.float32"),
        ({"rope": torch.zeros(5, 4).double()}, r"rope has shape \[5, 4\]"),
        ({"rope": torch.zeros(5, 2).double().requires_grad_()}, "gradient True"),
        ({"rope_on_v": True}, "rope_on_v needs angles"),
        ({"q_gain": torch.ones(4).double()}, "k_gain is missing"),
        ({"k_gain": torch.ones(4).double()}, "q_gain is missing"),
        ({"q_gain": torch.ones(4).double(), "k_gain": torch.ones(4)}, "k_gain is torch.float32"),
        ({"q_gain": torch.ones(5).double(), "k_gain": torch.ones(4).double()}, r"q_gain has shape \[5\]"),
        ({"q_gain": torch.ones(4).double(), "k_gain": torch.ones(4).double(), "eps": 0.0}, "eps is 0.0"),
        ({"v": torch.randn(5, 2, 3).double(), "rope": torch.zeros(5, 2).double(), "rope_on_v": True}, "v as wide as q"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, randn, change, message):
    good = {"q": randn(5, 2, 4), "k": randn(5, 2, 4), "v": randn(5, 2, 4), "offsets": offsets_of([2, 3]), "max_length": 3}
    block_attention(**good)
    with pytest.raises(RequestError, match=message):
        block_attention(**{**good, **change})
