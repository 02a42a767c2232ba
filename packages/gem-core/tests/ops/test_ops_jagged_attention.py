import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.ops import jagged_attention
from gem_core.ops.jagged_attention import flops
from gem_core.spec import RequestError
from gem_core.testing import assert_close, jagged_lengths

QUERIES, KEYS = [2, 0, 7, 4, 3], [4, 3, 0, 2, 9]
SELF = [0, 4, 1, 0, 6]


def rows_of(q, k, v, q_lengths, k_lengths):
    return list(zip(torch.split(q, q_lengths), torch.split(k, k_lengths), torch.split(v, k_lengths)))


@pytest.mark.parametrize("window", [None, 0, 2, 50])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_matches_a_loop_over_rows(brute, softmax, window_rule, offsets_of, randn, causal, window):
    q, k, v, offsets = randn(11, 4, 6), randn(11, 2, 6), randn(11, 2, 3), offsets_of(SELF)
    got = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6, causal=causal, window=window)
    want = brute(rows_of(q, k, v, SELF, SELF), scale=6**-0.5, weights=softmax, sees=window_rule(causal, window))
    assert_close(got, want, bound=1e-13)
    upstream = randn(11, 4, 3, grad=False)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(want, (q, k, v), upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_cross_attention_aligns_queries_and_keys_at_their_ends(brute, softmax, window_rule, offsets_of, randn, causal, window):
    q, k, v = randn(16, 2, 6), randn(18, 2, 6), randn(18, 2, 6)
    got = jagged_attention(q, k, v, offsets_of(QUERIES), offsets_of(KEYS), max_q=7, max_k=9, scale=0.3, causal=causal, window=window)
    want = brute(rows_of(q, k, v, QUERIES, KEYS), scale=0.3, weights=softmax, sees=window_rule(causal, window))
    assert_close(got, want, bound=1e-13)


def test_shared_query_is_one_copy_of_the_query_for_each_row(brute, softmax, window_rule, offsets_of, randn):
    q, k, v = randn(3, 2, 6), randn(18, 2, 6), randn(18, 2, 6)
    got = jagged_attention(q, k, v, None, offsets_of(KEYS), max_q=3, max_k=9, causal=True)
    rows = [(q, a, b) for a, b in zip(torch.split(k, KEYS), torch.split(v, KEYS))]
    want = brute(rows, scale=6**-0.5, weights=softmax, sees=window_rule(True, None))
    assert got.shape == (15, 2, 6)
    assert_close(got, want, bound=1e-13)
    assert_close(torch.autograd.grad(got.sum(), q)[0], torch.autograd.grad(want.sum(), q)[0], bound=1e-12)


@pytest.mark.parametrize("bias_rows", [1, 5])
@pytest.mark.parametrize("bias_heads", [1, 4])
def test_bias_is_added_and_gets_gradients(brute, softmax, offsets_of, randn, bias_rows, bias_heads):
    q, k, v, offsets = randn(11, 4, 6), randn(11, 2, 6), randn(11, 2, 6), offsets_of(SELF)
    bias = randn(bias_rows, bias_heads, 6, 6)
    got = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6, bias=bias)

    def one(row, i, seen):
        return bias[row % bias_rows, :, i, seen].T

    want = brute(rows_of(q, k, v, SELF, SELF), scale=6**-0.5, weights=softmax, bias=one)
    assert_close(got, want, bound=1e-13)
    upstream = randn(11, 4, 6, grad=False)
    assert_close(torch.autograd.grad(got, bias, upstream)[0], torch.autograd.grad(want, bias, upstream)[0], bound=1e-12)


def test_a_bias_of_minus_infinity_removes_keys_without_nan(offsets_of, randn):
    q, k, v, offsets = randn(5, 1, 4), randn(5, 1, 4), randn(5, 1, 4), offsets_of([3, 2])
    bias = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    bias[..., 0, :] = -math.inf  # the first query of each row sees nothing
    bias[..., 1, 1:] = -math.inf  # the second sees the first key only
    bias.requires_grad_()
    got, lse = jagged_attention(q, k, v, offsets, offsets, max_q=3, max_k=3, bias=bias, return_lse=True)
    assert torch.equal(got[[0, 3]], torch.zeros(2, 1, 4, dtype=torch.float64))
    torch.testing.assert_close(got[[1, 4]], v[[0, 3]])
    assert lse[0] == lse[3] == -math.inf
    for gradient in torch.autograd.grad(got.sum(), (q, k, v, bias)):
        assert torch.isfinite(gradient).all()


