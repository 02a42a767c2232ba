"""One folder an op: kernels, launch, configurations."""
