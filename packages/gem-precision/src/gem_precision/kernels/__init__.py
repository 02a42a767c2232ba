"""Kernels that compute in low-precision formats instead of emulating them, held to ``gem_precision.formats``. They need Triton."""
