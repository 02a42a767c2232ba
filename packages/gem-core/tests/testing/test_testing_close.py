import math

import pytest
import torch

from gem_core.testing import assert_as_accurate, assert_close, relative_error
from gem_core.testing.close import largest_difference


def test_relative_error_is_the_largest_difference_over_the_largest_value():
    assert relative_error(torch.tensor([1.0, 4.0]), torch.tensor([1.5, 4.0])) == pytest.approx(0.125)
    assert relative_error(torch.tensor([0.5]), torch.tensor([0.0])) == 0.5
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_anything_that_is_not_finite_is_infinitely_wrong(value):
    assert relative_error(torch.tensor([value, 1.0]), torch.tensor([1.0, 1.0])) == math.inf
    with pytest.raises(AssertionError, match="relative error inf"):
        assert_close(torch.tensor([value]), torch.tensor([1.0]), bound=1e30)


def test_expected_infinities_must_be_met():
    expected = torch.tensor([-math.inf, 2.0])
    assert largest_difference(torch.tensor([-math.inf, 2.5]), expected) == 0.5
    assert largest_difference(torch.tensor([-1e30, 2.0]), expected) == math.inf
    assert largest_difference(torch.tensor([math.inf, 2.0]), expected) == math.inf


def test_shapes_must_agree():
    with pytest.raises(AssertionError, match=r"shape \[2\], expected \[1, 2\]"):
        relative_error(torch.zeros(2), torch.zeros(1, 2))


def test_assert_close_names_what_is_wrong():
    assert_close(torch.tensor([1.0]), torch.tensor([1.001]), bound=2e-3)
    with pytest.raises(AssertionError, match=r"gradient of q: relative error"):
        assert_close(torch.tensor([1.0]), torch.tensor([1.1]), bound=2e-3, what="gradient of q")


@pytest.mark.parametrize(("error", "passes"), [(0.0, True), (1.9e-2, True), (2.1e-2, False), (1.0, False)])
def test_a_kernel_may_be_twice_as_far_off_as_plain_torch(error, passes):
    truth = torch.tensor([3.0, -1.0], dtype=torch.float64)
    plain, actual = (truth + 1e-2).float(), (truth + error).float()
    if passes:
        assert_as_accurate(actual, plain, truth)
    else:
        with pytest.raises(AssertionError, match=r"2 times plain torch's 0\.01"):
            assert_as_accurate(actual, plain, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_unit_in_the_last_place_is_allowed_where_plain_torch_is_exact(dtype):
    truth = torch.ones(3, dtype=torch.float64)
    plain, step = truth.to(dtype), torch.finfo(dtype).eps
    assert_as_accurate(plain + step, plain, truth)
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(plain + 600 * step, plain, truth)


def test_dtypes_must_agree():
    with pytest.raises(AssertionError, match=r"dtype torch\.float64, expected torch\.float32"):
        assert_as_accurate(torch.ones(1).double(), torch.ones(1), torch.ones(1).double())
