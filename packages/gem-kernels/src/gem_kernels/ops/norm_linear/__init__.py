"""Norms next to a matmul in portable Triton."""
