"""Where the time of a step goes: profiled steps of a composed run, each microsecond of them in one category."""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gem_core.bench.roofline import finish
from gem_core.bench.step import take, works_of
from gem_core.bench.timeline import CATEGORIES, GAPS, LOOKED_UP, OP, attribute, segments
from gem_core.ops.slot import kernel_slots
from gem_core.spec import RequestError

WINDOW = "gem: profiled steps"
_INK = "#334155"
_COLOURS = ("#2563eb", "#1e3a8a", "#0891b2", "#9333ea", "#059669", "#dc2626", "#ea580c", "#cbd5e1")
_TOLD_IN_BAR = 0.04


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Figures of a mean step.

    Args:
        seconds: by category, in the order of ``CATEGORIES``, then ``GAPS``; they add up to ``step``.
        names: seconds by category and operator or kernel, most first; gaps have none.
        step: of a profiled step.
        plain: of a step before the profiler was started.
        steps: how many were profiled.
    """

    seconds: Mapping[str, float]
    names: Mapping[tuple[str, str], float]
    step: float
    plain: float
    steps: int

    def share(self, category: str) -> float:
        """Of a profiled step."""
        return self.seconds[category] / self.step


def profile_steps(run: Any, *, steps: int, warmup: int) -> Breakdown:
    """Take ``warmup`` steps, ``steps`` that are timed, and ``steps`` under the profiler.

    Args:
        run: composed for training (``gem_core.train.compose.Run``), on any number of ranks; every rank does the same and learns its own figures.

    Raises:
        RequestError: forward and backward are CUDA graphs.
        RunFailed: as training does.
    """
    if run.learner.graphs is not None:
        raise RequestError("a breakdown with compile.graphs", "what a CUDA graph computes goes by no operator's name", "Leave compile.graphs at 0.")
    device, works = run.world.device, works_of(run)

    def go(count: int) -> None:
        for _ in range(count):
            take(run, *next(works))
        finish(device)

    with named_ranges(run.model, run.embeddings):
        run.ledger.begin(0)
        go(warmup)
        begun = time.perf_counter()
        go(steps)
        plain = (time.perf_counter() - begun) / steps
        kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        with torch.profiler.profile(activities=kinds) as profiler:
            run.world.clock.tracing = True
            with torch.profiler.record_function(WINDOW):
                go(steps)
            run.world.clock.tracing = False
    return read(_events(profiler), steps=steps, plain=plain)


def read(events: Sequence[Mapping[str, Any]], *, steps: int, plain: float) -> Breakdown:
    """The breakdown of a trace whose range ``WINDOW`` holds ``steps`` steps; ``plain`` is kept."""
    times, names = attribute(*segments(events, WINDOW))
    scale = 1e-6 / steps
    ordered = sorted(names.items(), key=lambda item: -item[1])
    return Breakdown(
        seconds={category: scale * spent for category, spent in times.items()},
        names={name: scale * spent for name, spent in ordered},
        step=scale * sum(times.values()),
        plain=plain,
        steps=steps,
    )


def _events(profiler: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return events


@contextmanager
def named_ranges(model: nn.Module, embeddings: Any) -> Iterator[None]:
    """Put a range around every call of a kernel slot and around every look-up, as a trace shows them."""
    looking_up: Any = torch.profiler.record_function(LOOKED_UP)
    with ExitStack() as undo:
        for slot in kernel_slots(model):
            if slot._kernel is not None and slot.backend is not None:
                undo.callback(slot.bind, slot._kernel, slot.backend)
                slot.bind(_ranged(OP + slot.op, slot._kernel), slot.backend)
        undo.callback(embeddings.register_forward_pre_hook(lambda *_: looking_up.__enter__() and None).remove)
        undo.callback(embeddings.register_forward_hook(lambda *_: looking_up.__exit__(None, None, None)).remove)
        yield


def _ranged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)

    return call


def draw(found: Breakdown, title: str, path: Path) -> None:
    """Write one stacked bar of the categories; the ending of ``path`` names the format."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    left = 0.0
    for category, colour in zip((*CATEGORIES, GAPS), _COLOURS, strict=True):
        width, share = 1e3 * found.seconds[category], found.share(category)
        axes.barh([0], [width], left=left, color=colour, edgecolor="white", label=f"{category}  {100 * share:.1f} %")
        if share > _TOLD_IN_BAR:
            axes.text(left + width / 2, 0, f"{100 * share:.0f} %", ha="center", va="center", color="white" if category != GAPS else _INK, fontsize=8)
        left += width
    axes.set_yticks([])
    axes.set_xlim(0, left)
    axes.set_xlabel("ms of a mean step", color=_INK)
    axes.set_title(title, color=_INK, fontsize=10)
    axes.tick_params(colors=_INK, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.4))
    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "gem", "svg.fonttype": "none"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
