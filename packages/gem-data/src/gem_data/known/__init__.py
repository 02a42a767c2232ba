"""Public data sets by name, read from their raw files as their publishers hand them out."""
