import pytest
import torch

from gem_core.ops import pooled_attention
from gem_core.ops.pooled_attention import flops
from gem_core.spec import RequestError
from gem_core.testing import assert_close

KEYS = [4, 0, 9, 1]


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_each_seed_pools_its_row(brute, softmax, offsets_of, randn, per_row, kv_heads):
    seeds = randn(4, 3, 2, 6) if per_row else randn(3, 2, 6)
    k, v = randn(14, kv_heads, 6), randn(14, kv_heads, 5)
    got = pooled_attention(seeds, k, v, offsets_of(KEYS), max_k=9, scale=0.3)
    queries = list(seeds) if per_row else [seeds] * 4
    want = brute(list(zip(queries, torch.split(k, KEYS), torch.split(v, KEYS))), scale=0.3, weights=softmax)
    assert got.shape == (4, 3, 2, 5)
    assert_close(got.flatten(0, 1), want, bound=1e-13)
    upstream = randn(4, 3, 2, 5, grad=False)
    for mine, theirs in zip(torch.autograd.grad(got, (seeds, k, v), upstream), torch.autograd.grad(want, (seeds, k, v), upstream.flatten(0, 1))):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_default_scale_is_one_over_the_root_of_the_width(offsets_of, randn):
    seeds, k, v = randn(3, 2, 9), randn(14, 2, 9), randn(14, 2, 9)
    default = pooled_attention(seeds, k, v, offsets_of(KEYS), max_k=9)
    assert_close(default, pooled_attention(seeds, k, v, offsets_of(KEYS), max_k=9, scale=1 / 3), bound=1e-14)


def test_equal_keys_give_the_mean_of_the_values(offsets_of, randn):
    k, v = torch.ones(14, 1, 4, dtype=torch.float64), randn(14, 1, 4)
    got = pooled_attention(randn(2, 1, 4), k, v, offsets_of(KEYS), max_k=9)
    assert_close(got[2, 0, 0], v[4:13, 0].mean(0), bound=1e-14)


def test_case_B04_an_empty_row_pools_to_zero_with_zero_gradient(offsets_of, randn):
    seeds, k, v = randn(4, 3, 2, 6), randn(14, 2, 6), randn(14, 2, 6)
    out = pooled_attention(seeds, k, v, offsets_of(KEYS), max_k=9)
    assert torch.equal(out[1], torch.zeros(3, 2, 6, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(out.square().sum(), seeds)
    assert torch.equal(gradient[1], torch.zeros(3, 2, 6, dtype=torch.float64))
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_case_B01_empty_batches_and_rows(offsets_of, randn, lengths):
    seeds, k = randn(3, 2, 4), randn(0, 2, 4)
    out = pooled_attention(seeds, k, k, offsets_of(lengths), max_k=0)
    assert torch.equal(out, torch.zeros(len(lengths), 3, 2, 4, dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(out.sum(), seeds)[0], torch.zeros_like(seeds))


def test_gradcheck(offsets_of, randn):
    offsets = offsets_of([3, 0, 2])
    for seeds in (randn(2, 2, 3), randn(3, 2, 2, 3)):
        assert torch.autograd.gradcheck(lambda s, k, v: pooled_attention(s, k, v, offsets, max_k=3), (seeds, randn(5, 1, 3), randn(5, 1, 2)))


def test_flops_charge_every_seed_for_every_key():
    assert flops(seeds=3, k_lengths=KEYS, heads=2, dim=8, v_dim=4) == 2 * 2 * 12 * 3 * sum(KEYS)
    assert flops(seeds=3, k_lengths=[], heads=2, dim=8) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": torch.randn(2, 4).double()}, "seeds has shape"),
        ({"seeds": torch.randn(3, 2, 2, 4).double()}, "seeds have 3 rows, k has 2"),
        ({"seeds": torch.randn(2, 2, 4)}, "k is torch.float64, the first input is torch.float32"),
        ({"max_k": 2}, "a row of k has 3 values, longer than the given maximum 2"),
        ({"k": torch.randn(5, 2, 3).double()}, "q has dim 4, k has dim 3"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, randn, change, message):
    good = {"seeds": randn(2, 2, 4), "k": randn(5, 2, 4), "v": randn(5, 2, 4), "k_offsets": offsets_of([2, 3]), "max_k": 3}
    pooled_attention(**good)
    with pytest.raises(RequestError, match=message):
        pooled_attention(**{**good, **change})
