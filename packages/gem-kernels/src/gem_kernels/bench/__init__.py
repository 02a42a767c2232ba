"""``gem kernels bench``: every op, backend, published shape and direction, timed beside installed peers in one run."""
