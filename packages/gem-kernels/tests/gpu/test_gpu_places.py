"""Gradients of parts of one tensor lie side by side and hold the bits of contiguous ones: each attention op and backend on CUDA."""

import pytest
import torch
from gem_kernels_places import CASES, assert_side_by_side

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = (700, 0, 65, 1, 128, 63)


@pytest.mark.parametrize("sizes", [{"dim": 128}, {"dim": 40, "heads": 3}], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_portable_kernels(case, sizes):
    assert_side_by_side(case, lengths=LENGTHS, dtype=torch.bfloat16, **sizes)


@pytest.mark.skipif(not hopper, reason="no Hopper GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("block")])
def test_kernels_for_hopper(case, dim):
    assert_side_by_side(case, lengths=LENGTHS, dtype=torch.bfloat16, dim=dim, backend="gluon")


@pytest.mark.parametrize("case", CASES)
def test_case_B03_no_tokens_and_tokens_of_one_row(case):
    for lengths in ((0, 0), (1,), (300,)):
        assert_side_by_side(case, lengths=lengths, dtype=torch.bfloat16, dim=128)
