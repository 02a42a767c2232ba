"""Run by test_low_weights.py: two ranks, forked once, train layers that a precision recipe has lowered under ``fsdp``; they save what came out.

usage: ranks_low_weights.py FOLDER
"""

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimisers import: once here, not on every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from gem_core.spec import GemError, ParallelContext, Topology
from gem_parallel.dense.fsdp import FullyShard
from gem_precision.recipes.low_precision import LowPrecision

WORLD, WIDTH, HIDDEN, STEPS, MICRO = 2, 96, 256, 3, 2
RECIPES = ("fp8_block", "mxfp8", "fp8_rowwise", "mxfp4_mlp")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "replicas": {"replicas": 2},
    "kept": {"keep": ("layers.1",)},
    "two ahead": {"prefetch": 2},
    "whole": {"reshard": False},
}
CASES = [(recipe, name) for recipe in RECIPES for name in (OPTIONS if recipe == "fp8_block" else ["default"])]
CASES += [("high", "default"), ("high", "whole")]


class Block(nn.Module):
    """Two lowered layers, computed again in backward where ``again`` is set, and a norm."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.again = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH), again

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.up, x, use_reentrant=False) if self.again else self.up(x)
        assert hidden is not None
        return self.norm(x + self.down(hidden.relu()))  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stem, self.heads = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList([Block(False), Block(True)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.heads(x)[:, 0]  # type: ignore[no-any-return]


def lowered(name: str, **options: Any) -> tuple[Model, LowPrecision]:
    """A model under a recipe; ``high`` lowers nothing."""
    if name == "high":
        name, options = "mxfp8", {"high": ["*"]}
    model, recipe = Model(), LowPrecision(name, small=8, **options)
    recipe.prepare(model, "cpu")
    return model, recipe


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def batch(seed: int) -> Tensor:
    return torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, recipe: LowPrecision | None, rank: int, world: int) -> dict[str, Tensor]:
    """A few steps of several micro-batches, a scoring after each, one of them on other weights; every output, and all weights at the end.

    All ranks see the same rows, and the first alone asks for gradients. So sums over ranks have one term, and are exact.

    Args:
        recipe: told of each change of the weights; None tells nobody.
    """
    live = dict(model.named_parameters())  # as the optimiser has them, whatever torch puts in their place
    optimizer, out = torch.optim.AdamW(live.values(), lr=0.01, foreach=True), {}

    def changed() -> None:
        if recipe is not None:
            recipe.weights_changed()

    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            y = model(batch(10 * step + micro))
            (y.square().mean() * (world if rank == 0 else 0)).backward()
            out[f"step {step}.{micro}"] = y.detach()
        optimizer.step()
        changed()
        kept = [p.detach().clone() for p in live.values()]
        with torch.no_grad():
            if step == 1:
                torch._foreach_mul_(list(live.values()), 0.5)
                changed()
            out[f"scored {step}"] = model(batch(100))
            for p, before in zip(live.values(), kept, strict=True):
                p.copy_(before)
            changed()
    return out | {name: whole(p.detach()).clone() for name, p in live.items()}


def work(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD, timeout=timedelta(seconds=100))
    context = ParallelContext(rank=rank, world=WORLD, device="cpu", topology=Topology(world=WORLD, device="cpu"))
    saved: dict[str, Any] = {"trained": {}, "sent": {}, "facts": {}, "refused": "no error"}
    for case in CASES:
        strategy, (model, recipe) = FullyShard(**OPTIONS[case[1]]), lowered(case[0])
        strategy.apply(model, context)
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert list(model.state_dict()) == list(Model().state_dict())
        saved["trained"][case] = train(model, None if case[1] == "kept" else recipe, rank, WORLD)
        strategy.traffic.take()
        with torch.no_grad():
            model(batch(0))
        saved["sent"][case] = strategy.traffic.take()
        saved["facts"][case] = dict(strategy.describe())
    for payload in ("bf16", "fp8"):
        strategy, (model, _) = FullyShard(payload=payload), lowered("fp8_block")
        strategy.apply(model, context)
        with torch.no_grad():
            saved["trained"][payload] = model(batch(0))
        saved["sent"][payload] = strategy.traffic.take()
    try:
        FullyShard().apply(lowered("mxfp8", hadamard=True)[0], context)
    except GemError as error:
        saved["refused"] = " ".join(str(error).split())
    torch.save(saved, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def main(folder: Path) -> None:
    children = []
    for rank in range(WORLD):
        child = os.fork()
        if not child:
            code = 1
            try:
                work(folder, rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
    sys.exit(f"ranks {failed} failed" if failed else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
