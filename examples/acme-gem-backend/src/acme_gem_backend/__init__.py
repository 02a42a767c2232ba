"""A kernel backend that does not come from the GEM repository."""
