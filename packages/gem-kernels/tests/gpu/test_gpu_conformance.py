"""The contract on CUDA, in every dtype that a backend declares."""

import pytest
import torch

from gem_core.testing import conformance_suite

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    TestGdpaTriton = conformance_suite("gdpa", backend="triton", device="cuda")
    TestJaggedAttentionSdpa = conformance_suite("jagged_attention", backend="sdpa", device="cuda", dtypes=("fp64", "bf16", "fp16"))
    TestPooledAttentionSdpa = conformance_suite("pooled_attention", backend="sdpa", device="cuda", dtypes=("fp64", "bf16", "fp16"))
else:

    def test_cuda():
        pytest.skip("no CUDA device")
