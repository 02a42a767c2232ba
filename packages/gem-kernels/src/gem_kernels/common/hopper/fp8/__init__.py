"""Attention on the FP8 tensor cores of Hopper, forward: the casts of its operands, the kernel, its launch."""
