"""The adapters of jagged_attention on CUDA mean what the contract says, in every dtype that they declare."""

import pytest
import torch

from gem_core.testing import conformance_suite
from gem_core.testing.conformance import make_plan

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    TestVarlen = conformance_suite("jagged_attention", backend="varlen", device="cuda")
    # a case takes FlexAttention seconds to compile
    TestFlex = conformance_suite("jagged_attention", backend="flex", device="cuda", dtypes=("bf16",))
    if make_plan("jagged_attention", backend="fa4", device="cuda").trials:
        TestFa4 = conformance_suite("jagged_attention", backend="fa4", device="cuda")
else:

    def test_cuda():
        pytest.skip("no CUDA device")