def test_lse_is_the_logarithm_of_the_softmax_denominator(offsets_of, randn):
    q, k, v = randn(16, 2, 6), randn(18, 2, 6), randn(18, 2, 6)
    out, lse = jagged_attention(q, k, v, offsets_of(QUERIES), offsets_of(KEYS), max_q=7, max_k=9, causal=True, return_lse=True)
    assert lse.shape == (16, 2)
    assert not lse.requires_grad
    for row, ((q0, q1), (k0, k1)) in enumerate(zip(pairwise(offsets_of(QUERIES).tolist()), pairwise(offsets_of(KEYS).tolist()))):
        for i in range(q1 - q0):
            seen = [j for j in range(k1 - k0) if j <= i + KEYS[row] - QUERIES[row]]
            scores = [(q[q0 + i] * k[k0 + j]).sum(-1) * 6**-0.5 for j in seen]
            want = torch.stack(scores).exp().sum(0).log() if seen else torch.full((2,), -math.inf, dtype=torch.float64)
            torch.testing.assert_close(lse[q0 + i], want.detach())
            assert bool((out[q0 + i] == 0).all()) == (not seen)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype_and_computes_wider(offsets_of, randn, dtype):
    q, k, v = (randn(11, 2, 16, dtype=dtype, grad=False) for _ in range(3))
    offsets = offsets_of(SELF)
    got, lse = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6, return_lse=True)
    want = jagged_attention(q.double(), k.double(), v.double(), offsets, offsets, max_q=6, max_k=6)
    assert got.dtype == dtype
    assert lse.dtype == torch.float32
    # computed in float32 and rounded once: half a unit in the last place of the output, and no more
    torch.testing.assert_close(got.double(), want.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_meaning_does_not_depend_on_autocast(offsets_of, randn):
    q, k, v = (randn(11, 2, 16, dtype=torch.float32, grad=False) for _ in range(3))
    offsets = offsets_of(SELF)
    plain = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6)
    assert torch.equal(plain, inside)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("maximum", [0, 5])
def test_case_B01_empty_batches_and_rows_give_empty_results_and_gradients(offsets_of, randn, lengths, maximum):
    q, k, v, offsets = randn(0, 2, 4), randn(0, 2, 4), randn(0, 2, 4), offsets_of(lengths)
    out = jagged_attention(q, k, v, offsets, offsets, max_q=maximum, max_k=maximum)
    assert out.shape == (0, 2, 4)
    assert all(g.shape == (0, 2, 4) for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_queries_of_a_row_without_keys_are_zero_with_zero_gradients(offsets_of, randn):
    q, k, v = randn(4, 2, 4), randn(3, 2, 4), randn(3, 2, 4)
    out = jagged_attention(q, k, v, offsets_of([2, 2]), offsets_of([3, 0]), max_q=2, max_k=3)
    assert torch.equal(out[2:], torch.zeros(2, 2, 4, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out.square().sum() + out.sum(), q)
    assert torch.equal(gradient[2:], torch.zeros(2, 2, 4, dtype=torch.float64))
    assert torch.isfinite(gradient).all()


def test_scores_too_large_for_exp_stay_finite(offsets_of, randn):
    q, k, v, offsets = (
        randn(6, 1, 4, dtype=torch.float32),
        randn(6, 1, 4, dtype=torch.float32),
        randn(6, 1, 4, dtype=torch.float32),
        offsets_of([6]),
    )
    out = jagged_attention(q, k, v, offsets, offsets, max_q=6, max_k=6, scale=1e4)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=jagged_lengths(max_rows=5, max_length=20), data=st.data())
def test_a_row_does_not_depend_on_its_neighbours(lengths, data):
    """Each row alone gives what it gives in the batch, even beside rows of infinities and NaN."""
    generator = torch.Generator().manual_seed(len(lengths))
    q, k, v = (torch.randn(sum(lengths), 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    offsets = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)
    longest = max(lengths, default=0)
    bad = data.draw(st.integers(0, len(lengths) - 1)) if lengths else None
    clean = jagged_attention(q, k, v, offsets, offsets, max_q=longest, max_k=longest, causal=True)
    if bad is not None:
        for tensor, value in ((q, math.nan), (k, math.inf), (v, math.nan)):
            tensor[offsets[bad] : offsets[bad + 1]] = value
    dirty = jagged_attention(q, k, v, offsets, offsets, max_q=longest, max_k=longest, causal=True)
    for row, (start, end) in enumerate(pairwise(offsets.tolist())):
        if row != bad:
            assert torch.equal(clean[start:end], dirty[start:end])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 1}, {"causal": True, "window": 1}])
