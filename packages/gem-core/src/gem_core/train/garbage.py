"""Garbage collection in a run whose host launches for a GPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def spared() -> Iterator[None]:
    """A context in which collections leave out what lives at its start.

    A full collection walks through all that torch and its libraries keep: 0.2 s, in which nothing is launched and a GPU's queue runs empty.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
