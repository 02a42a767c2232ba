"""The contract on CUDA, in every dtype that the kernels beside gdpa and jagged_attention declare."""

import pytest
import torch

from gem_core.testing import conformance_suite

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    TestBlockAttention = conformance_suite("block_attention", backend="triton", device="cuda")
    TestHstuAttention = conformance_suite("hstu_attention", backend="triton", device="cuda")
    TestPooledAttention = conformance_suite("pooled_attention", backend="triton", device="cuda")
    TestNormLinear = conformance_suite("norm_linear", backend="triton", device="cuda")
    TestAddNorm = conformance_suite("add_norm", backend="triton", device="cuda")
    TestGatedResidual = conformance_suite("gated_residual", backend="triton", device="cuda")
    TestPffn = conformance_suite("pffn", backend="triton", device="cuda")
    TestJaggedConcat = conformance_suite("jagged_concat", backend="triton", device="cuda")
    TestJaggedSplit = conformance_suite("jagged_split", backend="triton", device="cuda")
    TestJaggedPad = conformance_suite("jagged_pad", backend="triton", device="cuda")
    TestJaggedUnpad = conformance_suite("jagged_unpad", backend="triton", device="cuda")
    TestJaggedDenseBmmAdd = conformance_suite("jagged_dense_bmm_add", backend="triton", device="cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        TestHstuAttentionGluon = conformance_suite("hstu_attention", backend="gluon", device="cuda")
        TestPooledAttentionGluon = conformance_suite("pooled_attention", backend="gluon", device="cuda")
        TestPffnGluon = conformance_suite("pffn", backend="gluon", device="cuda")
else:

    def test_cuda():
        pytest.skip("no CUDA device")
