"""The portable Triton kernels beside gdpa and jagged_attention mean what the references mean, forward and gradients."""

import torch

from gem_core.testing import conformance_suite

# Under the interpreter most cases run in float32 only; float16 has tests of its own beside each op.
DTYPES = None if torch.cuda.is_available() else ("fp32",)
QUICK = None if torch.cuda.is_available() else ("fp32", "fp16")

TestBlockAttention = conformance_suite("block_attention", backend="triton", dtypes=DTYPES)
TestHstuAttention = conformance_suite("hstu_attention", backend="triton", dtypes=DTYPES)
TestNormLinear = conformance_suite("norm_linear", backend="triton", dtypes=QUICK)
TestAddNorm = conformance_suite("add_norm", backend="triton", dtypes=QUICK)
TestGatedResidual = conformance_suite("gated_residual", backend="triton", dtypes=QUICK)
TestPooledAttention = conformance_suite("pooled_attention", backend="triton", dtypes=DTYPES)
TestPffn = conformance_suite("pffn", backend="triton", dtypes=DTYPES)
TestJaggedConcat = conformance_suite("jagged_concat", backend="triton", dtypes=("fp64", "bf16"))
TestJaggedSplit = conformance_suite("jagged_split", backend="triton", dtypes=("fp64", "bf16"))
TestJaggedPad = conformance_suite("jagged_pad", backend="triton", dtypes=("fp64", "bf16"))
TestJaggedUnpad = conformance_suite("jagged_unpad", backend="triton", dtypes=("fp64", "bf16"))
TestJaggedDenseBmmAdd = conformance_suite("jagged_dense_bmm_add", backend="triton", dtypes=DTYPES)
