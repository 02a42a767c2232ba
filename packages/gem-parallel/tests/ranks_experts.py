"""Run by test_experts.py, once for each rank: ``experts`` under ``fsdp`` and ``ddp`` in every division of this many ranks; saves what came out.

usage: ranks_experts.py FOLDER RANK WORLD
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_core.spec import GemError, ParallelContext, Tier, Topology
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.dense.ddp import DataParallel
from gem_parallel.dense.experts import ExpertParallel, placement_of
from gem_parallel.dense.fsdp import FullyShard

ROWS, STEPS, TOKENS, DIM = 12, 5, 3, 4
JOINS = ("sum", "concat")


class Ensemble(nn.Module):
    """Four experts of unequal sizes on the tokens of a row; side by side they give 1, 2, 1 and 2 tokens."""

    def __init__(self, join: str) -> None:
        super().__init__()
        self.gives = [1, 2, 1, 2] if join == "concat" else [6] * 4
        self.join, self.held, self.exchange = join, range(4), None
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(TOKENS * DIM, width), nn.Tanh(), nn.Linear(width, n * DIM)) for width, n in zip((5, 3, 7, 2), self.gives)
        )
        self.down = nn.Linear(6, TOKENS)

    def share_out(self, held: range, exchange: Any) -> None:
        self.held, self.exchange = held, exchange

    def forward(self, x: Tensor) -> Tensor:
        seen = x if self.exchange is None else self.exchange.join(x)
        parts = [self.experts[i](seen.flatten(1)).view(-1, self.gives[i], DIM) for i in self.held]
        mixed = torch.cat(parts, dim=1) if self.join == "concat" else sum(parts[1:], start=parts[0])
        if self.exchange is not None:
            mixed = self.exchange.give_back(mixed, self.gives if self.join == "concat" else None)
        return x + self.down(mixed.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers, of which the second has a list of its own, and an ensemble in no block."""

    def __init__(self, join: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(5, TOKENS * DIM)
        self.layers = nn.ModuleList([Ensemble(join), nn.Sequential(nn.LayerNorm(DIM), Ensemble(join))])
        self.last = Ensemble(join)
        self.head = nn.Linear(TOKENS * DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).view(-1, TOKENS, DIM)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(x).flatten(1))[:, 0]  # type: ignore[no-any-return]


def share(rank: int, world: int, step: int) -> Tensor:
    """This rank's rows: even parts; all on the last rank at step 1, two on each but the last at step 2, none anywhere at step 3."""
    cuts = {1: [0] * world + [ROWS], 2: [*range(0, 2 * world, 2), ROWS], 3: [0] * (world + 1)}.get(
        step, [ROWS * r // world for r in range(world + 1)]
    )
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))[cuts[rank] : cuts[rank + 1]]


def train(module: nn.Module, called: nn.Module, rank: int, world: int, *, micro: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Some steps on the mean loss of the global batch, evaluating in between; this rank's part of the losses, and the weights that it holds.

    Plain SGD, since AdamW would hide a factor on a gradient.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rows in share(rank, world, step).tensor_split(micro):
            loss = (called(rows) - 0.5).square().sum() / ROWS
            (loss * world).backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
        with torch.no_grad():
            called(share(rank, world, 1 if step % 2 else 0))
    return losses, {name: held for name, p in module.named_parameters() if (held := whole(p.detach())).numel()}


def whole(tensor: Tensor) -> Tensor:
    """A parameter whole; empty if this rank is not in its mesh."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    inside = tensor.device_mesh.get_coordinate() is not None
    return tensor.full_tensor().clone() if inside else torch.empty(0)


def spread(join: str, degree: int, dense: str, replicas: int, context: ParallelContext) -> tuple[nn.Module, nn.Module, list[Any]]:
    """A model under the two strategies: itself, what is called in its place, and the strategies."""
    model = Model(join)
    experts = ExpertParallel(degree=degree)
    experts.apply(model, context)
    second: Any = DataParallel() if dense == "ddp" else FullyShard(replicas=replicas)
    return model, second.apply(model, context), [experts, second]


def layouts(world: int) -> Sequence[tuple[int, str, int]]:
    """``(degree, dense strategy, replicas)``."""
    degrees = [n for n in (1, 2, 4) if world % n == 0]
    return [(degree, "fsdp", r) for degree in degrees for r in (1, 2, 4) if world % (degree * r) == 0] + [(degree, "ddp", 1) for degree in degrees]


def refused(world: int, degree: int, tiers: tuple[Tier, ...] = (), model: nn.Module | None = None) -> str:
    context = ParallelContext(rank=dist.get_rank(), world=world, device="cpu", topology=Topology(world=world, device="cpu", tiers=tiers))
    try:
        ExpertParallel(degree=degree).apply(Model("sum") if model is None else model, context)
    except GemError as error:
        return str(error)
    return "no error"


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    saved: dict[str, Any] = {"runs": {}, "micro": {}, "traffic": {}, "held": {}, "facts": {}}
    for join in JOINS:
        for layout in layouts(world):
            model, called, strategies = spread(join, *layout, context)
            saved["runs"][join, layout] = train(model, called, rank, world)
            saved["facts"][layout] = [dict(strategy.describe()) for strategy in strategies]
    for layout in layouts(world):
        model, called, strategies = spread("sum", *layout, context)
        saved["micro"][layout] = train(model, called, rank, world, micro=3)
    for join in JOINS:
        model, called, strategies = spread(join, 2, "fsdp", 1, context)
        strategies[0].traffic.take()
        LEDGER.start(timed=False)
        called(share(rank, world, 2)).sum().backward()
        saved["traffic"][join] = (strategies[0].traffic.take(), strategies[1].traffic.take(), [asdict(entry) for entry in LEDGER.stop()])
        saved["held"][join] = {name: p.to_local().numel() for name, p in model.named_parameters() if isinstance(p, DTensor)}
        assert placement_of(model).degree == 2
    saved["refused"] = {
        "ranks": refused(world, 3),
        "host": refused(world, 4, (Tier(name="host", size=2, bandwidth=1e9),)),
        "experts": refused(world, 4, model=Uneven()),
        "no ensemble": refused(world, 2, model=nn.Linear(2, 2)),
    }
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


class Uneven(nn.Module):
    """An ensemble of six experts."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Ensemble("sum")
        self.mix.experts.extend(nn.Linear(2, 2) for _ in range(2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
