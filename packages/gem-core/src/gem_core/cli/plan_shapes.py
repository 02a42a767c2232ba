"""A forward pass of shapes: floating-point tensors hold no numbers and take no memory, while integers, such as offsets, are real."""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gem_core.spec import RequestError

MOST_REAL = 2**22
"""Numbers of an integer tensor that is computed; larger ones, such as masks of scores, are shapes too."""
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


class ShapesOnly(TorchDispatchMode):
    """Inside the block, what torch makes anew of floating-point numbers has shape, dtype and storage size alone, and so has what is computed from it.

    What is computed from real tensors alone stays real up to ``MOST_REAL`` numbers: how long rows are is known, and loops over them run as they
    would. Tensors that are real before the block stay so.

    Args:
        asked: what is wanted, for the error.

    Raises:
        RequestError: a number is asked for that is not there, or an operator has no fake implementation.
    """

    def __init__(self, asked: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked, self.fake = asked, FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        real = not any(isinstance(tensor, FakeTensor) for tensor in given)
        if func in _INDEXED:
            args = (args[0], _positions(args[1]), *args[2:])
        try:
            with self.fake:
                shape = func(*self._shapes(args), **self._shapes(kwargs))
        except RuntimeError:  # numbers are asked for, or an operator says nothing of its shapes
            if real:
                return func(*args, **kwargs)
            raise
        if real and not any(isinstance(leaf, Tensor) and _stays_shape(leaf, new=not given) for leaf in tree_leaves(shape)):
            return func(*args, **kwargs)
        return shape

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        if isinstance(error, RuntimeError):
            first, *_ = str(error).split("\n")
            so = f"the forward pass cannot be followed by shapes alone: {first}"
            do = "Let shapes in the model depend on the lengths of its inputs alone, and give custom operators a register_fake."
            raise RequestError(self.asked, so, do) from error

    def _shapes(self, tree: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor), tree)


def _stays_shape(tensor: Tensor, *, new: bool) -> bool:
    return tensor.numel() > MOST_REAL or (new and tensor.is_floating_point())


def _positions(indices: Any) -> list[Tensor | None]:
    """Indices with real masks as the positions that these choose: of a mask's shape alone, torch cannot tell how many."""
    found: list[Tensor | None] = []
    for index in indices:
        masked = isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        found.extend(index.nonzero(as_tuple=True) if masked else (index,))
    return found
