"""Calls that go past torch's dispatcher. A custom op written in Python costs 50 microseconds of the host a call, more than a short kernel takes."""

import torch
from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter)


def unwatched(*tensors: Tensor | None) -> bool:
    """Whether nobody could tell a custom op from a plain call of what it does.

    A compiler, a dispatch mode (fake tensors, a FLOP counter), a functorch transform and a tensor subclass could: they need the op.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return all(t is None or type(t) in _PLAIN for t in tensors)
