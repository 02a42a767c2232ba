"""What a training step takes on a described machine: collectives by latency and bandwidth, compute, overlap, imbalance and memory."""
