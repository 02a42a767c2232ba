"""What lives when a run has taken its first step on a GPU is left out of collections, until the run is closed."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from gem_core.bench.step import measure_steps
from gem_core.config.load import LoadedConfig
from gem_core.train.compose import compose
from gem_core.train.garbage import spared

Configure = Callable[..., LoadedConfig]


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


def test_what_lives_is_spared_and_garbage_is_not() -> None:
    dead, kept = weakref.ref(Node()), Node()
    with spared():
        assert dead() is None
        assert gc.get_freeze_count() > 0
        old, young = weakref.ref(kept), weakref.ref(Node())
        del kept
        gc.collect()
        assert old() is not None
        assert young() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), spared():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def counts_of(loaded: LoadedConfig) -> tuple[list[int], int]:
    """Objects left out after each of three steps, and after the run."""
    counts: list[int] = []
    run = compose(loaded)
    try:
        measure_steps(run, steps=2, warmup=1, told=lambda done: counts.append(gc.get_freeze_count()))
    finally:
        run.close()
    return counts, gc.get_freeze_count()


def test_a_run_on_the_cpu_leaves_the_collector_alone(configure: Configure) -> None:
    assert counts_of(configure()) == ([0, 0, 0], 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_run_on_a_gpu_spares_what_lives_after_its_first_step(configure: Configure) -> None:
    counts, after = counts_of(configure("run.device=cuda"))
    assert counts[0] > 10_000
    assert min(counts) > 10_000
    assert after == 0
