"""Choosing kernels: which backend runs an op for a request, and why the others do not. Imports no torch."""
