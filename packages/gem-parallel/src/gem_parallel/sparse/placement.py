"""Which rank holds which table."""

from collections.abc import Sequence

from gem_core.spec import RequestError, TableSpec


def place(tables: Sequence[TableSpec], world: int, sharding: str) -> dict[str, int | None]:
    """The rank of each table, or None for a table whose rows are spread over all ranks.

    Largest tables first, each to the rank with the fewest weights so far. With ``auto`` a table that exceeds one rank's fair share is spread by rows,
    since no table-wise placement could balance it.

    Raises:
        RequestError: ``row_wise`` is asked for and a table has fewer rows than there are ranks.
    """
    fair = sum(table.rows * table.dim for table in tables) / world
    loads = [0.0] * world
    places: dict[str, int | None] = {}
    for table in sorted(tables, key=lambda table: (-table.rows * table.dim, table.name)):
        size = table.rows * table.dim
        if sharding == "row_wise" and table.rows < world:
            so = f"table {table.name!r} has {table.rows} rows for {world} ranks"
            raise RequestError("sharding 'row_wise'", so, "Use --set embedding.options.sharding=auto.")
        if sharding == "row_wise" or (sharding == "auto" and size > fair and table.rows >= world):
            places[table.name] = None
            loads = [load + size / world for load in loads]
        else:
            rank = min(range(world), key=lambda r: (loads[r], r))
            places[table.name] = rank
            loads[rank] += size
    return places
