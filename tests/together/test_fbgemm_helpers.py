"""fbgemm's jagged operators as backends, in the environment that holds fbgemm: the conformance suite, as for any other backend."""

import torch

from gem_core.ops import jagged_pad
from gem_core.testing import conformance_suite

TestJaggedPadFbgemm = conformance_suite("jagged_pad", backend="fbgemm", device="cpu")
TestJaggedUnpadFbgemm = conformance_suite("jagged_unpad", backend="fbgemm", device="cpu")
TestJaggedDenseBmmAddFbgemm = conformance_suite("jagged_dense_bmm_add", backend="fbgemm", device="cpu")


def test_case_B07_rows_that_fbgemm_truncates_get_exactly_zero_gradient():
    values, offsets = torch.arange(5.0, requires_grad=True), torch.tensor([0, 3, 5])
    for side, expected in (("right", [1, 2, 0, 3, 4]), ("left", [0, 1, 2, 3, 4])):
        out = jagged_pad(values, offsets, max_length=2, truncate=side, backend="fbgemm")
        (gradient,) = torch.autograd.grad(out, [values], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        assert gradient.tolist() == expected
