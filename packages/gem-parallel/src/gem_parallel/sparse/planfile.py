"""Plan files: where each table lies, pinned in TOML."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gem_core.spec import RequestError, TableSpec
from gem_parallel.sparse.options import Layout, Memory
from gem_parallel.sparse.placement import BY_HOST, Cluster, Place

FORMAT = 1
EVERYWHERE = ("data_parallel", "row_wise")
"""Layouts that have no choice of ranks."""

_AGAIN = "Write the plan anew (`gem plan --write FILE`), or leave embedding.options.plan out."


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    rows: int
    dim: int
    sharding: Layout
    ranks: list[Annotated[int, Field(ge=0)]] | None = Field(default=None, min_length=1)
    """Left out where every rank holds a part or a copy."""
    memory: Memory


class _Plan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    world: int
    ranks_per_host: int = Field(ge=1)
    table: list[_Table]


def write_plan(places: Mapping[str, Place], tables: Sequence[TableSpec], cluster: Cluster) -> str:
    """The text of a plan file for groups of ranks like ``cluster``."""
    lines = [f"format = {FORMAT}", f"world = {cluster.world}", f"ranks_per_host = {cluster.local}"]
    for table in tables:
        placed = places[table.name]
        lines += [
            "",
            "[[table]]",
            f"name = {_quoted(table.name)}",
            f"rows = {table.rows}",
            f"dim = {table.dim}",
            f'sharding = "{placed.sharding}"',
            *([] if placed.sharding in EVERYWHERE else [f"ranks = {list(placed.ranks)}"]),
            f'memory = "{placed.memory}"',
        ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's too, but JSON leaves the delete character as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_plan(path: str, tables: Sequence[TableSpec], cluster: Cluster) -> dict[str, Place]:
    """The places that a plan file gives.

    Raises:
        RequestError: there is no such file, it is no plan, or it was written for other tables or another number of ranks, or
            places tables by host and hosts have another size.
    """
    asked, world = f"plan file {path}", cluster.world
    try:
        plan = _Plan.model_validate(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise RequestError(asked, f"it cannot be read: {error.strerror}", _AGAIN) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(asked, f"it is not TOML: {error}", _AGAIN) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise RequestError(asked, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", _AGAIN) from error
    if plan.world != world:
        raise RequestError(asked, f"it places tables on {plan.world} ranks, here are {world}", _AGAIN)
    by_host = [entry.name for entry in plan.table if entry.sharding in BY_HOST]
    if by_host and plan.ranks_per_host != cluster.local:
        so = f"table {by_host[0]!r} lies by hosts of {plan.ranks_per_host} ranks in it, here are {cluster.local} on a host"
        raise RequestError(asked, so, _AGAIN)
    names = [entry.name for entry in plan.table]
    wanted = {table.name: table for table in tables}
    if sorted(names) != sorted(wanted):
        twice = sorted({name for name in names if names.count(name) > 1})
        so = f"it lacks {sorted(set(wanted) - set(names))}, has {sorted(set(names) - set(wanted))} too many and {twice} twice"
        raise RequestError(asked, so, _AGAIN)
    for entry in plan.table:
        table = wanted[entry.name]
        if (entry.rows, entry.dim) != (table.rows, table.dim):
            so = f"table {entry.name!r} has {entry.rows} rows of width {entry.dim} in it, and {table.rows} of width {table.dim} here"
            raise RequestError(asked, so, _AGAIN)
        _check_ranks(asked, entry, world, plan.ranks_per_host)
    everyone = range(world)
    return {e.name: Place(sharding=e.sharding, ranks=tuple(everyone if e.ranks is None else e.ranks), memory=e.memory) for e in plan.table}


def _check_ranks(asked: str, entry: _Table, world: int, local: int) -> None:
    ranks = entry.ranks
    if entry.sharding in EVERYWHERE:
        sound = ranks is None
    elif ranks is None or len(set(ranks)) < len(ranks) or max(ranks) >= world:
        sound = False
    elif entry.sharding == "table_wise":
        sound = len(ranks) == 1
    elif entry.sharding == "column_wise":
        sound = entry.dim % (4 * len(ranks)) == 0
    else:
        hosts = sorted({rank // local for rank in ranks})
        whole = [host * local + rank for host in hosts for rank in range(local)]
        sound = ranks == whole and (len(hosts) == 1 if entry.sharding == "table_row_wise" else entry.dim % (4 * len(hosts)) == 0)
    if not sound:
        so = f"ranks {ranks or 'left out'} do not suit table {entry.name!r} with sharding {entry.sharding!r} on {world} ranks"
        raise RequestError(asked, so, _AGAIN)
