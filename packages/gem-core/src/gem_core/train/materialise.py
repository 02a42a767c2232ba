"""Giving a model that was built on the meta device its weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from gem_core.spec import PluginError


def fill_weights(model: nn.Module, build: Callable[[], nn.Module], device: torch.device, seed: int) -> None:
    """Allocate the parameters and buffers of a meta model on a device, and copy into them the weights of a model built on the CPU from a seed.

    So the weights depend on the seed alone, not on the device, the number of ranks or the layout, and a model needs no special way to initialise
    itself.

    Args:
        model: on the meta device; sharded parameters are filled with their part.
        build: makes the same model, whole, on the CPU.
        device: where the weights go.
        seed: of the initialisation; torch's random state is left as it was.

    Raises:
        PluginError: the model keeps a tensor outside of parameters and buffers, or building it twice gives different names.
    """
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = build()
    weights, spread = whole.state_dict(), model.state_dict()
    if weights.keys() != spread.keys():
        so = f"built twice it has different parameters or buffers: {sorted(weights.keys() ^ spread.keys())[:3]}"
        raise PluginError("the model's weights", so, "A strategy that acts on the meta device must keep their names.")
    model.load_state_dict({name: _laid_out(weights[name], like=tensor, device=device) for name, tensor in spread.items()})
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])  # also those that a state dict leaves out
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                so = f"module {name!r} keeps the tensor {attribute!r} as a plain attribute"
                raise PluginError("the model's weights", so, "Register it with register_buffer, so that it moves with the model.")


def _laid_out(whole: Tensor, *, like: Tensor, device: torch.device) -> Tensor:
    """A whole tensor spread as another is. Collective where that one is sharded.

    A DTensor whose mesh lacks this rank holds nothing here and stays as it is. Whatever was asked for, torch puts it on the CPU, and so its
    ``set_model_state_dict`` refuses the model of a GPU, for having tensors on two devices.
    """
    if not isinstance(like, DTensor):
        return whole
    if like.device_mesh.get_coordinate() is None:
        return like
    return distribute_tensor(whole.to(device), like.device_mesh, like.placements)
