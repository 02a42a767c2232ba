"""HSTU attention in portable Triton."""
