"""Bringing ids to the ranks that keep them, and their rows back."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from gem_core.train.ids.layout import Ints
from gem_core.train.world import World

Parts = Sequence[Sequence[Ints]]
"""``parts[table][rank]`` ``[n, columns]``; every part has as many columns."""


def exchange(world: World, parts: Parts) -> list[list[Ints]]:
    """Give ``parts[t][r]`` to rank ``r``; the result holds under ``[t][r]`` what came from rank ``r``. Collective, over host tensors."""
    if world.size == 1:
        return [list(of_ranks) for of_ranks in parts]
    sent = torch.tensor([[of_ranks[rank].shape[0] for of_ranks in parts] for rank in range(world.size)])
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    flat = torch.from_numpy(np.concatenate([of_ranks[rank] for rank in range(world.size) for of_ranks in parts]))
    out = flat.new_empty(int(got.sum()), flat.shape[1])
    dist.all_to_all_single(out, flat, got.sum(1).tolist(), sent.sum(1).tolist())
    pieces = np.split(out.numpy(), np.cumsum(got.flatten().tolist())[:-1])
    return [[pieces[rank * len(parts) + table] for rank in range(world.size)] for table in range(len(parts))]
