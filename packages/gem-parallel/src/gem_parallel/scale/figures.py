"""From the run folder of a finished run to its figures, and from the runs' figures to the rows of the results. Imports no torch.

``E2E MFU = Local MFU x Scaling Ratio``, exactly: with ``f`` model FLOPs a row, ``p`` the peak of a device and ``s(n)`` samples a second on ``n``
ranks, ``f s(n) / (n p) = f s(1) / p x s(n) / (n s(1))``. The peak is that of the run of one rank, which shares the machine with nobody.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gem_core.spec import RunFailed

FIELDS = (
    *("date", "device", "torch", "ranks", "recipe", "layout", "scaling", "samples_per_s", "ms", "ms_p99", "local_ms", "exposed_ms", "wait_ms"),
    *("data_ms", "exposed_by", "mfu", "local_mfu", "scaling_ratio", "predicted_ms", "error_pct", "note"),
)
"""Columns of the results file; docs/parallelism.md says what each holds."""
LOCAL = ("forward", "backward", "optimiser", "tables")
"""Parts of a step that a rank's own work takes."""
WAIT, DATA, AGREE, EXCHANGE = "wait for the slowest", "data", "agree", "exchange: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a run measured in its second window of steps.

    Args:
        device: name of a rank's device.
        torch: its version.
        samples_per_s: of all ranks.
        ms: a median step.
        ms_p99: the 99th percentile.
        parts: milliseconds of a mean step by part; they add up to it.
        flops_per_row: model FLOPs, forward and backward.
        peak: FLOP/s of the first rank's device.
        rows: rows of a mean step.
        day: of the measurement, ISO.
    """

    device: str
    torch: str
    samples_per_s: float
    ms: float
    ms_p99: float
    parts: Mapping[str, float]
    flops_per_row: float
    peak: float
    rows: float
    day: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def local(self) -> float:
        """Milliseconds of a rank's own work in a mean step."""
        return sum(self.parts.get(name, 0.0) for name in LOCAL)

    def compute(self) -> float:
        """Milliseconds of forward and backward in a mean step."""
        return sum(self.parts.get(name, 0.0) for name in ("forward", "backward"))

    def exposed(self) -> dict[str, float]:
        """Milliseconds of a mean step in which a rank was blocked, by collective; the wait for slower ranks is not in it."""
        found = {name.removeprefix(EXCHANGE): ms for name, ms in self.parts.items() if name.startswith(EXCHANGE) and ms}
        return {**found, **({"host values": self.parts[AGREE]} if self.parts.get(AGREE) else {})}

    def exposed_by(self) -> str:
        """``exposed`` in words, by what was sent, the longest first: collectives that differ in their block alone are added up."""
        sums: dict[str, float] = {}
        for name, ms in self.exposed().items():
            kind = name.partition(" of ")[0]
            sums[kind] = sums.get(kind, 0.0) + ms
        return "; ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(sums.items(), key=lambda item: -item[1]))


def read_run(run: Path, steps: int) -> Figures:
    """The figures of a run folder whose steps were logged in two windows of ``steps``.

    Raises:
        RunFailed: the run ended before its last step.
    """
    events = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    windows = {event["step"]: event for event in events if event["event"] == "train"}
    if not {steps, 2 * steps} <= windows.keys():
        so = f"it ended with step {max(windows, default=0)} of {2 * steps}"
        raise RunFailed(f"the run in {run}", so, "Its log.jsonl says why; give a source with more rows, or fewer --steps.")
    first, last = windows[steps], windows[2 * steps]
    summary, manifest = (json.loads((run / f"{name}.json").read_text(encoding="utf-8")) for name in ("summary", "manifest"))
    return Figures(
        device=manifest["machine"]["name"],
        torch=manifest["versions"]["torch"],
        samples_per_s=last["samples_per_second"],
        ms=1e3 * last["time"]["p50"],
        ms_p99=1e3 * last["time"]["p99"],
        parts={name: 1e3 * seconds for name, seconds in last["time"]["parts"].items()},
        flops_per_row=summary["train_flops"] / max(summary["rows"], 1),
        peak=summary["peak"]["flops_per_second"],
        rows=(last["rows"] - first["rows"]) / steps,
        day=date.today().isoformat(),
    )


def row_of(about: Mapping[str, Any], figures: Figures, base: Figures | None, predicted: float | None, notes: list[str]) -> dict[str, Any]:
    """A row of the results.

    Args:
        about: ``ranks``, ``recipe``, ``layout``, ``scaling``.
        base: the same layout's run on one rank; None where it failed.
        predicted: seconds of a step that the cost model had said, or None.
    """
    row = {
        **about,
        "date": figures.day,
        "device": figures.device,
        "torch": figures.torch,
        "samples_per_s": figures.samples_per_s,
        "ms": figures.ms,
        "ms_p99": figures.ms_p99,
        "local_ms": figures.local(),
        "exposed_ms": sum(figures.exposed().values(), 0.0),
        "wait_ms": figures.parts.get(WAIT, 0.0),
        "data_ms": figures.parts.get(DATA, 0.0),
        "exposed_by": figures.exposed_by(),
        "note": "; ".join(notes),
    }
    if base is not None:
        row["local_mfu"] = figures.flops_per_row * base.samples_per_s / base.peak
        row["scaling_ratio"] = figures.samples_per_s / about["ranks"] / base.samples_per_s
        row["mfu"] = figures.flops_per_row * figures.samples_per_s / about["ranks"] / base.peak
    if predicted is not None:
        row |= {"predicted_ms": 1e3 * predicted, "error_pct": 100 * (1e3 * predicted / figures.ms - 1)}
    return row
