"""Run by test_delayed.py, once for each rank: steps of several micro-batches with gradients reduced over replicas in the last, or in each.

usage: ranks_delayed.py FOLDER RANK WORLD
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_fsdp import Blocks, whole
from torch import Tensor, nn

from gem_core.spec import GemError, ParallelContext, Topology
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.dense.fsdp import FullyShard

ROWS, MICRO, STEPS = 12, 3, 2
FSDP: dict[str, dict[str, Any]] = {
    "last": {"replicas": 2},
    "each": {"replicas": 2, "reduce": "each"},
    "kept": {"replicas": 2, "reshard": False},
    "one shard": {"replicas": 4},
    "no replicas": {},
}
Skips = Callable[[int, int], frozenset[str]]
"""Of a micro-batch and a rank: parts of the model that it leaves out."""


class Scaled(nn.Module):
    """A block one of whose parameters can be left out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale, self.without = inner, nn.Parameter(torch.ones(7)), False

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.without else self.inner(x) * self.scale  # type: ignore[no-any-return]


class Gated(Blocks):
    """Blocks that can be left out, a parameter outside them and one inside that can be."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(7))
        self.layers[0] = Scaled(self.layers[0])
        self.without: frozenset[str] = frozenset()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x) * (1 if "extra" in self.without else self.extra)
        self.layers[0].without = "scale" in self.without
        for i, layer in enumerate(self.layers):
            if f"layers.{i}" not in self.without:
                x = x + layer(x)
        return self.head(x)[:, 0]


def no_skips(_micro: int, _rank: int) -> frozenset[str]:
    return frozenset()


def extra_in_one(micro: int, rank: int) -> frozenset[str]:
    """A parameter that one rank uses in one micro-batch only, and never in the last."""
    return frozenset() if micro == 0 and rank == 1 else frozenset({"extra"})


def micro_rows(rank: int, world: int, step: int, micro: int) -> Tensor:
    rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + micro))
    return rows[ROWS * rank // world : ROWS * (rank + 1) // world]


def train(strategy: Any, module: nn.Module, gated: Gated, skips: Skips, rank: int, world: int) -> dict[str, Any]:
    """Gradients of the first step and weights after the last, whole."""
    optimizer = torch.optim.AdamW(gated.parameters(), lr=0.05)
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            with strategy.micro_batch(last=micro + 1 == MICRO):
                gated.without = skips(micro, rank)
                loss = module(micro_rows(rank, world, step, micro)).square().sum() / ROWS
                (loss * world).backward()
        gradients = gradients or {name: whole(p.grad).clone() for name, p in gated.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"gradients": gradients, "weights": {name: whole(p.detach()).clone() for name, p in gated.named_parameters()}}


def one_process(skips: Skips, world: int) -> dict[str, Any]:
    """The same on one process: ranks' rows follow one another."""
    gated = Gated()
    optimizer = torch.optim.AdamW(gated.parameters(), lr=0.05)
    gradients: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            for rank in range(world):
                gated.without = skips(micro, rank)
                (gated(micro_rows(rank, world, step, micro)).square().sum() / ROWS).backward()
        gradients = gradients or {name: p.grad.clone() for name, p in gated.named_parameters() if p.grad is not None}
        optimizer.step()
    return {"gradients": gradients, "weights": {name: p.detach().clone() for name, p in gated.named_parameters()}}


def sharded(context: ParallelContext, skips: Skips, **words: Any) -> dict[str, Any]:
    strategy, gated = FullyShard(**words), Gated()
    strategy.apply(gated, context)
    done = train(strategy, gated, gated, skips, context.rank, context.world)
    return {**done, "sent": strategy.traffic.take()}


def refused(context: ParallelContext, skips: Skips) -> str:
    try:
        sharded(context, skips, replicas=2)
    except GemError as error:
        return str(error)
    return "no error"


def copied(context: ParallelContext, skips: Skips) -> dict[str, Any]:
    """``ddp``, with the number of buckets that were reduced."""
    strategy, gated = DataParallel(), Gated()
    module: Any = strategy.apply(gated, context)
    reduced: list[int] = []

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced.append(bucket.index())
        future = dist.all_reduce(bucket.buffer().div_(context.world), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])  # type: ignore[no-any-return]

    module.register_comm_hook(None, hook)
    return {**train(strategy, module, gated, skips, context.rank, context.world), "reduced": len(reduced)}


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    saved: dict[str, Any] = {name: sharded(context, no_skips, **words) for name, words in FSDP.items()}
    saved["ddp"] = copied(context, no_skips)
    saved["ddp, unused"] = copied(context, extra_in_one)
    saved["without a block at first"] = sharded(context, lambda micro, _: frozenset({"layers.1"} if micro == 0 else ()), replicas=2)
    saved["each, without a block at last"] = sharded(context, last_without("layers.1"), replicas=2, reduce="each")
    saved["refused block"] = refused(context, last_without("layers.1"))
    saved["refused parameter"] = refused(context, last_without("scale"))
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def last_without(part: str) -> Skips:
    return lambda micro, _: frozenset({part} if micro + 1 == MICRO else ())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
