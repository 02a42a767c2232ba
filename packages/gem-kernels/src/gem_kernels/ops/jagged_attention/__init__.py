"""Softmax attention over jagged rows."""
