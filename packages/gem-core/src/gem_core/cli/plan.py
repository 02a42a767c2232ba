"""``gem plan``: where tables would lie, what they take of each rank's memory, and what ranks would send; nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from gem_core.cli.output import print_json, print_table
from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins.kinds import load_owned
from gem_core.plugins.manager import host
from gem_core.plugins.options import as_keywords
from gem_core.spec import BatchFacts, EmbeddingPlan, RequestError, Shard, Source, SparseOptimizer, TableSpec, Topology
from gem_core.topology.describe import described


def plan(
    config: Annotated[str, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE; may be repeated.")] = None,
    world: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    machine: Annotated[str | None, typer.Option(help="Plan for this machine, not the one at hand: h100, h200, b200, or a .toml file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write a plan file, for embedding.options.plan.")] = None,
) -> None:
    """Tables, placement, memory and communication of a configuration on any number of ranks, without a GPU."""
    loaded = load_config(config, overrides or [])
    host().require(loaded.config.plugins.require)
    topology = topology_for(world, machine or loaded.config.parallel.topology or None)
    tables, facts = tables_and_facts(loaded, world)
    planned = planned_by_engine(loaded, tables, topology, facts)
    if write is not None:
        if planned.file is None:
            so = f"engine {loaded.config.embedding.engine!r} has one placement for a number of ranks"
            raise RequestError(f"gem plan --write {write}", so, "Leave --write away.")
        write.write_text(planned.file, encoding="utf-8")
    if json:
        print_json({"engine": loaded.config.embedding.engine, "topology": asdict(topology), "facts": asdict(facts), **as_json(planned)})
        return
    print_plan(loaded, topology, facts, planned)


def topology_for(world: int, machine: str | None) -> Topology:
    """A machine by name or file, or the one at hand, as the first plugin that knows it says.

    Raises:
        RequestError: no such machine is known.
    """
    if machine is not None:
        return described(machine, world)
    found = host().first("gem_topology", world=world)
    return found[1] if found else Topology(world=world, device="cpu")


def tables_and_facts(loaded: LoadedConfig, world: int) -> tuple[Sequence[TableSpec], BatchFacts]:
    """The model's tables, and what a rank looks up of them, measured on the first training batch."""
    from gem_core.train.ids.layout import rules_by_table, with_rows

    config = loaded.config
    source: Source = host().build("data_sources", config.data.source, config.data.options)
    model: Any = host().load("models", config.model.name)
    tables = model.tables(source.schema(), host().options("models", config.model.name, config.model.options))
    tables = with_rows(tables, rules_by_table(tables, config.embedding.ids))
    shares = min(world, config.data.batch_size)
    share = next(source.batches("train", batch_size=config.data.batch_size, shard=Shard(rank=shares // 2, world=shares), seed=config.run.seed), None)
    if share is None or not share.rows:
        raise RequestError(f"the training split of {config.data.source!r}", "its first batch has no rows", "Choose other data options.")
    return tables, facts_of(share.ids, tables, config.data.batch_size / world)


def facts_of(ids: Any, tables: Sequence[TableSpec], rows: float) -> BatchFacts:
    """What ``rows`` rows look up, scaled from those of a ``gem_core.batch.KeyedJagged``."""
    import numpy as np

    scale = rows / ids.rows
    counts = {feature: ids.ids(feature).numel() * scale for table in tables for feature in table.features}
    distinct = {table.name: np.unique(np.concatenate([ids.ids(key).numpy() for key in table.features])).size * scale for table in tables}
    return BatchFacts(rows=rows, ids=counts, distinct=distinct)


def planned_by_engine(loaded: LoadedConfig, tables: Sequence[TableSpec], topology: Topology, facts: BatchFacts) -> EmbeddingPlan:
    """What the configured engine plans.

    Raises:
        RequestError: the engine plans nothing, or leaves a table out.
        MachineError: the tables do not fit.
    """
    chosen = loaded.config.embedding
    owner, declared = host().get("embedding_engines", chosen.engine)
    if declared.plan is None:
        others = [d.name for _, d in host().collect("gem_embedding_engines") if d.plan is not None]
        do = f"Choose an engine that does: {', '.join(sorted(others))}." if others else "Install gem-parallel, whose engines do."
        raise RequestError(f"gem plan with engine {chosen.engine!r}", "it plans nothing: every rank holds all tables", do)
    call = load_owned(declared.plan, f"plan of embedding engine {chosen.engine!r}", owner.owner)
    optimizer = SparseOptimizer(name=chosen.optimizer, lr=chosen.lr, eps=chosen.eps)
    given: dict[str, Any] = {"topology": topology, "facts": facts}
    options = as_keywords(chosen.engine, call, host().options("embedding_engines", chosen.engine, chosen.options), given)
    planned: EmbeddingPlan = call(tables, optimizer, **given, **options)
    check_complete(planned, tables, chosen.engine)
    return planned


def check_complete(planned: EmbeddingPlan, tables: Sequence[TableSpec], engine: str) -> None:
    """Raise RequestError unless the plan has every table once."""
    names = [entry.table for entry in planned.tables]
    if sorted(names) != sorted(table.name for table in tables):
        wrong = sorted({t.name for t in tables} ^ set(names) | {name for name in names if names.count(name) > 1})
        raise RequestError(f"the plan of engine {engine!r}", f"it does not have each of {wrong} once", "Report it to the engine's author.")


def as_json(planned: EmbeddingPlan) -> dict[str, Any]:
    """The plan as plain values, with totals; per-rank lists are kept."""
    return {**asdict(planned), "sent_total": list(totals(planned.sent, planned.world)), "sent": {k: list(v) for k, v in planned.sent.items()}}


def totals(sent: Mapping[str, Sequence[float]], world: int) -> tuple[float, ...]:
    """Bytes that each rank sends in a step."""
    return tuple(sum(per_rank) for per_rank in zip(*sent.values(), strict=True)) if sent else (0.0,) * world


def print_plan(loaded: LoadedConfig, topology: Topology, facts: BatchFacts, planned: EmbeddingPlan) -> None:
    """Tables by size, then memory and communication as the mean and the most over ranks."""
    print(f"engine {loaded.config.embedding.engine}, {planned.world} ranks on {topology.device} ({topology.source}), {facts.rows:g} rows a rank\n")
    ordered = sorted(planned.tables, key=lambda entry: (-entry.bytes, entry.table))
    rows = [(e.table, f"{e.rows:,}", str(e.dim), e.sharding, e.where, size(e.bytes)) for e in ordered]
    print_table(("TABLE", "ROWS", "WIDTH", "SHARDING", "RANKS", "WITH STATE"), rows)
    print()
    figures = [("tables and optimiser state", planned.held), ("gathered in a step", (planned.working,))]
    print_table(("MEMORY OF A RANK", "MEAN", "MOST"), [(name, size(fmean(values)), size(max(values))) for name, values in figures])
    have = "unknown, so it was not checked; --machine names one" if topology.memory is None else size(topology.memory)
    print(f"a device has {have}\n")
    lines = [(name, size(fmean(values)), size(max(values))) for name, values in planned.sent.items()]
    every = totals(planned.sent, planned.world)
    print_table(("SENT BY A RANK IN A STEP", "MEAN", "MOST"), [*lines, ("in all", size(fmean(every)), size(max(every)))])


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
