"""What the kernels share: activations, rows of jagged tensors, facts about the machine."""
