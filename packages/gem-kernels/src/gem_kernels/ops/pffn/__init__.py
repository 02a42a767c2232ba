"""The personalised feed-forward block around the gdpa kernels."""
