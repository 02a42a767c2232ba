"""A gate and a residual in one pass."""
