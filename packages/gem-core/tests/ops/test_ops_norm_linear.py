import itertools

import pytest
import torch

from gem_core.ops import norm_linear
from gem_core.ops.norm_linear import check, flops, reference
from gem_core.spec import RequestError
from gem_core.testing import assert_close

KINDS = list(itertools.product(("rms", "layer"), ("before", "after")))


def by_hand(x, weight, bias, norm, where, gamma, beta, residual, eps):
    """One token at a time, in Python sums."""
    outputs, sums = [], []

    def normalise(z):
        n = len(z)
        mean = sum(z) / n if norm == "layer" else 0.0
        spread = sum((e - mean) ** 2 for e in z) / n
        return torch.stack([(e - mean) / (spread + eps) ** 0.5 for e in z]) * gamma + beta

    for t, token in enumerate(x):
        if where == "before":
            sums.append(token + residual[t])
            outputs.append(weight @ normalise(sums[-1]) + bias)
        else:
            sums.append(weight @ token + bias + residual[t])
            outputs.append(normalise(sums[-1]))
    return torch.stack(outputs), torch.stack(sums)


@pytest.mark.parametrize(("norm", "where"), KINDS)
def test_it_matches_sums_by_hand(randn, norm, where):
    width = 4 if where == "before" else 3
    x, weight, bias, residual, gamma = randn(5, 4), randn(3, 4), randn(3), randn(5, width), randn(width)
    beta = randn(width) if norm == "layer" else None
    inputs = [x, weight, bias, residual, gamma, *([] if beta is None else [beta])]
    out, total = norm_linear(x, weight, bias, norm=norm, where=where, gamma=gamma, beta=beta, residual=residual, eps=1e-3, return_sum=True)
    want, sums = by_hand(x, weight, bias, norm, where, gamma, 0.0 if beta is None else beta, residual, 1e-3)
    assert_close(out, want, bound=1e-13)
    assert_close(total, sums, bound=1e-13, what="sum")
    upstream = randn(5, 3, grad=False)
    for mine, theirs in zip(torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("norm", "where"), KINDS)
def test_optional_parts_default_to_nothing(randn, norm, where):
    x, weight = randn(5, 4), randn(3, 4)
    width = 4 if where == "before" else 3
    bare = norm_linear(x, weight, norm=norm, where=where)
    zeros, ones = torch.zeros(width, dtype=torch.float64), torch.ones(width, dtype=torch.float64)
    spelt = norm_linear(
        x, weight, torch.zeros(3, dtype=torch.float64), norm=norm, where=where, gamma=ones, beta=zeros if norm == "layer" else None,
        residual=torch.zeros(5, width, dtype=torch.float64),
    )  # fmt: skip
    assert_close(bare, spelt, bound=1e-14)


@pytest.mark.parametrize(("norm", "where"), KINDS)
def test_any_leading_shape_and_no_tokens_at_all(randn, norm, where):
    weight = randn(3, 4)
    x = randn(2, 5, 4)
    assert torch.equal(norm_linear(x, weight, norm=norm, where=where).flatten(0, 1), norm_linear(x.flatten(0, 1), weight, norm=norm, where=where))
    empty = randn(0, 4)
    out = norm_linear(empty, weight, norm=norm, where=where)
    assert out.shape == (0, 3)
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], torch.zeros_like(weight))


def test_layer_statistics_survive_a_large_mean(randn):
    """E[x^2] - E[x]^2 in float32 loses the variance of values around 10^4; the mean is taken off first here."""
    x = randn(64, 32, grad=False) + 1e4
    weight = torch.eye(32)
    got = norm_linear(x.float(), weight, norm="layer")
    want = norm_linear(x.float().double(), weight.double(), norm="layer")
    assert_close(got, want, bound=1e-3)
    single = x.float()
    naive = (single - single.mean(-1, keepdim=True)) / ((single**2).mean(-1, keepdim=True) - single.mean(-1, keepdim=True) ** 2 + 1e-5).sqrt()
    error = (naive.double() - want).abs().nan_to_num(1e9).max() / want.abs().max()
    assert error > 0.1  # the planted fault shows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_statistics_are_float32(randn, dtype):
    x, weight = (randn(9, 256, grad=False) * 30).to(dtype), torch.eye(256, dtype=dtype)
    out, total = norm_linear(x, weight, residual=x, return_sum=True)
    assert out.dtype == total.dtype == dtype
    want = norm_linear(x.double(), weight.double(), residual=x.double())
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("norm", "where"), KINDS)
def test_gradcheck(randn, norm, where):
    width = 4 if where == "before" else 3
    beta = [randn(width)] if norm == "layer" else []

    def call(x, weight, bias, residual, gamma, *beta):
        return norm_linear(x, weight, bias, norm=norm, where=where, residual=residual, gamma=gamma, beta=beta[0] if beta else None, return_sum=True)

    assert torch.autograd.gradcheck(call, (randn(3, 4), randn(3, 4), randn(3), randn(3, width), randn(width), *beta))


