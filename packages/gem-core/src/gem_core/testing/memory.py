"""Contexts that kernels are tested in."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gem_core.ops.padded import plain_precision

__all__ = ["plain_precision", "poisoned_memory"]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN (the largest value for integers), so that an element that a kernel forgets to write shows.

    It is torch's own filling of uninitialised memory, which goes with deterministic algorithms; a missing deterministic form only warns, and that
    warning is not shown here.
    """
    mode = torch.get_deterministic_debug_mode()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
            torch.set_deterministic_debug_mode(mode)
