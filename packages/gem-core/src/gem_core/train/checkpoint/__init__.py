"""Checkpoints that outlive their layout: tensors by logical name, whatever the number of ranks, the sharding and the embedding engine."""
