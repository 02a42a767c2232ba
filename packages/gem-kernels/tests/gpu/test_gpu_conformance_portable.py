"""The Hopper kernel of hstu_attention means what the reference means; the portable kernels' suites in tests/ run on CUDA by themselves."""

import pytest
import torch

from gem_core.testing import conformance_suite

pytestmark = pytest.mark.gpu

if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
    TestHstuAttentionGluon = conformance_suite("hstu_attention", backend="gluon", device="cuda")
else:

    def test_hopper():
        pytest.skip("no Hopper GPU")
