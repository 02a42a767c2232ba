"""Every backend of this package means what the references mean, forward and gradients."""

import torch

from gem_core.testing import conformance_suite

# The interpreter takes about a second a case: there every case runs in one dtype, and test_gdpa.py and test_jagged_attention.py add float16.
DTYPES = None if torch.cuda.is_available() else ("fp32",)
TestGdpaTriton = conformance_suite("gdpa", backend="triton", dtypes=DTYPES)
TestJaggedAttentionTriton = conformance_suite("jagged_attention", backend="triton", dtypes=DTYPES)

# torch's fused CPU kernel takes exponentials to 20 bits: test_sdpa.py holds float32 to that.
TestJaggedAttentionSdpa = conformance_suite("jagged_attention", backend="sdpa", dtypes=("fp64", "bf16", "fp16"))
TestPooledAttentionSdpa = conformance_suite("pooled_attention", backend="sdpa", dtypes=("fp64", "bf16", "fp16"))
