"""Declaration of a precision recipe and the protocol of what it loads."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


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


@runtime_checkable
class HoldsWeights(Protocol):
    """A ``Precision`` that holds things made of the weights, such as rounded copies."""

    def weights_changed(self) -> None:
        """The dense weights have other values now: the optimiser has moved, or averages were put in their place or taken out of it."""
        ...


@runtime_checkable
class Recordable(Protocol):
    """A ``Precision`` that tells whether passes may be recorded once and repeated, as CUDA graphs are. Another one that ``HoldsWeights`` or is a
    ``ChangingPrecision`` is taken for one that may not."""

    def not_recordable(self) -> str | None:
        """Why a repetition would not be what a call is; None if it would be: formats stay, and what is made of the weights is made in each pass that
        is recorded. Asked after ``prepare``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedSums:
    """One task's sums over the rows of one step on all ranks, scored twice with the same weights and dropout: ``(high, low)``.

    Args:
        weight: sum of the rows' weights; 0 where no row is observed.
        positive: sum of weight times label.
        predicted: sums of weight times predicted probability.
        loss: sums of weight times log loss.
    """

    weight: float
    positive: float
    predicted: tuple[float, float]
    loss: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionNews:
    """What a recipe makes of a pair.

    Args:
        record: plain values for the run's log.
        say: what people and the manifest are told, if anything; decisions may have changed then.
        stop: why the run has to end, if it has to.
    """

    record: Mapping[str, Any]
    say: str | None = None
    stop: str | None = None


@runtime_checkable
class ChangingPrecision(Protocol):
    """Optional methods of a ``Precision`` whose formats change while a run trains: by the step, or by what a pair of forward passes shows.

    In a paired step the trainer runs the batch forward twice with the same weights, table rows and random state: once without gradients inside
    ``high``, and then as ever. The first pass leaves no trace in the run. All ranks call the same methods with the same values.
    """

    def begin_step(self, step: int) -> bool:
        """Called before the forward pass of an optimiser step, counted from 1; returns whether the step is paired."""
        ...

    def high(self) -> AbstractContextManager[Any]:
        """A context in which nothing computes in low precision."""
        ...

    def sums(self) -> Sequence[float]:
        """This rank's own figures of the pair, which the trainer adds up over the ranks; as many on each of them."""
        ...

    def observe(self, step: int, pairs: Mapping[str, PairedSums], sums: Sequence[float], folder: Path | None) -> PrecisionNews:
        """Judge the pair of a step, after it was taken.

        Args:
            step: the step.
            pairs: by task.
            sums: what ``sums`` gave, added up over all ranks.
            folder: the run folder on the first rank, which may write there; None on the others.
        """
        ...

    def decisions(self) -> Sequence[PrecisionDecision]:
        """What ``prepare`` returned, as it stands now."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed or evaluated run needs: plain values, all finite."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; called after ``prepare``."""
        ...


TOKEN_LINEAR = "token_linear"
"""Class attribute, true for modules that are a linear map of its own for each token: parameters ``weight`` ``[tokens, in, out]`` and ``bias``
``[tokens, out]``, and a forward from ``[rows, tokens, in]`` to ``[rows, tokens, out]``. Recipes may lower them as they lower linear layers."""

LOW_WEIGHTS = "low_weights"
"""Attribute of a module, set by a recipe: ``{name of a parameter of the module: its LowWeight}``."""


class LowWeight(Protocol):
    """A matrix that its module reads in low precision, for strategies that keep it in parts: what travels is what the module reads.

    A part is what ``split`` says: consecutive rows of the matrix, the same number on each rank; the last parts may have fewer, or none. Ranks pack
    their parts, and unpack those of all ranks. The matrix is then filled with numbers that the module reads as they are, without rounding again.
    """

    def split(self, rows: int, rank: int, ranks: int) -> None:
        """The matrix is kept in ``ranks`` parts of ``rows`` rows; this is part ``rank``. Called once, before there are weights.

        Raises:
            RequestError: parts of that size cannot be rounded to what the whole matrix is rounded to.
        """
        ...

    def largest(self, part: Any) -> Any:
        """``[n]`` float32 that ranks have to agree on, by their maximum, before they pack; ``n`` depends on shapes alone and may be 0.

        Args:
            part: ``[rows of this part, columns]`` float32: the weights as the optimiser has them.
        """
        ...

    def pack(self, part: Any, largest: Any) -> Any:
        """``[bytes]`` uint8 of a part, as many on each rank; ``largest`` is what the ranks agreed on."""
        ...

    def unpack(self, received: Any, whole: Any) -> None:
        """Fill float32 ``whole`` ``[ranks * rows, columns]`` from ``received`` ``[ranks, bytes]``, and keep what else the module reads."""
        ...

    def freed(self) -> None:
        """The matrix is not whole any longer: what was kept for it can go, if the module has read it since it was unpacked."""
        ...
