"""Error bounds. An error is the largest difference, relative to the largest true value: one number a tensor, whatever its elements."""

import torch
from torch import Tensor

FACTOR = 2.0
"""A kernel may be this many times as far from the float64 truth as plain torch of the same precision is."""

SLACK = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""What it may be off in any case, a few units in the last place of the terms that are summed: where plain torch happens to be exact (a softmax over
one key has a gradient of exactly 0) the factor allows nothing, and a kernel that subtracts two equal sums is off by their rounding."""


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference in float64. Infinities must agree; a NaN, or an infinity on one side only, counts as infinity."""
    a, e = actual.detach().to("cpu", torch.float64), expected.detach().to("cpu", torch.float64)
    if a.shape != e.shape:
        raise AssertionError(f"shape {list(a.shape)}, expected {list(e.shape)}")
    finite = torch.isfinite(e)
    if not torch.equal(a[~finite], e[~finite]) or not bool(torch.isfinite(a[finite]).all()):
        return float("inf")
    return float((a[finite] - e[finite]).abs().max()) if bool(finite.any()) else 0.0


def _scale(expected: Tensor) -> float:
    values = expected.detach().double()
    values = values[torch.isfinite(values)]
    return float(values.abs().max()) if values.numel() else 0.0


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value (over 1 where all of those are 0); infinity for a NaN or an unexpected infinity.

    Raises:
        AssertionError: the shapes differ.
    """
    return largest_difference(actual, expected) / (_scale(expected) or 1.0)


def assert_close(actual: Tensor, expected: Tensor, *, bound: float, what: str = "result") -> None:
    """Raise AssertionError unless the relative error is at most ``bound``."""
    error = relative_error(actual, expected)
    if not error <= bound:
        raise AssertionError(f"{what}: relative error {error:.3g} is above {bound:.3g}")


def assert_as_accurate(actual: Tensor, plain: Tensor, truth: Tensor, *, what: str = "result", factor: float = FACTOR) -> None:
    """Raise AssertionError unless ``actual`` is at most ``factor`` times as far from ``truth`` as ``plain`` is, plus ``SLACK``.

    Args:
        actual: the kernel's result; its dtype sets the slack.
        plain: plain torch's result in the same dtype.
        truth: the float64 result for the same, already rounded, inputs.
        what: name of the tensor for the message.
        factor: allowed multiple of plain torch's error.
    """
    if actual.dtype != plain.dtype:
        raise AssertionError(f"{what}: dtype {actual.dtype}, expected {plain.dtype}")
    error, base = largest_difference(actual, truth), largest_difference(plain, truth)
    bound = factor * base + SLACK.get(actual.dtype, 0.0) * max(_scale(truth), 1.0)
    if not error <= bound:
        raise AssertionError(f"{what}: error {error:.3g} is above {bound:.3g} ({factor:g} times plain torch's {base:.3g}, plus slack)")
