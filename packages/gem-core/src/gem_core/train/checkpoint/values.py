"""The trainer's small values in a checkpoint: random states of all ranks, and the check that all numbers are finite."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gem_core.spec import RunFailed
from gem_core.train.checkpoint.store import KEPT
from gem_core.train.world import World


def seed_random_state(seed: int, world: World) -> None:
    """Seed torch, numpy and Python, each rank in its own way: dropout differs from rank to rank. Weights and tables have seeds of their own."""
    own = (seed * 1_000_003 + world.rank) % 2**32
    torch.manual_seed(own)
    np.random.seed(own)
    random.seed(own)


def random_state(world: World) -> list[dict[str, Any]]:
    """The random states of all ranks. Collective."""
    _kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    own = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(world.device) if world.device.type == "cuda" else torch.zeros(0, dtype=torch.uint8),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy_tail": torch.tensor([float(position), float(has_gauss), float(gauss)], dtype=torch.float64),
        "python": torch.tensor(random.getstate()[1], dtype=torch.int64),
        "python_tail": random.getstate()[2],
    }
    return world.gather_objects(own)


def restore_random_state(states: list[dict[str, Any]], world: World) -> None:
    """Continue this rank's random states; with more ranks than were saved, the new ones keep the states they have from their seed."""
    if world.rank >= len(states):
        return
    own = states[world.rank]
    torch.set_rng_state(own["torch"])
    if world.device.type == "cuda" and own["cuda"].numel():
        torch.cuda.set_rng_state(own["cuda"], world.device)
    position, has_gauss, gauss = own["numpy_tail"].tolist()
    np.random.set_state(("MT19937", own["numpy"].numpy().astype(np.uint32), int(position), int(has_gauss), gauss))
    random.setstate((3, tuple(own["python"].tolist()), own["python_tail"]))


def refuse_non_finite(value: Any, name: str) -> None:
    """Raise RunFailed naming the first tensor in nested values that holds a value that is not finite."""
    for path, tensor in _tensors(value, name):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RunFailed("a checkpoint", f"{path} holds a value that is not finite", KEPT)


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{name}/{index}")
