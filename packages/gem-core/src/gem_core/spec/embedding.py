"""Declaration of an embedding engine and the protocol of what it loads."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gem_core.spec.errors import RequestError

POOLINGS = ("none", "sum", "mean")
SPARSE_OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")
ADAM_BETAS = (0.9, 0.999)


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
    """Update rule of the tables: ``rowwise_adagrad``, ``sgd`` or ``adam``; learning rate and epsilon.

    Only rows that were looked up change. With ``g`` the summed gradient of a row:

    - ``sgd``: ``w -= lr * g``
    - ``rowwise_adagrad``: ``state += mean(g ** 2)``, ``w -= lr * g / (sqrt(state) + eps)``
    - ``adam``: moments with ``ADAM_BETAS``, bias-corrected by the number of updates of the engine, ``w -= lr * m / (sqrt(v) + eps)``
    """

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
        plan: optional ``module:callable(tables, optimizer, *, topology, facts, **options) -> EmbeddingPlan`` for ``gem plan``. It needs no process
            group and no device; a MachineError says that the tables do not fit.
    """

    name: str
    summary: str
    load: str
    options: str | None = None
    plan: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSlice:
    """Consecutive rows of one tensor of a table, or some of their columns, as one process keeps them.

    Args:
        table: the table's name.
        name: which of its tensors: a name of ``table_state`` that has a shape.
        shape: of the whole tensor.
        start: the first row kept here.
        tensor: ``[n]`` or ``[n, width]``, rows ``[start, start + n)``: a view of the engine's own storage, on any device. Writing to it changes the
            table.
        column: the first column kept here.
        saves: whether this process writes it into a checkpoint; False where another process keeps the same rows and writes them.
    """

    table: str
    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Any
    column: int = 0
    saves: bool = True


class Embeddings(Protocol):
    """What an engine loads: a ``torch.nn.Module`` that also owns the update of its tables.

    Calling it with a ``gem_core.batch.KeyedJagged`` returns ``{feature: tensor}``: ``[ids, dim]`` without pooling, ``[rows, dim]`` with. Outputs are
    float32 and carry gradients. All state is readable as whole tables, so that another engine can load it.

    An engine whose tables change in ``step`` alone may say so with an attribute ``updates_in_step`` that is True: the trainer then looks at the loss
    after backward instead of before, which spares a GPU a pause.
    """

    def __call__(self, features: Any) -> dict[str, Any]: ...

    def set_lr(self, lr: float) -> None:
        """Learning rate of the next update; call it before the forward pass, since some engines update their tables inside backward."""
        ...

    def step(self) -> None:
        """Apply the gradients gathered since the last call; does nothing where backward has applied them already."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def table_names(self) -> Sequence[str]: ...

    def table_slices(self) -> Sequence[TableSlice]:
        """All that this process keeps of the tables and their optimiser state. Over all processes every row is there. Not collective."""
        ...

    def table_updates(self) -> int:
        """Updates made so far, which Adam's bias correction counts."""
        ...

    def tables_loaded(self, updates: int) -> None:
        """The slices were filled from outside, after so many updates: pending gradients and anything fetched ahead are dropped. Collective."""
        ...

    def export_tables(self) -> dict[str, dict[str, Any]]:
        """Whole tables as float32 CPU tensors, ``{table: {name: tensor}}`` with the names and shapes of ``table_state``. Collective when sharded."""
        ...

    def import_tables(self, tables: dict[str, dict[str, Any]]) -> None:
        """Load what any engine's ``export_tables`` gave; tables with only ``weight`` get fresh optimiser state. Collective when sharded."""
        ...


@runtime_checkable
class PrefetchesIds(Protocol):
    """An engine that can start on the ids of a batch while the batch before it is computed on."""

    def prefetch(self, features: Any) -> Any:
        """Start what a look-up of these ids needs beside the tables' values, such as sending the ids to the ranks that keep their rows.

        What it returns is given to the call in the place of ``features``, once, with the same result. Updates of the tables may come between.
        Collective where the call is. On CUDA it runs on another stream than the call; the caller puts the two in order, and keeps what was returned
        until the step is over: it must hold the memory that the call reads.
        """
        ...


