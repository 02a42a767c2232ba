"""Memory of activations: what each block of the dense part keeps for backward, and which block does what about it."""
