import itertools

import pytest
import torch

from gem_core.ops import hstu_attention
from gem_core.ops.hstu_attention import flops, reference
from gem_core.spec import RequestError
from gem_core.testing import assert_close

LENGTHS = [0, 5, 1, 8, 3]
TOKENS = sum(LENGTHS)
CONTEXTUAL = [0, 1, 0, 3, 1]
TARGETS = [0, 2, 1, 2, 0]


def rule(lengths, causal, window, contextual, targets):
    """Who sees whom, in words of one pair."""

    def sees(row, i, j, lq, lk):
        prefix, end = contextual[row] if contextual else 0, lengths[row] - (targets[row] if targets else 0)
        if i == j:
            return True
        if j >= end:
            return False  # a target is seen by nobody else
        if j < prefix or i < prefix:
            return True  # everyone sees the prefix, the prefix sees the history
        position = min(i, end)
        if causal and j > position:
            return False
        return window is None or abs(position - j) <= window

    return sees


GRID = list(itertools.product((True, False), (None, 0, 2), (None, CONTEXTUAL), (None, TARGETS)))


@pytest.mark.parametrize(("causal", "window", "contextual", "targets"), GRID)
def test_case_I02_full_mask_grid_matches_a_loop_over_rows(brute, activations, offsets_of, randn, causal, window, contextual, targets):
    q, k, v = randn(TOKENS, 2, 6, grad=False), randn(TOKENS, 2, 6, grad=False), randn(TOKENS, 2, 4, grad=False)
    got = hstu_attention(
        q, k, v, offsets_of(LENGTHS), max_length=8, causal=causal, window=window,
        contextual=None if contextual is None else torch.tensor(contextual), targets=None if targets is None else torch.tensor(targets),
    )  # fmt: skip
    rows = list(zip(*(torch.split(t, LENGTHS) for t in (q, k, v))))
    want = brute(rows, scale=6**-0.5, weights=lambda s: activations["silu"](s) / 8, sees=rule(LENGTHS, causal, window, contextual, targets))
    assert_close(got, want, bound=1e-13)


@pytest.mark.parametrize(("causal", "window", "contextual", "targets"), GRID)
def test_flops_count_the_pairs_of_the_full_mask_grid(causal, window, contextual, targets):
    sees = rule(LENGTHS, causal, window, contextual, targets)
    count = sum(sees(row, i, j, n, n) for row, n in enumerate(LENGTHS) for i in range(n) for j in range(n))
    got = flops(lengths=LENGTHS, heads=2, dim=6, v_dim=4, causal=causal, window=window, contextual=contextual or 0, targets=targets or 0)
    assert got == 2 * 2 * 10 * count


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_case_I04_contextual_length_0_1_3(brute, activations, offsets_of, randn, prefix):
    lengths = [5, 3]
    q, k, v = randn(8, 1, 4, grad=False), randn(8, 1, 4, grad=False), randn(8, 1, 4, grad=False)
    got = hstu_attention(q, k, v, offsets_of(lengths), max_length=5, contextual=torch.tensor([prefix, prefix]), norm_length=2)
    rows = list(zip(*(torch.split(t, lengths) for t in (q, k, v))))
    want = brute(rows, scale=0.5, weights=lambda s: activations["silu"](s) / 2, sees=rule(lengths, True, None, [prefix] * 2, None))
    assert_close(got, want, bound=1e-13)
    if prefix == 0:
        assert torch.equal(got, hstu_attention(q, k, v, offsets_of(lengths), max_length=5, norm_length=2))


def test_case_B23_position_0_of_a_contextual_prefix_sees_the_whole_history(offsets_of, randn):
    """3 contextual tokens: position 0 attends as in dense attention over everything but targets."""
    q, k, v = randn(9, 1, 4, grad=False), randn(9, 1, 4, grad=False), randn(9, 1, 4, grad=False)
    got = hstu_attention(q, k, v, offsets_of([9]), max_length=9, contextual=torch.tensor([3]), targets=torch.tensor([2]), norm_length=1)
    dense = torch.nn.functional.silu((q[0, 0] * k[:7, 0]).sum(-1) / 2) @ v[:7, 0]
    assert_close(got[0, 0], dense, bound=1e-14)
    without = hstu_attention(q, k, v, offsets_of([9]), max_length=9, targets=torch.tensor([2]), norm_length=1)
    assert not torch.allclose(got[0], without[0])


def test_case_B03_all_lengths_zero_and_maximum_zero(offsets_of, randn):
    q, k, v = randn(0, 2, 4), randn(0, 2, 4), randn(0, 2, 6)
    out = hstu_attention(q, k, v, offsets_of([0, 0]), max_length=0)
    assert out.shape == (0, 2, 6)
    shapes = [tuple(g.shape) for g in torch.autograd.grad(out.sum(), (q, k, v))]
    assert shapes == [(0, 2, 4), (0, 2, 4), (0, 2, 6)]
    assert hstu_attention(q, k, v, offsets_of([]), max_length=0).shape == (0, 2, 6)


def test_case_B20_more_targets_than_tokens_are_refused(offsets_of, randn):
    q = randn(5, 1, 4)
    with pytest.raises(RequestError, match="row 0 has 3 tokens, its targets are 4"):
        hstu_attention(q, q, q, offsets_of([3, 2]), max_length=3, targets=torch.tensor([4, 2]))
    with pytest.raises(RequestError, match="row 1 has 2 tokens, its targets are 1, 3 with what goes before"):
        hstu_attention(q, q, q, offsets_of([3, 2]), max_length=3, contextual=torch.tensor([1, 2]), targets=torch.tensor([2, 1]))
    with pytest.raises(RequestError, match="its contextual are -1"):
        hstu_attention(q, q, q, offsets_of([3, 2]), max_length=3, contextual=torch.tensor([0, -1]))


