"""Pooling by attention in portable Triton."""
