import math
from itertools import pairwise

import pytest
import torch

from gem_core.ops import gdpa
from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.gdpa import flops, reference
from gem_core.spec import RequestError
from gem_core.testing import assert_close

QUERIES, KEYS = [2, 0, 7, 4, 3], [4, 3, 0, 2, 9]


def packed_rows(q, k, v, q_lengths, k_lengths):
    return list(zip(torch.split(q, q_lengths), torch.split(k, k_lengths), torch.split(v, k_lengths)))


@pytest.mark.parametrize("position", ["inside", "after"])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_matches_its_textbook_formula(brute, activations, offsets_of, randn, activation, position):
    q, k, v = randn(16, 2, 6, grad=False), randn(18, 2, 6, grad=False), randn(18, 2, 4, grad=False)
    got = gdpa(q, k, v, offsets_of(QUERIES), offsets_of(KEYS), max_q=7, max_k=9, activation=activation, scale=0.7, scale_position=position)

    def weights(scores):
        return activations[activation](scores) if position == "inside" else 0.7 * activations[activation](scores)

    want = brute(packed_rows(q, k, v, QUERIES, KEYS), scale=0.7 if position == "inside" else 1.0, weights=weights)
    assert_close(got, want, bound=1e-13)


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_window_limits_the_distance_of_positions_aligned_at_the_end(brute, activations, window_rule, offsets_of, randn, window):
    q, k, v = randn(16, 2, 6, grad=False), randn(18, 1, 6, grad=False), randn(18, 1, 6, grad=False)
    got = gdpa(q, k, v, offsets_of(QUERIES), offsets_of(KEYS), max_q=7, max_k=9, window=window)
    want = brute(packed_rows(q, k, v, QUERIES, KEYS), scale=1.0, weights=activations["gelu"], sees=window_rule(False, window))
    assert_close(got, want, bound=1e-13)


def test_dense_keys_equal_jagged_keys_of_full_rows(offsets_of, randn):
    q, k, v = randn(9, 4, 6), randn(3, 5, 2, 6), randn(3, 5, 2, 6)
    offsets = offsets_of([4, 0, 5])
    dense = gdpa(q, k, v, offsets, None, max_q=5, max_k=5, window=2)
    jagged = gdpa(q, k.flatten(0, 1), v.flatten(0, 1), offsets, offsets_of([5, 5, 5]), max_q=5, max_k=5, window=2)
    assert_close(dense, jagged, bound=1e-14)


def test_shared_query_equals_its_copies(offsets_of, randn):
    q, k, v = randn(3, 2, 6), randn(18, 2, 6), randn(18, 2, 6)
    shared = gdpa(q, k, v, None, offsets_of(KEYS), max_q=3, max_k=9, window=1)
    copies = gdpa(q.repeat(5, 1, 1), k, v, offsets_of([3] * 5), offsets_of(KEYS), max_q=3, max_k=9, window=1)
    assert_close(shared, copies, bound=1e-14)
    dense = gdpa(q, randn(4, 6, 2, 6), randn(4, 6, 2, 6), None, None, max_q=3, max_k=6)
    assert dense.shape == (12, 2, 6)


def test_it_is_a_feed_forward_layer_whose_weights_are_keys_and_values(offsets_of, randn):
    """With one head and dense keys, row r is ``gelu(x W1^T) W2`` with that row's own weights."""
    x, w1, w2 = randn(7, 1, 4), randn(2, 8, 1, 4), randn(2, 8, 1, 4)
    got = gdpa(x, w1, w2, offsets_of([3, 4]), None, max_q=4, max_k=8)
    want = torch.cat([torch.nn.functional.gelu(x[a:b, 0] @ w1[r, :, 0].T) @ w2[r, :, 0] for r, (a, b) in enumerate(pairwise([0, 3, 7]))])
    assert_close(got[:, 0], want, bound=1e-14)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "gelu_fast", "silu", "relu2", "identity"])
@pytest.mark.parametrize("options", [{}, {"window": 1}, {"scale": 0.5, "scale_position": "after"}])
def test_gradcheck(offsets_of, randn, activation, options):
    q, k, v = randn(5, 2, 3), randn(6, 1, 3), randn(6, 1, 2)

    def call(q, k, v):
        return gdpa(q, k, v, offsets_of([2, 0, 3]), offsets_of([2, 0, 4]), max_q=3, max_k=4, activation=activation, **options)

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
@pytest.mark.parametrize("maximum", [0, 4])
def test_case_B01_empty_batches_and_rows(offsets_of, randn, lengths, maximum):
    q, k, v, offsets = randn(0, 2, 4), randn(0, 2, 4), randn(0, 2, 4), offsets_of(lengths)
    out = gdpa(q, k, v, offsets, offsets, max_q=maximum, max_k=maximum)
    assert out.shape == (0, 2, 4)
    assert all(g.shape == (0, 2, 4) for g in torch.autograd.grad(out.sum(), (q, k, v)))
    shared = gdpa(randn(3, 2, 4), k, v, None, offsets, max_q=3, max_k=maximum)
    assert torch.equal(shared, torch.zeros(3 * len(lengths), 2, 4, dtype=torch.float64))


