"""Kernels that make low-precision formats fast: casts in Triton; the products are the library's."""
