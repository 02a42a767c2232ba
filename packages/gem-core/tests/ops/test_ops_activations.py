import pytest
import torch
from torch.nn.functional import gelu

from gem_core.ops.activations import ACTIVATIONS, GELU_FAST_COEFFICIENTS, GELU_FAST_MAX_ERROR, GELU_FAST_RANGE, gelu_fast


def grid(low=-8.0, high=8.0, points=400_001):
    return torch.linspace(low, high, points, dtype=torch.float64)


def error_with(coefficients, edge=GELU_FAST_RANGE):
    """Largest error on the real line of the fit with other coefficients."""
    c2, c4, c6 = coefficients
    x = grid(points=80_001)
    inside = x / 2 + c2 * x**2 + c4 * x**4 + c6 * x**6
    return float((torch.where(x.abs() < edge, inside, x.relu()) - gelu(x)).abs().max())


def test_gelu_fast_is_as_close_to_gelu_as_stated():
    x = grid()
    worst = float((gelu_fast(x) - gelu(x)).abs().max())
    assert GELU_FAST_MAX_ERROR * 0.98 < worst < GELU_FAST_MAX_ERROR


def test_gelu_fast_is_continuous_where_the_pieces_meet():
    edge = torch.tensor([GELU_FAST_RANGE, -GELU_FAST_RANGE], dtype=torch.float64)
    inside, outside = gelu_fast(edge * (1 - 1e-9)), gelu_fast(edge * (1 + 1e-9))
    torch.testing.assert_close(inside, outside, rtol=0, atol=1e-7)
    steps = gelu_fast(grid()).diff().abs()
    assert float(steps.max()) < 1.3 * 16 / 400_000  # no jump: the slope nowhere exceeds 1.3


def test_gelu_fast_is_a_least_maximum_fit():
    """Moving a coefficient either way, with the pieces still meeting, raises the largest error; so does another range with its own meeting point."""
    c2, c4, _ = GELU_FAST_COEFFICIENTS
    best = error_with(GELU_FAST_COEFFICIENTS)

    def meeting(c2, c4, edge=GELU_FAST_RANGE):
        return c2, c4, (edge / 2 - c2 * edge**2 - c4 * edge**4) / edge**6

    for step in (-1e-3, 1e-3):
        assert error_with(meeting(c2 + step, c4)) > best * 1.01
        assert error_with(meeting(c2, c4 + step)) > best * 1.01
        assert error_with(meeting(c2, c4, GELU_FAST_RANGE + 20 * step), GELU_FAST_RANGE + 20 * step) > best * 1.01


def test_the_stated_bound_is_not_met_by_a_planted_taylor_polynomial():
    taylor = (0.398942, -0.066490, 0.009974)
    assert error_with(taylor) > 100 * GELU_FAST_MAX_ERROR


def test_gelu_fast_far_out_is_exact_and_has_exact_slopes():
    x = torch.tensor([-1e30, -50.0, 50.0, 1e30], dtype=torch.float32, requires_grad=True)
    y = gelu_fast(x)
    assert torch.equal(y, torch.tensor([0.0, 0.0, 50.0, 1e30]))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.tensor([0.0, 0.0, 1.0, 1.0]))


def test_gelu_fast_slope_stays_near_that_of_gelu():
    x = grid().requires_grad_()
    fast = torch.autograd.grad(gelu_fast(x).sum(), x)[0]
    exact = torch.autograd.grad(gelu(x).sum(), x)[0]
    assert float((fast - exact).abs().max()) < 0.15


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_activations_map_zero_to_zero(name):
    """The references leave padded keys unmasked because of this."""
    zero = torch.zeros(3, dtype=torch.float64)
    assert torch.equal(ACTIVATIONS[name](zero), zero)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_activations_keep_the_dtype_and_stay_finite(name, dtype):
    x = torch.tensor([-30.0, -1.0, 0.5, 30.0], dtype=dtype, requires_grad=True)
    y = ACTIVATIONS[name](x)
    assert y.dtype == dtype
    assert torch.isfinite(y).all()
    assert torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()


def test_no_activation_overwrites_its_input():
    x = torch.randn(9)
    for function in ACTIVATIONS.values():
        before = x.clone()
        function(x)
        assert torch.equal(x, before)