@pytest.mark.parametrize(("norm", "where"), KINDS)
def test_a_returned_sum_is_what_was_normed(randn, norm, where):
    """As rounded: a backward pass that has the sum alone norms the same rows again."""
    width = 32 if where == "before" else 16
    x, weight, residual = randn(9, 32, grad=False).bfloat16(), randn(16, 32, grad=False).bfloat16(), randn(9, width, grad=False).bfloat16()
    out, total = norm_linear(x, weight, norm=norm, where=where, residual=residual, return_sum=True)
    if where == "before":
        assert torch.equal(total, x + residual)
        assert torch.equal(out, norm_linear(total, weight, norm=norm))
    else:
        normed = torch.nn.functional.rms_norm if norm == "rms" else torch.nn.functional.layer_norm
        assert torch.equal(out, normed(total.float(), (16,), eps=1e-5).bfloat16())
    unrounded = norm_linear(x, weight, norm=norm, where=where, residual=residual)
    assert not torch.equal(out, unrounded)  # the planted fault shows: the norm of a sum that nobody has


@pytest.mark.parametrize("which", [0, 1])
def test_gradients_through_the_sum_or_the_result_alone(randn, which):
    inputs = [randn(5, 4), randn(5, 4)]
    weight = randn(3, 4)
    got = torch.autograd.grad(norm_linear(inputs[0], weight, residual=inputs[1], return_sum=True)[which].square().sum(), inputs)
    total = inputs[0] + inputs[1]
    plain = (torch.nn.functional.linear(torch.nn.functional.rms_norm(total, (4,), eps=1e-5), weight), total)[which]
    want = torch.autograd.grad(plain.square().sum(), inputs)
    assert torch.equal(got[0], got[1])
    for mine, theirs in zip(got, want):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_a_sum_without_a_residual_is_x(randn):
    x, weight = randn(5, 4), randn(3, 4)
    out, total = norm_linear(x, weight, return_sum=True)
    assert torch.equal(total, x)
    assert torch.equal(out, norm_linear(x, weight))


def test_a_backend_is_asked_whether_it_gives_the_sum(randn):
    """The word of the request is the option's name, so that a kernel written before it is not called with it."""
    x, weight = randn(5, 4), randn(3, 4)
    assert "return_sum" in check(x, weight, return_sum=True).features
    assert "return_sum" not in check(x, weight, residual=x).features


def test_a_kernel_without_the_sum_is_refused_with_that_reason():
    from gem_core.ops.slot import KernelSlot

    slot = KernelSlot("norm_linear", features=("rms", "before", "residual"))
    slot.bind(reference)
    x = torch.randn(5, 4)
    slot(x, torch.randn(3, 4), residual=x)
    with pytest.raises(RequestError, match="the call uses return_sum"):
        slot(x, torch.randn(3, 4), residual=x, return_sum=True)


def test_a_token_of_zeros_has_finite_results_and_gradients():
    x = torch.zeros(2, 4, requires_grad=True)
    for norm in ("rms", "layer"):
        out = norm_linear(x, torch.eye(4), norm=norm)
        assert torch.equal(out, torch.zeros(2, 4))
        assert torch.isfinite(torch.autograd.grad(out.sum(), x)[0]).all()


def test_flops_are_those_of_the_matmul():
    assert flops(tokens=10, in_features=3, out_features=5) == 2 * 10 * 3 * 5
    assert flops(tokens=[4, 0, 6], in_features=3, out_features=5) == 2 * 10 * 3 * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "batch"}, "norm 'batch' is unknown"),
        ({"where": "inside"}, "where 'inside' is unknown"),
        ({"beta": torch.zeros(4)}, "rms has no beta"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"gamma": torch.zeros(3)}, r"gamma has shape \[3\]"),
        ({"gamma": torch.zeros(3), "where": "after", "residual": torch.zeros(5, 4)}, r"residual has shape \[5, 4\].*Give \[5, 3\]"),
        ({"bias": torch.zeros(4)}, r"bias has shape \[4\]"),
        ({"weight": torch.zeros(4, 3)}, r"weight \[4, 3\]"),
        ({"weight": torch.zeros(3, 4).double()}, "weight is torch.float64"),
        ({"residual": torch.zeros(4, 4)}, r"residual has shape \[4, 4\]"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, message):
    good = {"x": torch.randn(5, 4), "weight": torch.randn(3, 4)}
    norm_linear(**good)
    with pytest.raises(RequestError, match=message):
        norm_linear(**{**good, **change})
