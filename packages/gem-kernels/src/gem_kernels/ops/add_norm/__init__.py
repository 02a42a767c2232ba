"""Norms of sums, with a gate."""
