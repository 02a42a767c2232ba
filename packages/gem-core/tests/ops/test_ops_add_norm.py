import pytest
import torch

from gem_core.ops import add_norm, norm_linear
from gem_core.ops.add_norm import check, flops
from gem_core.spec import RequestError
from gem_core.testing import assert_close

NORMS = ("rms", "layer")


def by_hand(x, residual, gamma, beta, gate, norm, eps):
    """One token at a time, in Python sums."""
    out = []
    for t, token in enumerate(x + residual):
        n = len(token)
        mean = sum(token) / n if norm == "layer" else 0.0
        spread = sum((e - mean) ** 2 for e in token) / n
        out.append((torch.stack([(e - mean) / (spread + eps) ** 0.5 for e in token]) * gamma + beta) * gate[t])
    return torch.stack(out)


@pytest.mark.parametrize("norm", NORMS)
def test_it_matches_sums_by_hand(randn, norm):
    x, residual, gate, gamma = randn(5, 4), randn(5, 4), randn(5, 4), randn(4)
    beta = randn(4) if norm == "layer" else None
    inputs = [x, residual, gate, gamma, *([] if beta is None else [beta])]
    out = add_norm(x, residual, norm=norm, gamma=gamma, beta=beta, gate=gate, eps=1e-3)
    want = by_hand(x, residual, gamma, 0.0 if beta is None else beta, gate, norm, 1e-3)
    assert_close(out, want, bound=1e-13)
    upstream = randn(5, 4, grad=False)
    for mine, theirs in zip(torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(want, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_optional_parts_default_to_nothing(randn, norm):
    x = randn(5, 4)
    zeros, ones = torch.zeros(5, 4, dtype=torch.float64), torch.ones(5, 4, dtype=torch.float64)
    beta = zeros[0] if norm == "layer" else None
    assert_close(add_norm(x, norm=norm), add_norm(x, zeros, norm=norm, gamma=ones[0], beta=beta, gate=ones), bound=1e-14)


@pytest.mark.parametrize("norm", NORMS)
def test_it_is_the_norm_of_norm_linear(randn, norm):
    x, residual, gamma = randn(5, 4), randn(5, 4), randn(4)
    one = torch.eye(4, dtype=torch.float64)
    assert_close(add_norm(x, residual, norm=norm, gamma=gamma), norm_linear(x, one, norm=norm, gamma=gamma, residual=residual), bound=1e-14)


def test_any_leading_shape_and_no_tokens_at_all(randn):
    x, gate = randn(2, 5, 4), randn(2, 5, 4)
    assert torch.equal(add_norm(x, gate=gate).flatten(0, 1), add_norm(x.flatten(0, 1), gate=gate.flatten(0, 1)))
    assert add_norm(randn(4)).shape == (4,)
    empty, gamma = randn(0, 4), randn(4)
    out = add_norm(empty, gamma=gamma)
    assert out.shape == (0, 4)
    assert torch.equal(torch.autograd.grad(out.sum(), gamma)[0], torch.zeros(4, dtype=torch.float64))


def test_what_is_given_to_concat_stands_between_the_gate_and_the_result(randn):
    """All gradients too, of a gate that is read twice."""
    x, residual, gate, beside, gamma, beta = randn(2, 3, 4), randn(2, 3, 4), randn(2, 3, 4), randn(2, 3, 4), randn(4), randn(4)
    out = add_norm(x, residual, gamma=gamma, beta=beta, gate=gate, concat=beside)
    want = torch.cat([gate, beside, add_norm(x, residual, gamma=gamma, beta=beta, gate=gate)], -1)
    assert torch.equal(out, want)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    leaves = (x, residual, gate, beside, gamma, beta)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), leaves) for y in (out, want)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_and_the_gate_are_rounded_once(randn, dtype):
    x, residual, gate = ((randn(9, 256, grad=False) * 30).to(dtype) for _ in range(3))
    out = add_norm(x, residual, norm="rms", gate=gate)
    assert out.dtype == dtype
    want = add_norm(x.double(), residual.double(), norm="rms", gate=gate.double())
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps / 2 + 1e-5, atol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_gradcheck(randn, norm):
    beta = [randn(4)] if norm == "layer" else []

    def call(x, residual, gamma, gate, *beta):
        return add_norm(x, residual, norm=norm, gamma=gamma, beta=beta[0] if beta else None, gate=gate)

    assert torch.autograd.gradcheck(call, (randn(3, 4), randn(3, 4), randn(4), randn(3, 4), *beta))


def test_the_request_says_what_is_used(randn):
    x = randn(3, 4)
    assert check(x, norm="rms").features == {"rms"}
    assert check(x, x, gamma=x[0], gate=x).features == {"layer", "affine", "residual", "gate"}
    assert check(x, gate=x, concat=x).features == {"layer", "gate", "concat"}
    assert flops() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "batch"}, "norm 'batch' is unknown"),
        ({"norm": "rms", "beta": torch.zeros(4)}, "rms has no beta"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"gamma": torch.zeros(3)}, r"gamma has shape \[3\]"),
        ({"beta": torch.zeros(1, 4)}, r"beta has shape \[1, 4\]"),
        ({"gate": torch.zeros(5, 1)}, r"gate has shape \[5, 1\]"),
        ({"concat": torch.zeros(5, 4)}, "there is a concat and no gate"),
        ({"gate": torch.zeros(5, 4), "concat": torch.zeros(5, 8)}, r"concat has shape \[5, 8\]"),
        ({"gate": torch.zeros(5, 4), "concat": torch.zeros(5, 4).double()}, "concat is torch.float64"),
        ({"residual": torch.zeros(4)}, r"residual has shape \[4\]"),
        ({"gate": torch.zeros(5, 4).double()}, "gate is torch.float64"),
        ({"x": torch.tensor(1.0)}, r"x has shape \[\]"),
        ({"x": torch.zeros(5, 0)}, r"x has shape \[5, 0\]"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, message):
    good = {"x": torch.randn(5, 4)}
    add_norm(**good)
    with pytest.raises(RequestError, match=message):
        add_norm(**{**good, **change})
