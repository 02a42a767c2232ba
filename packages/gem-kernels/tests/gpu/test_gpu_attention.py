"""jagged_attention and gdpa on CUDA: the contract for every backend in every dtype that it declares."""

import pytest
import torch

from gem_core.testing import conformance_suite

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    TestJaggedAttentionTriton = conformance_suite("jagged_attention", backend="triton", device="cuda")
    TestJaggedAttentionGluon = conformance_suite("jagged_attention", backend="gluon", device="cuda")
    TestGdpaGluon = conformance_suite("gdpa", backend="gluon", device="cuda")
else:

    def test_cuda():
        pytest.skip("no CUDA device")
