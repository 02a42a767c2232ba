"""A data set of any size, computed row by row from a seed, whose best possible AUC and NE are known."""
