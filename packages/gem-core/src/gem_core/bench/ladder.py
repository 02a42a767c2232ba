"""The ladder of ``gem bench step``: one change to a run a rung, each on top of those below, from padded torch to all that there is.

A rung says what it changes as ``--set`` words. One that cannot be on this machine, or with this data source, says why, and its change is left out of
the rungs above. Nothing falls back in silence: what a rung promises is looked up in the kernels that the composed model would be bound to.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gem_core.builtin.baselines import ATTENTION, BASELINE_OPS
from gem_core.config.load import LoadedConfig, load_config
from gem_core.plugins import host
from gem_core.plugins.nearest import nearest
from gem_core.spec import GemError, RequestError
from gem_core.train.compose import preview
from gem_core.train.composed import Run
from gem_core.train.graphs import check_recordable

_OTHERS = tuple(op.name for op in BASELINE_OPS if op.name not in ATTENTION)
_UNFUSED = {"reference", "padded", "bucketed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One step of the ladder.

    Args:
        name: the word of ``--rung``.
        summary: what it measures, in a line.
        changes: ``PATH=VALUE`` words on top of the rung below.
        options: likewise for the data source's own options; those that it does not have are left out.
        cannot: the reasons why a run composed like this is not what the rung promises; empty if it is.
    """

    name: str
    summary: str
    changes: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    cannot: Callable[[Run], list[str]] = lambda run: []


def _use(backend: str, ops: Sequence[str]) -> str:
    named = ", ".join(f"{op} = {backend!r}" for op in ops)
    return f"kernels.use={{{named}}}"


def _only_unfused(ops: Sequence[str]) -> Callable[[Run], list[str]]:
    """Where none of the model's kernels for these ops is fused, the rung is no other than the one below."""

    def cannot(run: Run) -> list[str]:
        chosen = {op: backends for op, backends in run.kernels.items() if op in ops}
        if not chosen:
            return [f"the model uses none of {', '.join(ops)}"]
        unfused = {op: backends for op, backends in chosen.items() if set(backends.split("+")) <= _UNFUSED}
        return [f"{op}: nothing but {backend} fits this machine" for op, backend in unfused.items()] if len(unfused) == len(chosen) else []

    return cannot


def _opaque(run: Run) -> list[str]:
    """Baselines run outside of compiled code, and every call of one would cut a block into pieces."""
    baselines = {op: backends for op, backends in run.kernels.items() if not {"padded", "bucketed"}.isdisjoint(backends.split("+"))}
    return [f"{op}: {backends} cannot stand inside a compiled block" for op, backends in baselines.items()]


def _no_balance(run: Run) -> list[str]:
    return [] if "balance" in source_options(run.config.data.source) else [f"the data source {run.config.data.source!r} has no option balance"]


def _not_recordable(run: Run) -> list[str]:
    try:
        check_recordable(run.world, run.precision, run.config, run.model)
    except RequestError as error:
        return [error.so]
    return []


def _nothing_low(run: Run) -> list[str]:
    if any("fp8" in decision.format for decision in run.decisions):
        return []
    told = Counter(d.reason for d in run.decisions if "emulate" in d.reason)
    return [f"none of the model's layers: {'; '.join(reason for reason, _ in told.most_common(2)) or 'they are too small'}"]


RUNGS = (
    Rung(
        name="padded",
        summary="torch without fused kernels, every row padded to the longest",
        changes=(
            _use("padded", [op.name for op in BASELINE_OPS]),
            "kernels.on_reference=allow",
            "compile.blocks=off",
            "train.ahead=false",
            "train.max_steps=0",
            "train.eval_every=0",
            "train.checkpoint_every=0",
        ),
        options=("balance=none", "workers=0"),
    ),
    Rung(
        name="bucketed",
        summary="torch without fused kernels, rows padded within buckets of alike length",
        changes=(_use("bucketed", [op.name for op in BASELINE_OPS]),),
    ),
    Rung(
        name="fused-attention",
        summary="fused kernels for attention",
        changes=(_use("bucketed", _OTHERS), "kernels.on_reference=error"),
        cannot=_only_unfused(ATTENTION),
    ),
    Rung(name="fused-blocks", summary="fused kernels for norms, gates and blocks", changes=("kernels.use={}",), cannot=_only_unfused(_OTHERS)),
    Rung(name="compiled", summary="repeated blocks compiled", changes=("compile.blocks=default",), cannot=_opaque),
    Rung(name="balanced", summary="batches of nearly equal cost", options=("balance=lpt",), cannot=_no_balance),
    Rung(name="overlapped", summary="data read and ids sent while a step computes", changes=("train.ahead=true",), options=("workers=2",)),
    Rung(
        name="graphed",
        summary="forward and backward as CUDA graphs",
        changes=("compile.graphs=4",),
        cannot=_not_recordable,
    ),
    Rung(
        name="fp8",
        summary="linear layers in FP8 where native kernels compute it",
        changes=("precision.recipe=fp8_block", "precision.options.emulate=false"),
        cannot=_nothing_low,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A rung on this machine: its configuration, or the reasons why it cannot be."""

    rung: Rung
    loaded: LoadedConfig
    reasons: tuple[str, ...] = ()


def rungs_named(names: Sequence[str]) -> tuple[Rung, ...]:
    """These rungs in the order of the ladder; all for no names. RequestError offers the nearest name for an unknown one."""
    known = [rung.name for rung in RUNGS]
    for name in names:
        if name not in known:
            raise RequestError(f"gem bench step --rung {name}", "there is no such rung", nearest(name, known))
    return tuple(rung for rung in RUNGS if not names or rung.name in names)


def climb(config: str, overrides: Sequence[str], rungs: Sequence[Rung] = RUNGS, without: Sequence[Rung] = ()) -> Iterator[Placed]:
    """Each of ``rungs`` with the changes of all rungs below it.

    Args:
        config: a TOML file or the name of a recipe.
        overrides: ``--set`` words, below those of the rungs.
        rungs: the ones wanted; the others below them are applied, and not given.
        without: rungs that are not applied; where they are wanted they are given with that as the reason why they cannot be.

    Raises:
        RequestError: the configuration without any rung is wrong, or names kernels itself.
    """
    check = preview(load_config(config, overrides))
    if check.config.kernels.use:
        raise RequestError("gem bench step with kernels.use", "its rungs name the kernels", "Leave it out; kernels.prefer orders the fused ones.")
    if check.world.size > 1:
        raise RequestError("gem bench step", f"there are {check.world.size} processes", "It measures one; `gem bench scale` measures several.")
    held: list[str] = []
    known = source_options(check.config.data.source)
    for rung in RUNGS:
        here = [*rung.changes, *(f"data.options.{option}" for option in rung.options if option.partition("=")[0] in known)]
        loaded = load_config(config, [*overrides, *held, *here])
        placed = Placed(rung=rung, loaded=loaded, reasons=("it is left out, as asked for",)) if rung in without else _place(rung, loaded)
        held += [] if placed.reasons else here
        if rung in rungs:
            yield placed


def source_options(source: str) -> set[str]:
    """Names of a data source's own options; empty for one that declares no model of them."""
    model = host().options_model("data_sources", source)
    return set() if model is None else set(model.model_fields)


def _place(rung: Rung, loaded: LoadedConfig) -> Placed:
    try:
        run = preview(loaded)
    except GemError as error:
        return Placed(rung=rung, loaded=loaded, reasons=(f"{error.asked}: {error.so}",))
    return Placed(rung=rung, loaded=loaded, reasons=tuple(rung.cannot(run)))
