"""Run by test_comm_gpu.py, once for each GPU: gathers by every backend, a model trained with each, and the times that are recorded.

usage: ranks_comm_cuda.py FOLDER RANK WORLD
"""

import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks_fsdp import Blocks, share, whole

from gem_core.spec import ParallelContext, Topology
from gem_parallel.comm.backends import NAMES, Here, set_environment
from gem_parallel.comm.ledger import LEDGER
from gem_parallel.comm.transport import carrier_of
from gem_parallel.dense.fsdp import FullyShard

SIZES = (1, 1000, 1 << 20)


def gathered(backend: str, rank: int, world: int) -> list[bool]:
    """Whether each gather is right; twice in a row, as the second overwrites what the first sent."""
    group: Any = dist.group.WORLD
    carrier = carrier_of(backend, group, Here(device="cuda", ranks=world, local=world, peer_access=True))
    right = []
    for size in SIZES:
        for turn in range(2):
            own = torch.full((size,), float(10 * turn + rank), device="cuda")
            output = torch.full((size * world,), torch.nan, device="cuda")
            carrier(output, own)
            want = torch.cat([torch.full((size,), float(10 * turn + r)) for r in range(world)])
            right.append(torch.equal(output.cpu(), want))
    return right


def trained(backend: str, rank: int, world: int) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Weights after some steps, and what the last of them recorded."""
    module = Blocks().cuda()
    context = ParallelContext(rank=rank, world=world, device=f"cuda:{rank}", topology=Topology(world=world, device="cuda"))
    FullyShard(comm=backend).apply(module, context)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        LEDGER.start()
        (module(share(rank, world, step).cuda()).square().sum() * world / 12).backward()
        entries = [asdict(entry) for entry in LEDGER.stop()]
        optimizer.step()
    return {name: whole(p.detach()).cpu() for name, p in module.named_parameters()}, entries


def main(folder: Path, rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    set_environment("cuda")
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=100))
    saved: dict[str, Any] = {"gathered": {}, "trained": {}, "recorded": {}}
    for backend in NAMES:
        saved["gathered"][backend] = gathered(backend, rank, world)
        saved["trained"][backend], saved["recorded"][backend] = trained(backend, rank, world)
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