def test_case_B21_a_maximum_below_the_longest_row_is_refused(offsets_of, randn):
    q = randn(7, 1, 4)
    with pytest.raises(RequestError, match="has 5 values, longer than the given maximum 3"):
        hstu_attention(q, q, q, offsets_of([5, 2]), max_length=3)


def test_targets_do_not_influence_history_or_each_other(offsets_of, randn):
    q, k, v = randn(8, 1, 4, grad=False), randn(8, 1, 4, grad=False), randn(8, 1, 4, grad=False)
    for causal in (True, False):
        before = hstu_attention(q, k, v, offsets_of([8]), max_length=8, causal=causal, targets=torch.tensor([3]))
        changed = [t.clone() for t in (q, k, v)]
        for tensor in changed:
            tensor[6] += 1.0  # the second of three targets
        after = hstu_attention(*changed, offsets_of([8]), max_length=8, causal=causal, targets=torch.tensor([3]))
        assert torch.equal(before[[0, 1, 2, 3, 4, 5, 7]], after[[0, 1, 2, 3, 4, 5, 7]])
        assert not torch.equal(before[6], after[6])


def test_equal_targets_get_equal_results_wherever_they_stand(offsets_of, randn):
    q, k, v = randn(7, 1, 4, grad=False), randn(7, 1, 4, grad=False), randn(7, 1, 4, grad=False)
    for tensor in (q, k, v):
        tensor[5:] = tensor[4]
    out = hstu_attention(q, k, v, offsets_of([7]), max_length=7, window=2, targets=torch.tensor([3]))
    assert_close(out[4], out[5], bound=1e-15)
    assert_close(out[5], out[6], bound=1e-15)


@pytest.mark.parametrize("shape", [(5, 2), (1, 2), (5, 1), (1, 1)])
def test_bias_is_added_inside_the_activation(brute, offsets_of, randn, shape):
    q, k, v, bias = randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(TOKENS, 2, 6), randn(*shape, 8, 8)
    got = hstu_attention(q, k, v, offsets_of(LENGTHS), max_length=8, bias=bias, scale=0.3, norm_length=5)
    rows = list(zip(*(torch.split(t, LENGTHS) for t in (q, k, v))))
    want = brute(
        rows, scale=0.3, weights=lambda s: torch.nn.functional.silu(s) / 5, sees=rule(LENGTHS, True, None, None, None),
        bias=lambda row, i, seen: bias[row % shape[0], :, i, seen].T,
    )  # fmt: skip
    assert_close(got, want, bound=1e-13)
    upstream = randn(TOKENS, 2, 6, grad=False)
    for mine, theirs in zip(torch.autograd.grad(got, (q, k, v, bias), upstream), torch.autograd.grad(want, (q, k, v, bias), upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_divisor_is_constant_and_not_the_row_length(offsets_of, randn):
    q, k, v = randn(8, 1, 4), randn(8, 1, 4), randn(8, 1, 4)
    long = hstu_attention(q, k, v, offsets_of([5, 3]), max_length=5)
    short = hstu_attention(q[5:], k[5:], v[5:], offsets_of([3]), max_length=3)
    assert_close(long[5:] * 5, short * 3, bound=1e-14)


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck(offsets_of, randn, causal):
    q, k, v, bias = randn(7, 2, 3), randn(7, 2, 3), randn(7, 2, 2), randn(1, 2, 5, 5)
    counts = torch.tensor([1, 0]), torch.tensor([1, 1])

    def call(q, k, v, bias):
        return hstu_attention(q, k, v, offsets_of([5, 2]), max_length=5, causal=causal, window=1, contextual=counts[0], targets=counts[1], bias=bias)

    assert torch.autograd.gradcheck(call, (q, k, v, bias))


def test_rows_beyond_the_maximum_are_cut_where_they_are_no_error(offsets_of, randn):
    q, k, v = randn(7, 1, 4), randn(7, 1, 4), randn(7, 1, 4)
    out = reference(q, k, v, offsets_of([5, 2]), max_length=3)
    assert torch.equal(out[3:5], torch.zeros(2, 1, 4, dtype=torch.float64))
    assert all(torch.equal(g[3:5], torch.zeros(2, 1, 4, dtype=torch.float64)) for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": -2}, "window -2 is negative"),
        ({"norm_length": 0}, "norm_length is 0"),
        ({"targets": torch.tensor([1])}, r"targets is torch.int64 of shape \[1\]"),
        ({"contextual": torch.tensor([1, 1], dtype=torch.int32)}, "contextual is torch.int32"),
        ({"bias": torch.zeros(1, 1, 2, 2).double()}, "bias has shape"),
        ({"k": torch.randn(5, 1, 4).double()}, "k has shape"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, randn, change, message):
    good = {"q": randn(5, 2, 4), "k": randn(5, 2, 4), "v": randn(5, 2, 4), "offsets": offsets_of([2, 3]), "max_length": 3}
    hstu_attention(**good)
    with pytest.raises(RequestError, match=message):
        hstu_attention(**{**good, **change})
