"""Declaration of a precision recipe and the protocol of what it loads."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionRecipe:
    """A named way of choosing number formats per module.

    Args:
        name: the name used in ``[precision] recipe = ...``.
        summary: one line for tables.
        load: ``module:callable``; called with the options as keyword arguments, returns a ``Precision``.
        options: optional ``module:class`` of the pydantic model that validates the options.
    """

    name: str
    summary: str
    load: str
    options: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionDecision:
    """The format one module computes in, and why."""

    module: str
    format: str
    reason: str


class Precision(Protocol):
    """What a recipe loads: prepares a model once, and wraps each forward."""

    def prepare(self, model: Any, device_type: str) -> Sequence[PrecisionDecision]:
        """Change modules in place where the recipe needs it; return the decision for each leaf module.

        Args:
            model: the dense part, possibly on the meta device.
            device_type: where the run computes, ``cpu`` or ``cuda``. The other methods are called for the same one, after this.
        """
        ...

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """The context that a forward pass and its loss run in (``device_type``: ``cpu`` or ``cuda``)."""
        ...

    def compute_dtype(self) -> str:
        """The dtype kernels are asked for: one of ``gem_core.spec.kernels.DTYPES``."""
        ...
