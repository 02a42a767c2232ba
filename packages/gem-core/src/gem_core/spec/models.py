"""Declaration of a model and the protocol of what it loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gem_core.spec.data import DataSchema
from gem_core.spec.embedding import TableSpec
from gem_core.spec.kernels import KernelRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A named model.

    Args:
        name: the name used in ``[model] name = ...``.
        summary: one line for tables.
        load: ``module:class``; called as ``cls(schema, options)`` with the validated options.
        options: ``module:class`` of the pydantic model that validates the options.
    """

    name: str
    summary: str
    load: str
    options: str


class Model(Protocol):
    """What a model loads: the dense part, a ``torch.nn.Module``. The tables it looks up live in an embedding engine.

    Called as ``model(batch, embedded) -> {task: logits [rows]}`` where ``embedded`` is the engine's ``{feature: tensor}``.
    """

    @classmethod
    def tables(cls, schema: DataSchema, options: Any) -> Sequence[TableSpec]:
        """The embedding tables the model wants for this schema."""
        ...

    def kernel_requests(self, *, device: str, dtype: str, arch: int | None, backward: bool) -> Sequence[KernelRequest]:
        """Every request its layers will make, so that kernels are chosen when the run is composed."""
        ...

    def flops(self, batch: Any) -> int:
        """Exact forward model FLOPs of one CPU batch: matmuls on valid elements only (2 m n k)."""
        ...
