"""The loop over ranks and layouts: run, keep, predict, one row each. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gem_core.spec import GemError, RunFailed
from gem_parallel.scale.figures import Figures, read_run, row_of
from gem_parallel.scale.layouts import settings_of, why_not
from gem_parallel.scale.predict import Predictor
from gem_parallel.scale.runs import REFUSED, Bench, asked_of, check_folder, first_error, keep_result, kept_result, train

Row = dict[str, Any]
Names = dict[tuple[int, tuple[str, ...]], str]
"""The layout under whose name a run is kept, by ranks and settings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a run ended: with figures, or with an exit code, the line that says why, and the log."""

    place: Path
    figures: Figures | None = None
    code: int = 0
    why: str = ""


def wanted(bench: Bench, ranks: Sequence[int], layouts: Sequence[str]) -> Names:
    """The runs of a call, each under the first layout that asks for it: on one rank several ask for the same."""
    found: Names = {}
    for count in ranks:
        for layout in layouts:
            if why_not(layout, count) is None:
                found.setdefault((count, settings_of(layout, count, bench.config)), layout)
    return found


def left(bench: Bench, names: Names) -> list[int]:
    """Numbers of ranks of the runs that no earlier call has finished."""
    return [count for (count, _), name in names.items() if kept_result(bench.place(name, count)) is None]


@dataclass(kw_only=True)
class _Runs:
    """The runs of this call, each made when it is first asked for."""

    bench: Bench
    names: Names
    ended: dict[tuple[int, tuple[str, ...]], Ended] = field(default_factory=dict)

    def run(self, layout: str, ranks: int) -> tuple[str, Ended]:
        """The name under which it was run, and how it ended."""
        key = ranks, settings_of(layout, ranks, self.bench.config)
        if key not in self.ended:
            self.ended[key] = run_once(self.bench, self.names[key], *key)
        return self.names[key], self.ended[key]


def measure(bench: Bench, ranks: Sequence[int], layouts: Sequence[str], predictor: Predictor | None) -> Iterator[tuple[Row, Row]]:
    """A row of the results for each number of ranks and layout, with what the table has no columns for: ``status``, ``log``, ``exposed``, ``parts``.

    ``status`` is ``ran``, ``failed``, or ``cannot`` where the layout is not for so many ranks. Without a predictor nothing is predicted.

    Raises:
        RequestError: the folder holds runs of another request; nothing was run then.
    """
    names = wanted(bench, ranks, layouts)
    check_folder(bench, {(name, count): asked_of(bench, count, settings) for (count, settings), name in names.items()})
    runs = _Runs(bench=bench, names=names)
    for layout, count in ((layout, count) for count in ranks for layout in layouts):
        about = {"ranks": count, "recipe": bench.recipe, "layout": layout, "scaling": "weak" if bench.weak else "strong"}
        if (reason := why_not(layout, count)) is not None:
            yield {**about, "note": f"cannot be: {reason}"}, {"status": "cannot"}
            continue
        base = runs.run(layout, 1)[1].figures
        name, ended = runs.run(layout, count)
        if ended.figures is None:
            yield _without_figures(about, ended, based=base is not None)
            continue
        notes = [] if name == layout else [f"the run of {name}, which is the same"]
        if ended.figures.rows < bench.rows_a_step(count):
            notes.append(f"steps had {ended.figures.rows:g} rows, not {bench.rows_a_step(count)}")
        predicted = None if base is None or predictor is None else _predicted(predictor, layout, count, base, notes)
        detail = {"status": "ran", "log": str(ended.place / "log.txt"), "exposed": ended.figures.exposed(), "parts": dict(ended.figures.parts)}
        yield row_of(about, ended.figures, base, predicted, notes), detail


def _predicted(predictor: Predictor, layout: str, ranks: int, base: Figures, notes: list[str]) -> float | None:
    """Seconds of a step, or None with the reason among the notes."""
    config = predictor.bench.config
    try:
        return predictor.seconds(ranks, settings_of(layout, ranks, config), base, settings_of(layout, 1, config))
    except GemError as error:
        notes.append(f"no prediction: {error.asked}: {error.so}")
        return None


def _without_figures(about: Mapping[str, Any], ended: Ended, *, based: bool) -> tuple[Row, Row]:
    """A run that was refused although the same request ran on one rank cannot be on so many; any other failed."""
    log = str(ended.place / "log.txt")
    if based and ended.code in REFUSED:
        return {**about, "note": f"cannot be: {ended.why}"}, {"status": "cannot", "log": log}
    return {**about, "note": f"failed: {ended.why} ({log})"}, {"status": "failed", "log": log}


def run_once(bench: Bench, layout: str, ranks: int, settings: Sequence[str]) -> Ended:
    """Run, or take what an earlier call has kept."""
    place, asked = bench.place(layout, ranks), asked_of(bench, ranks, settings)
    kept = kept_result(place)
    if kept is not None:
        return Ended(place=place, figures=Figures(**kept["figures"]))
    code = train(place, ranks, asked)
    if code:
        return Ended(place=place, code=code, why=first_error((place / "log.txt").read_text(encoding="utf-8", errors="replace")))
    try:
        figures = read_run(place / "run", bench.steps)
    except RunFailed as error:
        return Ended(place=place, code=error.exit_code, why=error.so)
    keep_result(place, asked, figures.as_dict())
    return Ended(place=place, figures=figures)
