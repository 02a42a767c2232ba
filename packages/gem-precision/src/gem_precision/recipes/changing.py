"""The part of a recipe that goes on while a run trains: sites turn low by a ramp, and a guard watches what that costs and acts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gem_core.spec import PairedSums, PrecisionDecision, PrecisionNews, RequestError
from gem_precision.guard.records import append
from gem_precision.guard.window import Judged, Window
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.probe.record import ratio
from gem_precision.ramps import low_from
from gem_precision.sites import Site
from gem_precision.switches import Switch, install
from gem_precision.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Lowered:
    """A site in low precision: the recipe whose formats it has, and the format that it has when it is high."""

    site: Site
    preset: str
    high: str


class Changing:
    """``gem_core.spec.ChangingPrecision`` over the sites that a recipe has lowered.

    Args:
        guard: how the run is watched; None for not at all.
        ramp: when sites turn low; None for at once.
        telemetry: what must not see a pair's first pass; None for none.
    """

    def __init__(self, guard: GuardOptions | None, ramp: RampOptions | None, telemetry: Telemetry | None) -> None:
        self._guard, self._ramp, self._seen = guard, ramp, telemetry
        self._window = Window(guard.pairs, guard.bound) if guard is not None else None
        self._switches: dict[str, Switch] = {}
        self._decided: Sequence[PrecisionDecision] = ()
        self._high_formats: Mapping[str, str] = {}
        self._begins: dict[str, int] = {}
        self._fallen: dict[str, str] = {}
        self._step, self._breached = 0, False

    def follow(self, sites: Sequence[Lowered], decisions: Sequence[PrecisionDecision]) -> None:
        """Take the lowered sites over.

        Args:
            sites: what the recipe has lowered.
            decisions: of all sites and modules, low ones as if they were low throughout.

        Raises:
            RequestError: a guard or a ramp is asked for, and no site is low.
        """
        asked = "guard" if self._guard is not None else "ramp" if self._ramp is not None else None
        if asked is not None and not sites:
            do = "Lower precision.options.small, or leave it out; the manifest has a reason for each module."
            raise RequestError(f"precision.options.{asked}", "no site of this model is in low precision", do)
        self._decided = decisions
        if asked is None:
            return
        self._switches = {lowered.site.name: install(lowered.site) for lowered in sites}
        self._high_formats = {lowered.site.name: lowered.high for lowered in sites}
        self._begins = low_from({lowered.site.name: lowered.preset for lowered in sites}, self._ramp)
        self._set()

    def begin_step(self, step: int) -> bool:
        """Set every site for a step; whether it is paired: every so many steps, if a site is low."""
        before = self._low_names()
        self._step = step
        self._set()
        if self._window is not None and self._low_names() != before:  # earlier pairs are of other formats
            self._window.clear()
        return self._guard is not None and step % self._guard.every == 0 and bool(self._low_names())

    def _low_names(self) -> list[str]:
        return [name for name, switch in self._switches.items() if switch.low]

    def _set(self) -> None:
        for name, switch in self._switches.items():
            switch.low = name not in self._fallen and max(1, self._step) >= self._begins[name]

    @contextmanager
    def high(self) -> Iterator[None]:
        """All sites compute high, and each low one measures beside it what its low result would have added."""
        switches = self._switches.values()
        for switch in switches:
            switch.comparing = True
        if self._seen is not None:
            self._seen.paused = True
        try:
            yield
        finally:
            for switch in switches:
                switch.comparing = False
            if self._seen is not None:
                self._seen.paused = False

    def sums(self) -> Sequence[float]:
        """Energies of each site's high results, and of what low ones added."""
        return [value for switch in self._switches.values() for value in switch.take()]

    def observe(self, step: int, pairs: Mapping[str, PairedSums], sums: Sequence[float], folder: Path | None) -> PrecisionNews:
        """Judge the last pairs; on a breach warn, let the worst site fall back, or ask for the end of the run."""
        assert self._guard is not None
        assert self._window is not None
        energies = zip(self._switches.items(), sums[::2], sums[1::2], strict=True)
        noise = {name: ratio(*both) for (name, switch), *both in energies if switch.low}
        self._window.add(pairs)
        judged = self._window.judge()
        tasks = {task: result.as_dict() for task, result in judged.items()}
        record: dict[str, Any] = {"bound": self._guard.bound, "tasks": tasks, "sites": noise, "action": None}
        breaches = [item for item in judged.items() if item[1].verdict == "breach"]
        news = PrecisionNews(record=record)
        if breaches:
            worst = max(breaches, key=lambda item: item[1].low)
            news = self._act(step, record, in_words(*worst, self._guard.bound))
        self._breached = bool(breaches)
        if folder is not None:
            append(folder, {"step": step, **news.record})
        return news

    def _act(self, step: int, record: dict[str, Any], why: str) -> PrecisionNews:
        assert self._guard is not None
        action, said = self._guard.on_breach, why
        if action == "warn" and self._breached:  # it has been told
            return PrecisionNews(record=record)
        if action == "fallback":
            site = min(record["sites"], key=lambda name: math.inf if record["sites"][name] is None else record["sites"][name])
            said = f"{site} is high from now on: {self._fall(step, site, record['sites'][site], why)}"
            record["site"] = site
        return PrecisionNews(record={**record, "action": action, "reason": said}, say=said, stop=why if action == "stop" else None)

    def _fall(self, step: int, site: str, noise: float | None, why: str) -> str:
        """Let a site be high for the rest of the run, and forget the pairs, which are of other formats; return the reason."""
        assert self._window is not None
        figure = "none is measurable" if noise is None else f"it is {noise:.1f} dB"
        self._fallen[site] = f"since step {step}, as {why}; its signal-to-noise ratio is the lowest of the low sites: {figure}"
        self._window.clear()
        self._set()
        return self._fallen[site]

    def decisions(self) -> Sequence[PrecisionDecision]:
        """What ``prepare`` returned, with what has changed since and the step that a ramp begins with."""
        return [self._now(decision) for decision in self._decided]

    def _now(self, decision: PrecisionDecision) -> PrecisionDecision:
        name = decision.module
        if name in self._fallen:
            return PrecisionDecision(module=name, format=self._high_formats[name], reason=self._fallen[name])
        if self._begins.get(name, 1) > 1:
            return replace(decision, reason=f"{decision.reason}; {self._high_formats[name]} before step {self._begins[name]}")
        return decision

    def state_dict(self) -> dict[str, Any]:
        """The step, the sites that fell back, the ramp as it was laid out, and the last pairs."""
        window = self._window.state_dict() if self._window is not None else {}
        return {"step": self._step, "fallen": dict(self._fallen), "begins": dict(self._begins), "window": window, "breached": self._breached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Sites that this model has not lowered are passed over: an evaluation may have another recipe."""
        self._step, self._breached = state["step"], state["breached"]
        self._fallen = {name: why for name, why in state["fallen"].items() if name in self._switches}
        self._begins |= {name: step for name, step in state["begins"].items() if name in self._switches}
        if self._window is not None:
            self._window.load_state_dict(state["window"])
        self._set()


def in_words(task: str, judged: Judged, bound: float) -> str:
    """One line about a breach."""
    return (
        f"normalised entropy of {task!r} is {100 * judged.difference:.3f} % higher in low precision than high "
        f"({100 * judged.low:.3f} .. {100 * judged.high:.3f} % over {judged.pairs} pairs), and {100 * bound:g} % is the bound"
    )