def table_state(table: TableSpec, optimizer: SparseOptimizer) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a table's exported tensors: ``weight`` first, then the optimiser's.

    Row-wise AdaGrad has ``state`` ``[rows]``; Adam has ``exp_avg`` and ``exp_avg_sq`` ``[rows, dim]`` and the int64 scalar ``step``; SGD has none.
    """
    full = (table.rows, table.dim)
    slots: dict[str, dict[str, tuple[int, ...]]] = {
        "sgd": {},
        "rowwise_adagrad": {"state": (table.rows,)},
        "adam": {"exp_avg": full, "exp_avg_sq": full, "step": ()},
    }
    return {"weight": full, **slots[optimizer.name]}


def table_seed(seed: int, table: str) -> int:
    """Seed of a table's first weights: the same for every engine and number of ranks.

    Every engine fills what it keeps with ``gem_core.ops.first_weights.draw_rows``, by this seed, the table's ``init_scale``, rows and columns.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{table}".encode()).digest()[:8], "big") >> 1


def check_tables(tables: Sequence[TableSpec], optimizer: SparseOptimizer) -> None:
    """Raise RequestError unless the tables and the optimiser are ones that an engine can build."""
    owners: dict[str, str] = {}
    seen: dict[str, TableSpec] = {}
    for table in tables:
        asked = f"table {table.name!r}"
        if table.name in seen:
            so = f"it is declared twice, with pooling {seen[table.name].pooling!r} and {table.pooling!r}"
            raise RequestError(asked, so, "Declare a table once, with all its features; features that pool differently need tables of their own.")
        seen[table.name] = table
        if table.pooling not in POOLINGS:
            raise RequestError(asked, f"its pooling is {table.pooling!r}", f"Choose one of {', '.join(POOLINGS)}.")
        if table.rows < 1 or table.dim < 1 or not table.features:
            raise RequestError(asked, f"it has {table.rows} rows of width {table.dim} and {len(table.features)} features", "Each must be at least 1.")
        if table.rows * table.dim >= 2**60:
            so = f"it has {table.rows} rows of width {table.dim}, more than any memory"
            raise RequestError(asked, so, "Declare fewer rows, or give the table an entry in [[embedding.ids]] for ids without a fixed vocabulary.")
        if not (math.isfinite(table.init_scale) and table.init_scale >= 0):
            raise RequestError(asked, f"init_scale is {table.init_scale}", "Give a finite value that is not negative.")
        for feature in table.features:
            if feature in owners:
                so = f"tables {owners[feature]!r} and {table.name!r} both list it"
                raise RequestError(f"feature {feature!r}", so, "List a feature once, in one table.")
            owners[feature] = table.name
    if optimizer.name not in SPARSE_OPTIMIZERS:
        raise RequestError(f"table optimiser {optimizer.name!r}", "there is no such rule", f"Choose one of {', '.join(SPARSE_OPTIMIZERS)}.")
    if not (math.isfinite(optimizer.eps) and optimizer.eps > 0):
        raise RequestError(f"table optimiser {optimizer.name!r}", f"eps is {optimizer.eps}", "Give a small positive number.")
    check_lr(optimizer.lr)


def check_lr(lr: float) -> None:
    """Raise RequestError unless ``lr`` is finite and not negative."""
    if not (math.isfinite(lr) and lr >= 0):
        raise RequestError("learning rate of the tables", f"it is {lr}", "Give a finite number that is not negative.")


def check_import(tables: Sequence[TableSpec], optimizer: SparseOptimizer, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise RequestError unless ``entries`` holds each table with ``weight`` alone or all of ``table_state``, in the right shapes."""
    names = {table.name for table in tables}
    if set(entries) != names:
        missing, extra = sorted(names - set(entries)), sorted(set(entries) - names)
        raise RequestError("import of tables", f"missing {missing}, not in this model {extra}", "Load a checkpoint of the same model.")
    for table in tables:
        wanted, given = table_state(table, optimizer), entries[table.name]
        if set(given) not in ({"weight"}, set(wanted)):
            so = f"it holds {sorted(given)}, optimiser {optimizer.name!r} keeps {sorted(wanted)}"
            raise RequestError(f"import of table {table.name!r}", so, "Use the optimiser of the checkpoint, or import the weights alone.")
        for name, tensor in given.items():
            if tuple(tensor.shape) != wanted[name]:
                so = f"{name!r} has shape {list(tensor.shape)}, the table wants {list(wanted[name])}"
                raise RequestError(f"import of table {table.name!r}", so, "Load a checkpoint of the same model.")
    steps = {int(entry["step"]) for entry in entries.values() if "step" in entry}
    if len(steps) > 1:
        raise RequestError("import of tables", f"their update counts differ: {sorted(steps)}", "Load tables that were exported together.")
