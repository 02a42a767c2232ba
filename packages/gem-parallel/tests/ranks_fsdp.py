"""Run by test_fsdp.py, once for each rank: the ``fsdp`` strategy in every grid of this many ranks; saves the weights after some steps.

usage: ranks_fsdp.py FOLDER RANK WORLD
"""

import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from gem_core.spec import GemError, ParallelContext, Topology
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.dense.experts import Placement
from gem_parallel.dense.fsdp import FullyShard, units_of, watch

ROWS, STEPS = 12, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "no prefetch": {"prefetch": 0},
    "two ahead": {"prefetch": 2, "replicas": 2},
    "one kept": {"keep": ("layers.1",)},
    "bf16 payload": {"payload": "bf16"},
    "fp8 payload": {"payload": "fp8"},
    "bf16 sums": {"reduce_dtype": "bf16", "replicas": 2},
}


class Blocks(nn.Module):
    """A stem, two blocks of odd sizes and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem = nn.Linear(5, 7)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2))
        self.head = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)[:, 0]  # type: ignore[no-any-return]


def share(rank: int, world: int, step: int) -> Tensor:
    """This rank's rows: even parts, and at step 2 all on the first rank."""
    rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
    if step == 2:
        return rows if rank == 0 else rows[:0]
    return rows[ROWS * rank // world : ROWS * (rank + 1) // world]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(module: nn.Module, rank: int, world: int) -> dict[str, Tensor]:
    """A few steps on the mean loss of the global batch; the weights at the end, whole."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = module(share(rank, world, step)).square().sum() / ROWS
        (loss * world).backward()
        optimizer.step()
    return {name: whole(p.detach()).clone() for name, p in module.named_parameters()}


def first(module: nn.Module, rank: int, world: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the first batch over all ranks, and its gradients, whole."""
    loss = module(share(rank, world, 0)).square().sum() / ROWS
    (loss * world).backward()
    gradients = {name: whole(p.grad).clone() for name, p in module.named_parameters() if p.grad is not None}
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
    module.zero_grad()
    return total, gradients


def refused(context: ParallelContext, replicas: int, **words: Any) -> str:
    try:
        FullyShard(replicas=replicas, **words).apply(Blocks(), context)
    except GemError as error:
        return " ".join(str(error).split())
    return "no error"


class Halved:
    """A ``LowWeight`` that reads float16, and wants to know the largest magnitude of all ranks."""

    def __init__(self) -> None:
        self.rows, self.agreed, self.frees = 0, 0.0, 0

    def split(self, rows: int, rank: int, ranks: int) -> None:
        self.rows = rows

    def largest(self, part: Tensor) -> Tensor:
        return torch.cat([part.flatten(), torch.zeros(1)]).abs().amax()[None]

    def pack(self, part: Tensor, largest: Tensor) -> Tensor:
        self.agreed = float(largest)
        return pad(part, (0, 0, 0, self.rows - len(part))).half().view(torch.uint8).flatten()

    def unpack(self, received: Tensor, whole: Tensor) -> None:
        whole.copy_(received.clone(memory_format=torch.contiguous_format).view(torch.float16).view(whole.shape))

    def freed(self) -> None:
        self.frees += 1


def halved() -> tuple[Blocks, list[Halved]]:
    """Weights at two places of two blocks; and one that two modules share, which has to travel as it is."""
    module, lows = Blocks(), [Halved(), Halved(), Halved()]
    module.layers[0][0].low_weights, module.layers[1][2].low_weights = {"weight": lows[0]}, {"weight": lows[1]}
    module.layers[1].append(nn.Linear(7, 7))
    module.layers[1].append(nn.Linear(7, 7))
    module.layers[1][3].low_weights, module.layers[1][3].weight = {"weight": lows[2]}, module.layers[1][4].weight
    return module, lows


def low(context: ParallelContext, rank: int, world: int) -> dict[str, Any]:
    """The first batch, and what the weights were told."""
    strategy, (module, lows) = FullyShard(), halved()
    strategy.apply(module, context)
    result = first(module, rank, world)
    sent = strategy.traffic.take()
    told = [(each.rows, each.agreed, each.frees) for each in lows]
    return {"first": result, "sent": sent, "told": told, "facts": strategy.describe()["low_weights"]}


def recorded(context: ParallelContext, rank: int, world: int) -> list[dict[str, Any]]:
    """One step with two replicas, and with the waits that are recorded on CUDA alone."""
    strategy, module = FullyShard(replicas=2), Blocks()
    strategy.apply(module, context)
    watch(list(units_of(module, Placement())), torch.device("cpu"))
    for timed in (False, True):
        LEDGER.start(timed=timed)
        module(share(rank, world, 0)).sum().backward()
        entries = [asdict(entry) for entry in LEDGER.stop()]
    return entries


def main(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    context = ParallelContext(rank=rank, world=world, device="cpu", topology=Topology(world=world, device="cpu"))
    saved: dict[str, Any] = {"weights": {}, "held": {}, "facts": {}, "options": {}, "sent": {}, "first": {}}
    for replicas in (1, 2, world):
        for reshard in (True, False):
            strategy, module = FullyShard(replicas=replicas, reshard=reshard), Blocks()
            assert strategy.apply(module, context) is module
            saved["held"][replicas] = sum(p.to_local().numel() for p in module.parameters() if isinstance(p, DTensor))
            saved["weights"][replicas, reshard] = train(module, rank, world)
            saved["facts"][replicas] = dict(strategy.describe())
    for name, words in OPTIONS.items():
        strategy, module = FullyShard(**words), Blocks()
        strategy.apply(module, context)
        saved["first"][name] = first(module, rank, world)
        strategy.traffic.take()
        saved["options"][name] = train(module, rank, world)
        saved["sent"][name] = strategy.traffic.take()
        saved["facts"][name] = dict(strategy.describe())
    saved["low"] = low(context, rank, world)
    saved["recorded"] = recorded(context, rank, world)
    saved["refused"] = refused(context, 3)
    saved["refused pattern"], saved["refused backend"] = refused(context, 1, keep=("layer",)), refused(context, 1, comm="copy_engine")
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
