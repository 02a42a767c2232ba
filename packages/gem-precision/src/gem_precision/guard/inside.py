"""The guard of a run that watches itself: when it looks, and what it makes of the pairs."""

from collections.abc import Mapping
from typing import Any

from gem_core.spec import PairedSums
from gem_precision.guard.window import Judged, Window
from gem_precision.options import GuardOptions


class Guard:
    """Judges the last pairs of a run by its options."""

    def __init__(self, options: GuardOptions) -> None:
        self.options = options
        self._window = Window(options.pairs, options.bound)
        self._breached = False

    def due(self, step: int) -> bool:
        """Whether a step is paired."""
        return step % self.options.every == 0

    def forget(self) -> None:
        """Formats have changed: earlier pairs say nothing of them."""
        self._window.clear()

    def judge(self, pairs: Mapping[str, PairedSums], noise: Mapping[str, float | None]) -> tuple[dict[str, Any], str | None]:
        """Take a pair in.

        Args:
            pairs: by task.
            noise: signal-to-noise ratio of each low site, dB.

        Returns:
            The record of the step, and the breach to act on in words: of the task with the highest interval. A warning is given once a breach.
        """
        self._window.add(pairs)
        judged = self._window.judge()
        tasks = {task: result.as_dict() for task, result in judged.items()}
        record = {"bound": self.options.bound, "tasks": tasks, "sites": dict(noise), "action": None}
        breaches = [item for item in judged.items() if item[1].verdict == "breach"]
        told = self._breached and self.options.on_breach == "warn"
        self._breached = bool(breaches)
        if not breaches or told:
            return record, None
        return record, in_words(*max(breaches, key=lambda item: item[1].low), self.options.bound)

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"pairs": self._window.state_dict(), "breached": self._breached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        self._window.load_state_dict(state["pairs"])
        self._breached = state["breached"]


def in_words(task: str, judged: Judged, bound: float) -> str:
    """One line about a breach."""
    return (
        f"normalised entropy of {task!r} is {100 * judged.difference:.3f} % higher in low precision than high "
        f"({100 * judged.low:.3f} .. {100 * judged.high:.3f} % over {judged.pairs} pairs), and {100 * bound:g} % is the bound"
    )
