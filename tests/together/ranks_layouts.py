"""Run by test_layout_matrix.py (eight ranks) and test_layouts_gpu.py (two GPUs or more): ranks, forked once, train in every layout of the five axes;
what each saw is written down.

Each layout takes the first half of a run, and the second half of the run that the layout before it began, from that one's checkpoint. So every
layout trains all steps, and loads what another has saved. Layouts of one shard take their second half with ``ddp`` in place of ``fsdp``. One more
run, ``begun``, is left for fewer ranks to finish.

usage: ranks_layouts.py FOLDER [WORLD DEVICE]
"""

import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import astuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimisers import: once here, not on every rank
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import gem_core.train.compose
import gem_core.train.report
from gem_core.config.load import load_config
from gem_core.train.compose import compose
from gem_core.train.composed import Run
from gem_core.train.loop import train_epochs
from gem_parallel.mesh import Layout

WORLD, HALF, STEPS = 8, 5, 10
BATCH, LAST = 61, 3
EXPERTS = ", ".join(['{kind="deep", hidden=[3]}', '{kind="linear"}'] * 4)
SETTINGS = (
    f"data.options={{rows={BATCH * (STEPS - 1) + LAST}, test_rows=64, items=40, categories=4}}",
    f"data.batch_size={BATCH}",
    f"model.options.experts=[{EXPERTS}]",
    "model.options.dim=16",
    "model.options.sequence.dim=16",
    "model.options.features.embedding_dim=8",
    'optim.schedule="constant"',
    "optim.warmup_steps=0",
    "optim.clip_norm=0.2",
    "optim.eps=1e-6",
    "embedding.lr=0.05",
    "train.ema_decay=0.9",
    "train.log_every=1",
    "train.uneven=pad",
)
"""Odd shares, a last step that leaves five ranks without rows, and a bound on the norm that every step meets.

Some gradients are zero but for rounding (the bias of keys under a softmax); the large ``eps`` keeps AdamW from making steps of them.
"""


def layouts(world: int = WORLD) -> list[Layout]:
    """All products of a power of two, of eight ten grids of the dense part times four of the tables."""
    powers = [2**i for i in range(world.bit_length())]
    grids = [(r, world // r // e, e) for r in powers for e in powers if world % (r * e) == 0]
    return [Layout(replicate=r, shard=s, expert=e, sparse_shard=world // m, sparse_replicate=m) for r, s, e in grids for m in powers]


def chosen(world: int = WORLD) -> list[Layout]:
    """Every grid of the dense part, with the grids of the tables in turn; all layouts of two ranks, or where ``GEM_ALL_LAYOUTS`` is set."""
    every, tables = layouts(world), world.bit_length()
    return every if world == 2 or os.environ.get("GEM_ALL_LAYOUTS") else [every[tables * i + i % tables] for i in range(len(every) // tables)]


def words(layout: Layout, *, ddp: bool) -> list[str]:
    """The settings of a layout; with ``ddp`` those of one shard replicate the dense part by DistributedDataParallel."""
    dense = "ddp" if ddp and layout.shard == 1 else "fsdp"
    return [
        f'parallel.strategies=["{dense}", "experts"]',
        *([f"parallel.options.fsdp={{replicas={layout.replicate}}}"] if dense == "fsdp" else []),
        f"parallel.options.experts={{degree={layout.expert}}}",
        "embedding.engine=sharded_2d",
        f"embedding.options={{replicas={layout.sparse_replicate}, prefetch=false}}",
    ]


def half(folder: Path, layout: Layout, device: str, *, resume: bool) -> Run:
    """Train the first steps of a new run, or the rest of a run that is there."""
    settings = [*SETTINGS, f"run.device={device}", *words(layout, ddp=resume), f"run.out={folder}", f"train.max_steps={STEPS if resume else HALF}"]
    run = compose(load_config("synthetic", settings), resume=folder if resume else None)
    train_epochs(run)
    run.close()
    return run


def sent(run: Run) -> dict[str, int]:
    """Bytes that this rank sent, by what they were sent for."""
    out: dict[str, int] = {}
    embeddings: Any = run.embeddings
    for traffic in (*(strategy.traffic for _, _, strategy in run.strategies), embeddings.traffic):
        out |= traffic.take()
    return out


def kept_bytes(run: Run) -> dict[str, int]:
    """Bytes of this rank's memory for the dense part and the tables, each storage once."""
    optimizer = run.learner.optimizer
    parameters = list(run.model.parameters())
    dense: dict[str, list[Tensor]] = {
        "weights": [p.detach() for p in parameters],
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer": [value for state in optimizer.state.values() for value in state.values() if value.dim()],
        "average": [] if run.average is None else list(run.average.state_dict().values()),
        "tables": [piece.tensor for piece in run.embeddings.table_slices()],
    }
    return {name: _bytes(tensors) for name, tensors in dense.items()}


def _bytes(tensors: list[Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())


def facts(run: Run) -> dict[str, Any]:
    """What the formulas need of the model: shapes by name, the same on every rank, and of the tables."""
    ensemble: Any = run.model.get_submodule("layers.0.ensemble")
    return {
        "shapes": {name: tuple(p.shape) for name, p in run.model.named_parameters()},
        "units": run.strategies[-1][2].describe()["blocks"],
        "tables": [(table.rows, table.dim) for table in run.tables],
        "tokens": (ensemble.experts[0].tokens_in, ensemble.experts[0].tokens_out),
        "dim": ensemble.dim,
    }


def work(folder: Path, rank: int, world: int, device: str) -> None:
    saved: dict[str, Any] = {"kept": {}, "sent": {}, "facts": None}
    chain = chosen(world)
    for index, layout in enumerate(chain):
        first = half(folder / f"run{index}", layout, device, resume=False)
        saved["sent"][astuple(layout)] = sent(first)
        saved["kept"][astuple(layout)] = kept_bytes(first)
        saved["facts"] = facts(first)
        if index:
            half(folder / f"run{index - 1}", layout, device, resume=True)
    half(folder / f"run{len(chain) - 1}", chain[0], device, resume=True)
    half(folder / "begun", chain[len(chain) // 2], device, resume=False)
    with (folder / f"rank{rank}.pickle").open("wb") as file:
        pickle.dump(saved, file)


def ranks(folder: Path, world: int, device: str) -> Iterator[int]:
    """Fork the ranks; this process has no threads yet, and has imported what they need. Yields their process ids."""
    for rank in range(world):
        child = os.fork()
        if child:
            yield child
            continue
        try:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
            if device == "cuda":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=timedelta(seconds=120))
            work(folder, rank, world, device)
            dist.barrier()
        except BaseException:
            (folder / f"error{rank}.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)


def main(folder: Path, world: int = WORLD, device: str = "cpu") -> None:
    torch.set_num_threads(1)
    gem_core.train.compose.close_world = lambda world, run: None  # the group serves all runs
    children = list(ranks(folder, world, device))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(abs(code) for code in codes))


if __name__ == "__main__":
    folder, *more = sys.argv[1:]
    main(Path(folder), *([int(more[0]), more[1]] if more else []))
