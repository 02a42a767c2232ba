"""Declaration of an embedding engine and the protocol of what it loads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One embedding table and the features that look it up.

    Args:
        name: the table's name, also in checkpoints.
        rows: number of rows; row 0 is for unknown ids.
        dim: width of a row.
        features: batch keys that look it up.
        pooling: ``none`` gives one vector an id, ``sum`` and ``mean`` one vector a row of the batch (zeros for a row without ids).
        init_scale: weights start uniform in ``[-init_scale, init_scale]``.
    """

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "none"
    init_scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizer:
    """Update rule of the tables: ``rowwise_adagrad``, ``sgd`` or ``adam``; learning rate and epsilon."""

    name: str = "rowwise_adagrad"
    lr: float = 0.05
    eps: float = 1e-8


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingEngine:
    """A named implementation of table storage, lookup and update.

    Args:
        name: the name used in ``[embedding] engine = ...``.
        summary: one line for tables.
        load: ``module:callable(tables, optimizer, *, device, seed, **options) -> Embeddings``.
        options: optional ``module:class`` of the pydantic model that validates the options.
    """

    name: str
    summary: str
    load: str
    options: str | None = None


class Embeddings(Protocol):
    """What an engine loads: a ``torch.nn.Module`` that also owns the update of its tables.

    Calling it with a ``gem_core.batch.KeyedJagged`` returns ``{feature: tensor}``: ``[ids, dim]`` without pooling, ``[rows, dim]`` with. Outputs are
    float32 and carry gradients. All state is readable as whole tables, so that another engine can load it.
    """

    def __call__(self, features: Any) -> dict[str, Any]: ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next update; call it before backward, since some engines update their tables inside backward."""
        ...

    def step(self) -> None:
        """Apply the gradients gathered since the last call; does nothing where backward has applied them already."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def table_names(self) -> Sequence[str]: ...

    def export_tables(self) -> dict[str, dict[str, Any]]:
        """``{table: {"weight": [rows, dim], "state": ...}}`` on the CPU; ``state`` is ``[rows]`` for row-wise AdaGrad. Collective when sharded."""
        ...

    def import_tables(self, tables: dict[str, dict[str, Any]]) -> None:
        """Load what ``export_tables`` gave, from any engine. Collective when sharded."""
        ...
