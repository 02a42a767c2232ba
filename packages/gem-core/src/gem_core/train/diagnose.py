"""Where a loss that is not finite comes from: the first value of the forward pass, in order of computation, that is not finite."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gem_core.batch import Batch
from gem_core.spec import Embeddings, Precision, RunFailed
from gem_core.train.world import World

_DO = "The last checkpoint is kept: look at the data of this step, lower the learning rate, or clip harder, and go on with --resume."


def non_finite(
    world: World, model: nn.Module, dense: nn.Module, embeddings: Embeddings, precision: Precision, batch: Batch, *, step: int
) -> RunFailed:
    """Run the forward pass once more with hooks and say what is not finite first. Collective: every rank returns the same error.

    Args:
        model: the dense model, whose module names are told.
        dense: what is called in its place.
        batch: this rank's batch on its device.
        step: the step that failed, counted from 1.
    """
    found: list[str] = [f"the batch holds a non-finite value in dense feature {name!r}" for name, x in _float_inputs(batch) if _bad(x)]
    found += [f"parameter {name!r} is not finite" for name, p in model.named_parameters() if _bad(p)]
    handles = [module.register_forward_hook(_watch(name or "the model", found)) for name, module in model.named_modules()]
    try:
        with torch.no_grad(), precision.forward_context(world.device.type):
            embedded = embeddings(batch.ids)
            found += [f"the tables give a non-finite vector for feature {name!r}" for name, x in embedded.items() if _bad(x)]
            dense(batch, embedded)
    finally:
        for handle in handles:
            handle.remove()
    told = next((f"{text} (rank {rank})" for rank, texts in enumerate(world.gather_objects(found)) for text in texts[:1]), None)
    return RunFailed(f"training step {step}", f"the loss is not finite: {told or 'every module is finite, the loss itself overflows'}", _DO)


def _watch(name: str, found: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if any(_bad(tensor) for tensor in _tensors(output)):
            found.append(f"module {name!r} ({type(module).__name__}) gives a non-finite output")

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _float_inputs(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    yield from batch.dense.items()
    yield from batch.event_dense.items()


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
