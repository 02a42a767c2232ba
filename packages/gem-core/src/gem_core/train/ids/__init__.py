"""Ids without a fixed vocabulary: which raw ids have a row of their own, how they get one and how they lose it."""