def test_neighbours_of_a_bad_row_stay_clean(offsets_of, randn):
    q, k, v, offsets = randn(9, 2, 4, grad=False), randn(9, 2, 4, grad=False), randn(9, 2, 4, grad=False), offsets_of([3, 2, 4])
    clean = gdpa(q, k, v, offsets, offsets, max_q=4, max_k=4)
    for tensor in (q, k, v):
        tensor[3:5] = math.nan
    dirty = gdpa(q, k, v, offsets, offsets, max_q=4, max_k=4)
    assert torch.equal(clean[:3], dirty[:3])
    assert torch.equal(clean[5:], dirty[5:])
    assert dirty[3:5].isnan().all()


def test_rows_beyond_the_maximum_are_cut_where_they_are_no_error(offsets_of, randn):
    """What a kernel does on CUDA, where lengths cannot be read: the reference called past the check."""
    q, k, v, offsets = randn(8, 2, 4), randn(8, 2, 4), randn(8, 2, 4), offsets_of([5, 3])
    out = reference(q, k, v, offsets, offsets, max_q=3, max_k=3)
    kept = [0, 1, 2, 5, 6, 7]
    want = gdpa(q[kept], k[kept], v[kept], offsets_of([3, 3]), offsets_of([3, 3]), max_q=3, max_k=3)
    assert torch.equal(out[kept], want)
    assert torch.equal(out[3:5], torch.zeros(2, 2, 4, dtype=torch.float64))
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert torch.equal(gradient[3:5], torch.zeros(2, 2, 4, dtype=torch.float64))
        assert gradient[kept].abs().sum() > 0


def test_maximum_zero_cuts_everything_and_keeps_the_graph(offsets_of, randn):
    q, k, v, offsets = randn(4, 2, 4), randn(4, 2, 4), randn(4, 2, 4), offsets_of([4])
    out = reference(q, k, v, offsets, offsets, max_q=0, max_k=0)
    assert torch.equal(out, torch.zeros(4, 2, 4, dtype=torch.float64))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype_is_kept(offsets_of, randn, dtype):
    q, offsets = randn(5, 2, 8, dtype=dtype), offsets_of([2, 3])
    out = gdpa(q, q, q, offsets, offsets, max_q=3, max_k=3)
    assert out.dtype == dtype
    assert torch.autograd.grad(out.sum(), q)[0].dtype == dtype


def test_flops_count_visible_pairs_only(window_rule):
    for window in (None, 0, 2):
        sees = window_rule(False, window)
        count = sum(sees(0, i, j, lq, lk) for lq, lk in zip(QUERIES, KEYS) for i in range(lq) for j in range(lk))
        assert flops(q_lengths=QUERIES, k_lengths=KEYS, heads=2, dim=8, v_dim=4, window=window) == 2 * 2 * 12 * count
    # dense keys: the published rule of 4 * q * kv * d * heads
    assert flops(q_lengths=QUERIES, k_lengths=128, heads=4, dim=64) == 4 * sum(QUERIES) * 128 * 64 * 4


def good(randn, offsets_of):
    return {
        "q": randn(5, 2, 4), "k": randn(2, 6, 2, 4), "v": randn(2, 6, 2, 4), "q_offsets": offsets_of([2, 3]), "k_offsets": None,
        "max_q": 3, "max_k": 6,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "gellu"}, "unknown activation 'gellu'.*gelu_fast"),
        ({"scale_position": "outside"}, "scale_position 'outside'"),
        ({"max_k": 5}, "max_k is 5, dense keys have 6"),
        ({"k": torch.randn(12, 2, 4).double()}, r"Give \[rows, keys, kv_heads, dim\]"),
        ({"q_offsets": torch.tensor([0, 1, 2, 5])}, "q has 3 rows, k has 2"),
        ({"q": torch.zeros(5, 2, 4, dtype=torch.int64)}, "dtype torch.int64 is not one of"),
        ({"q_offsets": torch.tensor([1, 2, 5])}, "the first offset is 1"),
        ({"q": torch.randn(5, 0, 4).double()}, "at least one head"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, randn, change, message):
    with pytest.raises(RequestError, match=message):
        gdpa(**{**good(randn, offsets_of), **change})


def test_the_good_input_of_that_table_is_good(offsets_of, randn):
    assert gdpa(**good(randn, offsets_of)).shape == (5, 2, 4)