def test_gradcheck(offsets_of, randn, options):
    q, k, v, bias = randn(5, 2, 3), randn(6, 1, 3), randn(6, 1, 2), randn(3, 2, 3, 4)

    def call(q, k, v, bias):
        return jagged_attention(q, k, v, offsets_of([2, 0, 3]), offsets_of([2, 0, 4]), max_q=3, max_k=4, bias=bias, **options)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


def test_flops_count_the_pairs_that_are_seen(window_rule):
    for causal in (False, True):
        for window in (None, 0, 2):
            sees = window_rule(causal, window)
            count = sum(sees(0, i, j, lq, lk) for lq, lk in zip(QUERIES, KEYS) for i in range(lq) for j in range(lk))
            got = flops(q_lengths=QUERIES, k_lengths=KEYS, heads=3, dim=8, v_dim=4, causal=causal, window=window)
            assert got == 2 * 3 * (8 + 4) * count
    assert flops(q_lengths=3, k_lengths=KEYS, heads=2, dim=8) == 2 * 2 * 16 * 3 * sum(KEYS)


def good(randn, offsets_of):
    offsets = offsets_of([2, 3])
    return {
        "q": randn(5, 2, 4), "k": randn(5, 2, 4), "v": randn(5, 2, 4), "q_offsets": offsets, "k_offsets": offsets, "max_q": 3, "max_k": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.randn(5, 2, 4)}, "k is torch.float64, the first input is torch.float32"),
        ({"k": torch.randn(5, 2, 3).double()}, "q has dim 4, k has dim 3"),
        ({"v": torch.randn(4, 2, 4).double()}, "k has shape"),
        ({"q": torch.randn(5, 8).double()}, r"Give \[tokens, heads, dim\]"),
        ({"q": torch.randn(5, 3, 4).double()}, "3 query heads of width 4 on 2 key heads"),
        ({"q_offsets": torch.tensor([0, 2, 4])}, "last offset 4 but 5 values"),
        ({"q_offsets": torch.tensor([0, 4, 2, 5])}, "offsets fall from 4 to 2 at index 1"),
        ({"q_offsets": torch.tensor([0, 5]), "max_q": 5}, "q has 1 rows, k has 2"),
        ({"q_offsets": torch.tensor([0, 2, 5], dtype=torch.int32)}, "int64"),
        ({"max_q": 2}, "a row of q has 3 values, longer than the given maximum 2"),
        ({"max_k": 2}, "a row of k has 3 values, longer than the given maximum 2"),
        ({"max_q": -1}, "given as -1"),
        ({"window": -1}, "window -1 is negative"),
        ({"bias": torch.zeros(2, 2, 3, 4).double()}, "bias has shape"),
        ({"bias": torch.zeros(2, 2, 3, 3)}, "bias is torch.float32"),
        ({"q_offsets": None, "max_q": 4}, "a shared query has 5 tokens"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, randn, change, message):
    with pytest.raises(RequestError, match=message):
        jagged_attention(**{**good(randn, offsets_of), **change})


def test_the_good_input_of_that_table_is_good(offsets_of, randn):
    assert jagged_attention(**good(randn, offsets_of)).shape == (5, 2, 4)


def test_case_B21_a_maximum_below_the_longest_row_is_an_error(offsets_of, randn):
    q = randn(7, 2, 4)
    with pytest.raises(RequestError, match="has 5 values, longer than the given maximum 3"):
        jagged_attention(q, q, q, offsets_of([5, 2]), offsets_of([5, 2]), max_q=3, max_k=5)
