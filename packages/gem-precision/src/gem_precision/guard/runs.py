"""Training the pairs: each run is a ``gem`` process of its own, and one that is there already is not repeated."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gem_core.spec import RequestError
from gem_precision.guard.compare import Scored, Verdict, compare
from gem_precision.run import gem

PREDICTIONS = "predictions.npz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is compared.

    Args:
        config: a TOML file or the name of a recipe of gem-core.
        recipe: the precision recipe on trial.
        against: the recipe it is held against.
        seeds: one pair of runs for each.
        overrides: ``PATH=VALUE`` for both sides.
        options: ``PATH=VALUE`` for the recipe on trial alone.
        folder: where the runs go.
    """

    config: str
    recipe: str
    against: str
    seeds: Sequence[int]
    overrides: Sequence[str]
    options: Sequence[str]
    folder: Path


def run_pairs(plan: Plan, say: Callable[[str], None]) -> list[Verdict]:
    """Train and score what is missing, compare, and write ``guard.json``.

    Raises:
        RequestError: seeds repeat, or a folder holds a run of another configuration.
        RunFailed: a run failed.
    """
    if len(set(plan.seeds)) != len(plan.seeds) or not plan.seeds:
        raise RequestError("gem precision guard", f"the seeds are {list(plan.seeds)}", "Give one or more different seeds.")
    sides: dict[str, list[dict[str, Scored]]] = {plan.against: [], plan.recipe: []}
    if len(sides) != 2:
        raise RequestError("gem precision guard", f"{plan.recipe!r} is held against itself", "Name another recipe with --against.")
    for seed in plan.seeds:
        for recipe, side in sides.items():
            side.append(_scored(plan, recipe, seed, say))
    tasks = list(sides[plan.against][0])
    verdicts = [compare(task, *([run[task] for run in side] for side in sides.values())) for task in tasks]
    content = {"recipe": plan.recipe, "against": plan.against, "seeds": list(plan.seeds), "tasks": [v.as_dict() for v in verdicts]}
    (plan.folder / "guard.json").write_text(json.dumps(content, indent=1))
    return verdicts


def _scored(plan: Plan, recipe: str, seed: int, say: Callable[[str], None]) -> dict[str, Scored]:
    folder = plan.folder / f"{recipe}-{seed}"
    options = plan.options if recipe == plan.recipe else ()
    asked = [f"precision.recipe={recipe}", *plan.overrides, *options]
    note = folder / "asked.json"
    if note.exists() and json.loads(note.read_text()) != [plan.config, asked]:
        raise RequestError(f"gem precision guard in {plan.folder}", f"{folder.name} is a run of another configuration", "Give another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps([plan.config, asked]))
    if not (folder / PREDICTIONS).exists():
        say(f"training {folder}")
        overrides = [word for pair in asked for word in ("--set", pair)]
        run = folder / "run"
        if not (run / "summary.json").exists():
            gem("train", "-c", plan.config, "--seed", str(seed), "--out", str(run), *overrides)
        partial = folder / f"{PREDICTIONS}.part"
        gem("eval", str(run), "--predictions", str(partial))
        partial.replace(folder / PREDICTIONS)
    return read_predictions(folder / PREDICTIONS)


def read_predictions(file: Path) -> dict[str, Scored]:
    """What ``gem eval --predictions`` wrote, by task."""
    with np.load(file) as columns:
        tasks = sorted({name.rpartition("/")[0] for name in columns.files})
        return {task: Scored(*(columns[f"{task}/{name}"] for name in ("logit", "label", "weight"))) for task in tasks}
