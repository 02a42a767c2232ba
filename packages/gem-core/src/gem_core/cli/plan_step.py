"""The part of ``gem plan`` that a parallel strategy answers: time, memory and layout of a training step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gem_core.cli.output import print_table
from gem_core.cli.sizes import size
from gem_core.plugins.kinds import load_owned
from gem_core.plugins.manager import host
from gem_core.spec import BatchFacts, EmbeddingPlan, LayoutPlan, ModelFacts, RequestError, StepPlan, StepRequest, Topology

AXES = ("replicate", "shard", "expert", "sparse_shard", "sparse_replicate")


def planner_of(names: Sequence[str]) -> Callable[[StepRequest], StepPlan] | None:
    """The step planner of the first configured strategy that has one, else of the first that anybody declares, by name."""
    declared = {d.name: (owner, d) for owner, d in host().collect("gem_parallel_strategies")}
    others = [name for name in sorted(declared) if name not in names]
    for name in [*names, *others]:
        owner, strategy = host().get("parallel_strategies", name)
        if strategy.plan is not None:
            found: Callable[[StepRequest], StepPlan] = load_owned(strategy.plan, f"plan of strategy {name!r}", owner.owner)
            return found
    return None


def plan_step(
    config: Any,
    topology: Topology,
    model: ModelFacts,
    facts: BatchFacts,
    tables: Callable[[int], EmbeddingPlan],
    *,
    best: int,
    assume: Sequence[str],
) -> StepPlan:
    """What the planner answers.

    Raises:
        RequestError: no strategy plans, an assumption is no figure, or as the planner says.
    """
    planner = planner_of(config.parallel.strategies)
    if planner is None:
        raise RequestError("a step's time", "no installed strategy plans one", "Install gem-parallel, whose strategies do.")
    strategies = {name: _options(name, config.parallel.options.get(name, {})) for name in config.parallel.strategies}
    return planner(
        StepRequest(
            topology=topology,
            model=model,
            batch=facts,
            tables=tables,
            table_replicas=int(config.embedding.options.get("replicas", 1)),
            strategies=strategies,
            best=best,
            assume=assumptions(assume),
            micro_batches=config.optim.accumulate,
        )
    )


def _options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    options = host().options("parallel_strategies", name, dict(given))
    return dict(options) if isinstance(options, Mapping) else dict(options.model_dump())


def assumptions(words: Sequence[str]) -> dict[str, float]:
    """``NAME=VALUE`` words as figures; RequestError for a word that is none."""
    found = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise RequestError(f"--assume {word}", "it is no NAME=NUMBER", "For example --assume matmul=0.4.") from error
    return found


def print_step(plan: StepPlan) -> None:
    """The layouts as a table, then the first one's drawing, reasons, time and memory, and what was assumed."""
    best = plan.layouts[0]
    if plan.considered > 1:
        refused = "".join(f"; {count} refused: {reason}" for reason, count in plan.refused.items())
        print(f"\n{plan.considered} layouts{refused}\n")
        print_table((*(axis.upper() for axis in AXES), "STEP", "SCALING", "MFU", "MEMORY"), [_row(layout) for layout in plan.layouts])
    print("\nMESH")
    print("\n".join(plan.drawing))
    for why in best.why:
        print(f"- {why}")
    print()
    print_table(("A STEP", "MEAN OF RANKS", "ITS SHARE"), [*_parts(best), ("in all", time(best.seconds), "100 %")])
    print()
    rows = [(name, size(count)) for name, count in best.memory.items()]
    fits = {None: "unknown", True: "it fits", False: "more than a device has"}[best.fits]
    print_table(("MEMORY OF THE FULLEST RANK", ""), [*rows, ("in all", f"{size(sum(best.memory.values()))}: {fits}")])
    print()
    print(f"{best.samples_per_second:,.0f} rows a second; scaling ratio {best.scaling:.1%}; bound by {best.binding}")
    print(f"local MFU {best.local_mfu:.1%} x scaling ratio {best.scaling:.1%} = MFU {best.mfu:.1%}")
    if best.settings:
        print("asked for by " + " ".join(f"--set '{setting}'" for setting in best.settings))
    print("\nASSUMED (--assume NAME=VALUE)")
    print("\n".join(plan.assumptions))


def _row(layout: LayoutPlan) -> tuple[str, ...]:
    axes = (str(layout.axes[axis]) for axis in AXES)
    return (*axes, time(layout.seconds), f"{layout.scaling:.1%}", f"{layout.mfu:.1%}", size(sum(layout.memory.values())))


def _parts(layout: LayoutPlan) -> list[tuple[str, str, str]]:
    parts = sorted(layout.parts.items(), key=lambda part: -part[1])
    return [(name, time(seconds), f"{seconds / layout.seconds:.1%}") for name, seconds in parts if seconds / layout.seconds >= 5e-4]


def time(seconds: float) -> str:
    """Seconds in milliseconds or microseconds, three digits."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"
