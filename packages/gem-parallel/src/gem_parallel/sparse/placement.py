"""Which rank holds which part of which table, and what cannot be done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gem_core.spec import RequestError, SparseOptimizer, TableSpec
from gem_parallel.sparse.options import TableRule

SPLITS_ROWS = ("row_wise", "table_row_wise", "grid")
SPLITS_COLUMNS = ("column_wise", "grid")
BY_HOST = ("table_row_wise", "grid")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a table lies.

    Args:
        sharding: ``data_parallel``, ``table_wise``, ``row_wise``, ``column_wise``, ``table_row_wise`` or ``grid``.
        ranks: the rank of each shard, in the order of rows, then columns: every rank once for ``data_parallel`` and ``row_wise``, one rank for
            ``table_wise``, one for each range of columns for ``column_wise``, all ranks of a host for ``table_row_wise``.
        memory: ``device``, ``uvm`` or ``uvm_cached``.
    """

    sharding: str
    ranks: tuple[int, ...]
    memory: str = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The ranks that tables are spread over: how many, how many a host, and the type of their device."""

    world: int
    local: int
    device: str

    @property
    def hosts(self) -> int:
        return self.world // self.local


def wishes(tables: Sequence[TableSpec], sharding: str, memory: str, rules: Sequence[TableRule]) -> dict[str, tuple[str, str]]:
    """``(sharding, memory)`` asked for each table.

    Raises:
        RequestError: a pattern matches no table.
    """
    for rule in rules:
        if not any(fnmatchcase(table.name, rule.pattern) for table in tables):
            so = f"it matches none of {', '.join(sorted(table.name for table in tables))}"
            raise RequestError(f"pattern {rule.pattern!r} of embedding.options.tables", so, "Write a table's name; * stands for any text.")
    out = {}
    for table in tables:
        rule = next((rule for rule in rules if fnmatchcase(table.name, rule.pattern)), TableRule(pattern="*"))
        out[table.name] = (rule.sharding or sharding, rule.memory or memory)
    return out


def place(tables: Sequence[TableSpec], wanted: Mapping[str, tuple[str, str]], optimizer: SparseOptimizer, cluster: Cluster) -> dict[str, Place]:
    """A place for each table.

    Largest tables first, each part to the rank (or host) with the fewest weights so far. With ``auto`` a table that exceeds one rank's fair share is
    spread by rows, since no table-wise placement could balance it.

    Raises:
        RequestError: a layout does not work for a table on this device; the nearest that does is named.
    """
    world = cluster.world
    fair = sum(table.rows * table.dim for table in tables) / world
    loads = [0.0] * world
    places: dict[str, Place] = {}
    for table in sorted(tables, key=lambda table: (-table.rows * table.dim, table.name)):
        sharding, memory = wanted[table.name]
        size = table.rows * table.dim
        if sharding == "auto":
            sharding = "row_wise" if size > fair and table.rows >= world else "table_wise"
        check_layout(table, sharding, optimizer, cluster)
        ranks = _ranks(table, sharding, cluster, loads)
        for rank in ranks:
            loads[rank] += size if sharding == "data_parallel" else size / len(ranks)
        places[table.name] = Place(sharding=sharding, ranks=ranks, memory=memory)
    return places


def check_layout(table: TableSpec, sharding: str, optimizer: SparseOptimizer, cluster: Cluster) -> None:
    """Raise RequestError unless the layout works for the table, naming what is missing and the nearest that works."""
    kind = "without pooling" if table.pooling == "none" else f"with pooling {table.pooling}"
    asked = f"sharding {sharding!r} on {cluster.device} for table {table.name!r} {kind}"
    nearest = "row_wise" if table.rows >= cluster.world else "table_wise"
    so = None
    if sharding in BY_HOST and table.pooling == "none":
        so = "torchrec's collection without pooling knows data_parallel, table_wise, row_wise and column_wise only"
    elif sharding in BY_HOST and cluster.device != "cuda":
        so = "torchrec reduces these bags over a host's ranks, which gloo refuses as soon as ranks have different numbers of rows"
    elif sharding in BY_HOST and cluster.world % cluster.local:
        so = f"{cluster.world} ranks are no whole number of hosts of {cluster.local}"
    elif sharding == "data_parallel" and optimizer.name == "adam":
        so = "copies are updated once a step and sharded tables in each backward pass, and Adam counts updates of the whole engine"
    elif sharding in SPLITS_COLUMNS and optimizer.name == "rowwise_adagrad":
        so = "row-wise AdaGrad has one state a row, and ranks that hold some columns would each keep another"
    elif sharding in SPLITS_COLUMNS and table.dim < 8:
        so = f"its width {table.dim} cannot be cut into multiples of 4"
    elif sharding == "row_wise" and table.rows < cluster.world:
        so = f"it has {table.rows} rows for {cluster.world} ranks"
    elif sharding in BY_HOST and table.rows < cluster.local:
        so = f"it has {table.rows} rows for the {cluster.local} ranks of a host"
    if so is not None:
        rule = f"{{pattern = '{table.name}', sharding = '{nearest}'}}"
        raise RequestError(asked, so, f"The nearest that works is {nearest}: add {rule} to embedding.options.tables.")


def column_parts(dim: int, most: int) -> int:
    """Into how many parts of equal width, a multiple of 4, columns are cut: as many as possible, ``most`` at the most."""
    return max(n for n in range(1, most + 1) if dim % (4 * n) == 0)


def _ranks(table: TableSpec, sharding: str, cluster: Cluster, loads: Sequence[float]) -> tuple[int, ...]:
    if sharding in ("data_parallel", "row_wise"):
        return tuple(range(cluster.world))
    if sharding == "table_wise":
        return (min(range(cluster.world), key=lambda rank: (loads[rank], rank)),)
    if sharding == "column_wise":
        parts = column_parts(table.dim, cluster.world)
        return tuple(sorted(sorted(range(cluster.world), key=lambda rank: (loads[rank], rank))[:parts]))
    hosts = sorted(range(cluster.hosts), key=lambda host: (sum(loads[host * cluster.local : (host + 1) * cluster.local]), host))
    chosen = hosts[: column_parts(table.dim, cluster.hosts) if sharding == "grid" else 1]
    return tuple(host * cluster.local + rank for host in chosen for rank in range(cluster.local))
