"""``gem plan``: where tables would lie, what they take of each rank's memory, and what ranks would send; nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from gem_core.cli.output import print_json, print_table
from gem_core.cli.sizes import size
from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins.kinds import load_owned
from gem_core.plugins.manager import host
from gem_core.plugins.options import as_keywords
from gem_core.spec import BatchFacts, EmbeddingPlan, RequestError, Shard, Source, SparseOptimizer, StepPlan, TableSpec, Topology
from gem_core.topology.describe import described


def plan(
    config: Annotated[str, typer.Option("--config", "-c", help="A TOML file, or the name of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE; may be repeated.")] = None,
    world: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 1,
    machine: Annotated[str | None, typer.Option(help="Plan for this machine, not the one at hand: h100, h200, b200, or a .toml file.")] = None,
    search: Annotated[int, typer.Option(min=0, help="Print so many of the best layouts of the ranks; 0 evaluates the configured one.")] = 0,
    assume: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: a figure of the cost model; may be repeated.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write a plan file, for embedding.options.plan.")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Activations by block, planned and measured on this machine.")] = False,
) -> None:
    """Tables, mesh, memory, communication and step time of a configuration on any number of ranks, without a GPU."""
    loaded = load_config(config, overrides or [])
    host().require(loaded.config.plugins.require)
    if memory:
        if world > 1 or machine or search or write:
            so = "it measures this machine, on the ranks that it is started on"
            raise RequestError("gem plan --memory", so, "Leave --world, --machine, --search and --write away.")
        from gem_core.cli.plan_memory import plan_memory

        plan_memory(loaded, json=json)
        return
    topology = topology_for(world, machine or loaded.config.parallel.topology or None)
    source: Source = host().build("data_sources", loaded.config.data.source, loaded.config.data.options)
    tables, facts = tables_and_facts(loaded, source, world)
    planned = None if search else planned_by_engine(loaded, tables, topology, facts)
    if write is not None:
        _write(write, planned, loaded)
    step = None
    if search or can_be_timed(loaded, topology):
        from gem_core.cli.plan_facts import model_facts
        from gem_core.cli.plan_step import plan_step, print_step

        with_replicas = partial(planned_by_engine, loaded, tables, topology, facts)
        model = model_facts(loaded, source, tables, topology.device)
        step = plan_step(loaded.config, topology, model, facts, with_replicas, best=search, assume=assume or [])
    if json:
        head = {"engine": loaded.config.embedding.engine, "topology": asdict(topology), "facts": asdict(facts)}
        print_json({**head, **({} if planned is None else as_json(planned)), "step": None if step is None else step_as_json(step)})
        return
    if planned is not None:
        print_plan(loaded, topology, facts, planned)
    if step is not None:
        print_step(step)
    elif not search:
        print("\nThe time of a step is not estimated: it needs a described machine (--machine) and a strategy that plans, such as fsdp.")


def _write(path: Path, planned: EmbeddingPlan | None, loaded: LoadedConfig) -> None:
    if planned is None or planned.file is None:
        engine = loaded.config.embedding.engine
        so = "--search looks at many layouts" if planned is None else f"engine {engine!r} has one placement for a number of ranks"
        raise RequestError(f"gem plan --write {path}", so, "Leave --write away.")
    path.write_text(planned.file, encoding="utf-8")


def can_be_timed(loaded: LoadedConfig, topology: Topology) -> bool:
    """Whether the machine's links and peak are known and a configured strategy plans steps."""
    plans = any(host().declaration("parallel_strategies", name).plan for name in loaded.config.parallel.strategies)
    return bool(plans and topology.tiers and topology.peak_flops)


def step_as_json(step: StepPlan) -> dict[str, Any]:
    """The step's plan as plain values, each layout with its MFU."""
    return {**asdict(step), "layouts": [{**asdict(layout), "mfu": layout.mfu} for layout in step.layouts]}


def topology_for(world: int, machine: str | None) -> Topology:
    """A machine by name or file, or the one at hand, as the first plugin that knows it says.

    Raises:
        RequestError: no such machine is known.
    """
    if machine is not None:
        return described(machine, world)
    found = host().first("gem_topology", world=world)
    return found[1] if found else Topology(world=world, device="cpu")


def tables_and_facts(loaded: LoadedConfig, source: Source, world: int) -> tuple[Sequence[TableSpec], BatchFacts]:
    """The model's tables, and what a rank looks up of them, measured on the first training batch."""
    from gem_core.train.ids.layout import rules_by_table, with_rows

    config = loaded.config
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


def planned_by_engine(
    loaded: LoadedConfig, tables: Sequence[TableSpec], topology: Topology, facts: BatchFacts, replicas: int | None = None
) -> EmbeddingPlan:
    """What the configured engine plans, as configured or with another number of table replicas.

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
    wanted = chosen.options if replicas in (None, chosen.options.get("replicas", 1)) else {**chosen.options, "replicas": replicas}
    options = as_keywords(chosen.engine, call, host().options("embedding_engines", chosen.engine, wanted), given)
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
