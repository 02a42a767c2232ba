"""Sites that can be set to compute low or high while a run trains, and that can tell the one from the other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import gem_core.ops
from gem_core.spec import LOW_WEIGHTS
from gem_precision.linear import LowForward
from gem_precision.sites import Site


class Switch:
    """How one site computes, and what its low result adds to the high one.

    Args:
        name: the site, as decisions call it.
    """

    def __init__(self, name: str) -> None:
        self.name, self.low, self.comparing = name, True, False
        self._sums: Tensor | None = None

    def __call__(self, low: Callable[..., Any], high: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The low result; the high one where the site is set high or compares."""
        if self.low and not self.comparing:
            return low(*args, **options)
        exact = high(*args, **options)
        if self.low:
            self._add(_leading(exact), _leading(low(*args, **options)))
        return exact

    @torch.no_grad()
    def _add(self, exact: Tensor, low: Tensor) -> None:
        signal = exact.double().square().sum(-1)
        share = (low.double() - exact.double()).square().sum(-1) / signal
        share = share.where(share.isinf(), share.clamp(max=1.0))[signal > 0]  # a lost row is lost, however small it was
        sums = torch.stack([share.new_tensor(share.numel()), share.sum()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> tuple[float, float]:
        """Rows that are not zero since the last call, and the sum of the shares of each row's energy that the low result added, 1 at most; waits for
        the device. Rows count alike: where they differ by orders of magnitude, a sum of energies would show the largest alone.
        """
        rows, shares = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        self._sums = None
        return rows, shares


class SwitchedForward(LowForward):
    """The forward of a low-precision layer, under a switch."""

    def __init__(self, low: LowForward, switch: Switch) -> None:
        vars(self).update(vars(low))
        self.switch = switch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self.switch(super().__call__, self._as_the_class_has_it, x)
        return out

    def _as_the_class_has_it(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x)


class SwitchedKernel:
    """A bound low-precision kernel under a switch; the high one is the op's automatic choice for the call."""

    def __init__(self, op: str, low: Callable[..., Any], switch: Switch) -> None:
        self._op, self._low, self._switch = op, low, switch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._switch(self._low, getattr(gem_core.ops, self._op), *args, **options)


class SwitchedBind:
    """``KernelSlot.bind`` of a slot that a recipe asks to take a low-precision backend: binds it under a switch."""

    def __init__(self, op: str, bind: Callable[..., None], switch: Switch) -> None:
        self._op, self._bind, self._switch = op, bind, switch

    def __call__(self, kernel: Callable[..., Any], backend: str = "bound") -> None:
        self._bind(SwitchedKernel(self._op, kernel, self._switch), backend)


def install(site: Site) -> Switch:
    """Put a site that a recipe has lowered under a switch, set low. Parameters and state dicts stay as they are.

    The weights of a layer that may be high have to reach it as they are, so they do not travel between ranks in the format.
    """
    switch = Switch(site.name)
    if site.slot is None:
        vars(site.module).pop(LOW_WEIGHTS, None)
        vars(site.module)["forward"] = SwitchedForward(vars(site.module)["forward"], switch)
    else:
        vars(site.slot)["bind"] = SwitchedBind(site.slot.op, site.slot.bind, switch)
    return switch


def _leading(result: Any) -> Tensor:
    """The output of an op that may give more beside it."""
    tensor: Tensor = result[0] if isinstance(result, tuple) else result
    return tensor
