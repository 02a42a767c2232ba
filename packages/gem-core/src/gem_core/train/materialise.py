"""Giving a model that was built on the meta device its weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

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
    names, theirs = set(dict(model.named_parameters())), set(dict(whole.named_parameters()))
    if names != theirs:
        so = f"built twice it has different parameters: {sorted(names ^ theirs)[:3]}"
        raise PluginError("the model's weights", so, "A strategy that acts on the meta device must keep the parameters' names.")
    set_model_state_dict(model, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    buffers = dict(whole.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])  # also those that a state dict leaves out
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                so = f"module {name!r} keeps the tensor {attribute!r} as a plain attribute"
                raise PluginError("the model's weights", so, "Register it with register_buffer, so that it moves with the model.")
