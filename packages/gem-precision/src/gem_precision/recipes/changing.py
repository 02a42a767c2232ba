"""The part of a recipe that goes on while a run trains: sites turn low by a ramp, and a guard watches what that costs and acts."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gem_core.spec import PairedSums, PrecisionDecision, PrecisionNews, RequestError
from gem_precision.guard.inside import Guard
from gem_precision.guard.records import append
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
    """``gem_core.spec.ChangingPrecision`` and ``Recordable`` over the sites that a recipe has lowered. Without a guard and a ramp nothing changes.

    Args:
        guard: how the run is watched; None for not at all.
        ramp: when sites turn low; None for at once.
        telemetry: what must not see a pair's first pass; None for none.
    """

    def __init__(self, guard: GuardOptions | None, ramp: RampOptions | None, telemetry: Telemetry | None) -> None:
        self._guard = None if guard is None else Guard(guard)
        self._ramp, self._telemetry = ramp, telemetry
        self._decided: Sequence[PrecisionDecision] = ()
        self._lowered: dict[str, Lowered] = {}
        self._switches: dict[str, Switch] = {}
        self._begins: dict[str, int] = {}
        self._fallen: dict[str, str] = {}
        self._step = 0

    def follow(self, lowered: Sequence[Lowered], decisions: Sequence[PrecisionDecision]) -> None:
        """Take the lowered sites over.

        Args:
            lowered: what the recipe has lowered.
            decisions: of all sites and modules, low ones as if they were low throughout.

        Raises:
            RequestError: a guard or a ramp is asked for, and no site is low.
        """
        self._decided = decisions
        asked = "guard" if self._guard is not None else "ramp" if self._ramp is not None else None
        if asked is None:
            return
        if not lowered:
            do = "Lower precision.options.small, or leave it out; the manifest has a reason for each module."
            raise RequestError(f"precision.options.{asked}", "no site of this model is in low precision", do)
        self._lowered = {each.site.name: each for each in lowered}
        self._switches = {name: install(each.site) for name, each in self._lowered.items()}
        self._begins = low_from({name: each.preset for name, each in self._lowered.items()}, self._ramp)
        self._set()

    def begin_step(self, step: int) -> bool:
        """Set every site for a step; whether it is paired: one that the guard is due in, if a site is low."""
        before = self._low()
        self._step = step
        self._set()
        if self._guard is None:
            return False
        if self._low() != before:
            self._guard.forget()
        return self._guard.due(step) and bool(self._low())

    def _set(self) -> None:
        for name, switch in self._switches.items():
            switch.low = name not in self._fallen and max(1, self._step) >= self._begins[name]

    def _low(self) -> list[str]:
        return [name for name, switch in self._switches.items() if switch.low]

    @contextmanager
    def high(self) -> Iterator[None]:
        """All sites compute high, and each low one measures beside it what its low result would have added."""
        self._compare(True)
        try:
            yield
        finally:
            self._compare(False)

    def _compare(self, on: bool) -> None:
        for switch in self._switches.values():
            switch.comparing = on
        if self._telemetry is not None:
            self._telemetry.paused = on

    def sums(self) -> Sequence[float]:
        """Rows of each site's high results, and the shares of them that low ones added."""
        return [value for switch in self._switches.values() for value in switch.take()]

    def observe(self, step: int, pairs: Mapping[str, PairedSums], sums: Sequence[float], folder: Path | None) -> PrecisionNews:
        """Judge the last pairs; on a breach warn, let the worst site fall back, or ask for the end of the run."""
        assert self._guard is not None
        by_site = dict(zip(self._switches, zip(sums[::2], sums[1::2], strict=True), strict=True))
        record, why = self._guard.judge(pairs, {name: ratio(*by_site[name]) for name in self._low()})
        news = PrecisionNews(record=record) if why is None else self._act(self._guard, step, record, why)
        if folder is not None:
            append(folder, {"step": step, **news.record})
        return news

    def _act(self, guard: Guard, step: int, record: dict[str, Any], why: str) -> PrecisionNews:
        action, said = guard.options.on_breach, why
        if action == "fallback":
            noise: dict[str, float | None] = record["sites"]
            site = min(noise, key=lambda name: math.inf if (value := noise[name]) is None else value)
            figure = "none is measurable" if noise[site] is None else f"it is {noise[site]:.1f} dB"
            self._fallen[site] = f"since step {step}, as {why}; its signal-to-noise ratio is the lowest of the low sites: {figure}"
            self._set()
            guard.forget()
            said = f"{site} is high from now on: {self._fallen[site]}"
            record["site"] = site
        return PrecisionNews(record={**record, "action": action, "reason": said}, say=said, stop=why if action == "stop" else None)

    def decisions(self) -> Sequence[PrecisionDecision]:
        """What ``prepare`` returned, with what has changed since and the step that a ramp begins with."""
        return [self._now(decision) for decision in self._decided]

    def _now(self, decision: PrecisionDecision) -> PrecisionDecision:
        name = decision.module
        if name in self._fallen:
            return PrecisionDecision(module=name, format=self._lowered[name].high, reason=self._fallen[name])
        if self._begins.get(name, 1) > 1:
            return replace(decision, reason=f"{decision.reason}; {self._lowered[name].high} before step {self._begins[name]}")
        return decision

    def not_recordable(self) -> str | None:
        """As ``gem_core.spec.Recordable`` has it: what goes on while a run trains is not in a recording."""
        if self._guard is not None:
            return "its guard computes some steps twice"
        if self._ramp is not None:
            return "its ramp turns sites low by the step"
        return None if self._telemetry is None else "its telemetry looks at the operands of each call"

    def state_dict(self) -> dict[str, Any]:
        """The step, the sites that fell back, the ramp as it was laid out, and what the guard knows."""
        guard = None if self._guard is None else self._guard.state_dict()
        return {"step": self._step, "fallen": dict(self._fallen), "begins": dict(self._begins), "guard": guard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``. Sites that this model has not lowered are passed over: an evaluation may have other options."""
        self._step = state["step"]
        self._fallen = {name: why for name, why in state["fallen"].items() if name in self._switches}
        self._begins |= {name: step for name, step in state["begins"].items() if name in self._switches}
        if self._guard is not None and state["guard"] is not None:
            self._guard.load_state_dict(state["guard"])
        self._set()
