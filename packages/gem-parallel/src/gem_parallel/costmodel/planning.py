"""``gem plan``: the configured layout, or the best of all, with times, bytes, memory and reasons."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from gem_core.spec import EmbeddingPlan, LayoutPlan, MachineError, RequestError, StepPlan, StepRequest
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.dense import Dense, configured, dense_in, memory_of
from gem_parallel.costmodel.drawing import drawing, reasons
from gem_parallel.costmodel.step import BACKWARD, FORWARD, Step
from gem_parallel.mesh import Layout, divisors_of

COMPUTE = ("forward", "backward")


def plan_step(request: StepRequest) -> StepPlan:
    """The ``plan`` of this package's strategies.

    Raises:
        RequestError: the configured layout cannot be, none fits, or the machine's figures are unknown.
        MachineError: the tables do not fit in the configured layout, or in any.
    """
    assumed = Assumed.of(request.assume)
    if assumed.row_cv < 0:
        assumed = replace(assumed, row_cv=request.model.row_cv)
    if request.best:
        return _search(request, assumed)
    dense = configured(request.topology, request.strategies, request.model, request.table_replicas)
    return _answer(request, assumed, [evaluate(request, assumed, dense, request.tables(request.table_replicas))], {}, 1)


def _search(request: StepRequest, assumed: Assumed) -> StepPlan:
    """Every layout is evaluated; those that fit come by their time, then by their memory."""
    found, refused, considered = [], Counter[str](), 0
    planned = {replicas: _tables(request, replicas) for replicas in divisors_of(request.topology.world)}
    for layout, fsdp in layouts(request):
        considered += 1
        tables = planned[layout.sparse_replicate]
        if isinstance(tables, str):
            refused[tables] += 1
            continue
        plan = evaluate(request, assumed, dense_in(layout, request.model, fsdp), tables)
        if plan.fits is False:
            refused["more memory than a device has"] += 1
        else:
            found.append(plan)
    if not found:
        told = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
        do = "Take more ranks, smaller tables, or fewer rows a rank."
        raise MachineError(f"a layout for {request.topology.world} ranks", f"none of {considered} fits: {told}", do)
    found.sort(key=lambda plan: (plan.seconds, sum(plan.memory.values())))
    return _answer(request, assumed, found[: request.best], dict(refused), considered)


def _tables(request: StepRequest, replicas: int) -> EmbeddingPlan | str:
    """The engine's plan, or why there is none."""
    try:
        return request.tables(replicas)
    except MachineError:
        return "tables do not fit"
    except RequestError as error:
        return error.so


def _answer(request: StepRequest, assumed: Assumed, plans: list[LayoutPlan], refused: Mapping[str, int], considered: int) -> StepPlan:
    best = Layout(**plans[0].axes)
    return StepPlan(
        layouts=tuple(replace(plan, why=reasons(request.topology, Layout(**plan.axes))) for plan in plans),
        considered=considered,
        refused=refused,
        drawing=drawing(request.topology, best),
        assumptions=assumed.told(request.assume or {}),
    )


def layouts(request: StepRequest) -> Iterator[tuple[Layout, Mapping[str, Any] | None]]:
    """Every layout of the ranks, with ``fsdp``'s options, or None for ``ddp`` where nothing is sharded.

    Expert groups divide a host and the blocks' experts; everything else need only divide the ranks.
    """
    world, tiers = request.topology.world, request.topology.tiers
    local = min(tiers[0].size, world) if tiers else world
    counts = {block.experts for block in request.model.blocks if block.experts}
    fsdp = {key: value for key, value in request.strategies.get("fsdp", {}).items() if key != "replicas"}
    for expert in divisors_of(local):
        if world % expert or (expert > 1 and (not counts or any(count % expert for count in counts))):
            continue
        for replicate in divisors_of(world // expert):
            shard = world // expert // replicate
            for sparse_replicate in divisors_of(world):
                layout = Layout(
                    replicate=replicate, shard=shard, expert=expert, sparse_shard=world // sparse_replicate, sparse_replicate=sparse_replicate
                )
                yield layout, (fsdp if shard * expert > 1 else None)


def evaluate(request: StepRequest, assumed: Assumed, dense: Dense, tables: EmbeddingPlan) -> LayoutPlan:
    """One layout."""
    topology, rows, layout = request.topology, request.batch.rows, dense.layout
    done = Step(topology, dense, request.model, request.batch, tables, assumed, request.micro_batches).outcome()
    rows_a_step = rows * request.micro_batches
    memory = {**memory_of(dense, request.model, rows), "tables": float(max(tables.held)), "table shards": float(tables.working)}
    fits = None if topology.memory is None else sum(memory.values()) <= (1 - assumed.reserve) * topology.memory
    flops = (FORWARD + BACKWARD) * rows_a_step * sum(block.flops for block in request.model.blocks)
    beside = {name: seconds for name, seconds in done.parts.items() if name not in COMPUTE}
    binding = "compute" if 2 * done.compute >= done.seconds else max(beside, key=lambda name: beside[name])
    return LayoutPlan(
        axes=asdict(layout),
        seconds=done.seconds,
        parts=done.parts,
        communication=done.carried,
        sent=done.sent,
        memory={name: count for name, count in memory.items() if count},
        local_mfu=flops / done.compute / topology.peak_flops[request.model.dtype] if done.compute else 0.0,
        scaling=done.compute / done.seconds if done.seconds else 1.0,
        samples_per_second=rows_a_step * layout.world / done.seconds if done.seconds else 0.0,
        binding=binding,
        fits=fits,
        settings=settings_of(dense),
    )


def settings_of(dense: Dense) -> tuple[str, ...]:
    """``--set`` values that ask for a layout."""
    layout = dense.layout
    names = [*(["experts"] if layout.expert > 1 else []), "fsdp" if dense.sharded else "ddp" if layout.world > 1 else "single"]
    lines = [f"parallel.strategies={json.dumps(names)}"]
    if layout.expert > 1:
        lines.append(f"parallel.options.experts.degree={layout.expert}")
    if dense.sharded and layout.replicate > 1:
        lines.append(f"parallel.options.fsdp.replicas={layout.replicate}")
    if layout.sparse_replicate > 1:
        lines.append(f"embedding.options.replicas={layout.sparse_replicate}")
    return tuple(lines)
