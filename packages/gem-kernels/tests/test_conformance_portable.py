"""The portable Triton kernels beside gdpa and jagged_attention mean what the references mean, forward and gradients."""

import torch

from gem_core.testing import conformance_suite

# Under the interpreter each case runs in float32 only; float16 has tests of its own beside each op.
DTYPES = None if torch.cuda.is_available() else ("fp32",)

TestBlockAttention = conformance_suite("block_attention", backend="triton", dtypes=DTYPES)
TestHstuAttention = conformance_suite("hstu_attention", backend="triton", dtypes=DTYPES)
