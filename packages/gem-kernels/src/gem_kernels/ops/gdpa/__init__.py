"""Generalised dot-product attention."""
