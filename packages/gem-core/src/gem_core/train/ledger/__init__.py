"""Where the time of a training step goes, on each rank and between them."""
