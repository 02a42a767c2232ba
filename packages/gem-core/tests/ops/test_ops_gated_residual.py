import pytest
import torch

from gem_core.ops import gated_residual
from gem_core.ops.gated_residual import flops
from gem_core.spec import RequestError


def test_it_matches_numbers_by_hand():
    x, gate, residual = (torch.tensor(values, dtype=torch.float64) for values in ([1.0, -2.0, 0.5], [3.0, 4.0, 0.0], [10.0, 20.0, 30.0]))
    assert gated_residual(x, gate, residual).tolist() == [13.0, 12.0, 30.0]


@pytest.mark.parametrize("shape", [(0, 3), (), (5,), (2, 3, 4)])
def test_gradients_of_any_shape(randn, shape):
    inputs = [randn(*shape) for _ in range(3)]
    upstream = randn(*shape, grad=False)
    out = gated_residual(*inputs)
    assert out.shape == shape
    x, gate, _ = inputs
    for got, want in zip(torch.autograd.grad(out, inputs, upstream), (upstream * gate, upstream * x, upstream), strict=True):
        assert torch.equal(got, want)


def test_16_bits_are_rounded_once():
    """(1 + 2^-7)^2 is 1 + 2^-6 + 2^-14, whose last part bfloat16 loses."""
    x, residual = torch.tensor([1 + 2.0**-7]).bfloat16(), torch.tensor([-1 - 2.0**-6]).bfloat16()
    assert gated_residual(x, x, residual).item() == 2.0**-14
    assert (x * x + residual).item() == 0.0  # the planted fault shows


def test_elements_count_no_flops():
    assert flops() == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gate": torch.zeros(5, 1)}, r"gate has shape \[5, 1\].*Give \[5, 4\]"),
        ({"residual": torch.zeros(4)}, r"residual has shape \[4\]"),
        ({"residual": torch.zeros(5, 4).double()}, "residual is torch.float64"),
        ({"x": torch.zeros(5, 4, dtype=torch.int64)}, "dtype torch.int64"),
    ],
)
def test_bad_input_is_refused_before_any_work(change, message):
    good = {name: torch.zeros(5, 4) for name in ("x", "gate", "residual")}
    gated_residual(**good)
    with pytest.raises(RequestError, match=message):
        gated_residual(**{**good, **change})
