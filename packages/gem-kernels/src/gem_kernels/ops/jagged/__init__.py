"""Movers of jagged tensors, and the matmul with one matrix a row."""
