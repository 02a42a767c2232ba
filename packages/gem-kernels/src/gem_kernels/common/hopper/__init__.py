"""Attention kernels for Hopper in Gluon, shared by ``jagged_attention`` (softmax) and ``gdpa`` (pointwise activation)."""
