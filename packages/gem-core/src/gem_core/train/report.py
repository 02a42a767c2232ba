"""``report.html``: one self-contained page about a run, made from the files of its folder. It opens without a network."""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gem_core.config.show import as_toml
from gem_core.train.folder import read_manifest
from gem_core.train.log import read_log

Records = Sequence[Mapping[str, Any]]
Curve = tuple[str, Sequence[float], Sequence[float]]
Level = tuple[str, float]

_INK, _GRID = "#334155", "#e2e8f0"
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2")


def write_report(folder: Path) -> Path:
    """Write the page from ``manifest.json``, ``summary.json`` and ``log.jsonl`` of a run folder; return its path."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    manifest, records = read_manifest(folder), read_log(folder)
    template = files("gem_core.train").joinpath("report.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    path = folder / "report.html"
    html = page.render(
        name=folder.resolve().name,
        summary=summary,
        manifest=manifest,
        figures=figures(records, summary["baselines"]),
        metrics=metric_table(summary),
        facts=facts(summary, manifest),
        configuration=[{**row, "value": as_toml(row["value"])} for row in manifest["config"]],
        decisions=grouped_decisions(manifest["precision"]),
        time=step_table(summary.get("time")),
        named=(summary.get("time") or {}).get("named", {}),
        ledgers={"data source": summary["ledger"]["source"], "training": summary["ledger"]["train"]},
    )
    path.write_text(html, encoding="utf-8")
    return path


def figures(records: Records, baselines: Mapping[str, Any]) -> list[tuple[str, Markup]]:
    """``(title, inline SVG)`` of the curves that the log has data for."""
    trains = [r for r in records if r["event"] == "train"]
    evals = [r for r in records if r["event"] == "eval"]
    steps = [r["step"] for r in trains]
    last = max((r["step"] for r in records), default=0)
    drawn: list[tuple[str, list[Curve], list[Level]]] = [("Training loss", [("loss", steps, [r["loss"] for r in trains])], [])]
    for key, title in (("auc", "Test AUC"), ("ne", "Test normalised entropy")):
        drawn.append((title, *_metric_curves(evals, baselines, key)))
    drawn.append(("Samples a second", [("samples/s", steps, [r["samples_per_second"] for r in trains])], []))
    drawn.append(("MFU (%)", [("MFU", steps, [100 * r["mfu"] for r in trains])], []))
    drawn.append(("Where a step goes (ms)", _part_curves([r for r in trains if "time" in r]), []))
    return [(title, _svg(curves, levels, last)) for title, curves, levels in drawn if any(x for _, x, _ in curves)]


def metric_table(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row for each task and, under it, for each baseline of that task."""
    rows = []
    for task, m in summary["test"].items():
        rows.append({"task": task, "model": "this run", "own": True, **m})
        rows += [{"task": "", "model": name, **tasks[task]} for name, tasks in summary["baselines"].items() if task in tasks]
    return rows


def step_table(time: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """``(part, milliseconds of a mean step, share)``, the largest first; empty for a run without a step ledger."""
    parts = (time or {}).get("parts", {})
    whole = sum(parts.values())
    return [(name, f"{1e3 * seconds:.3f}", f"{100 * seconds / whole:.1f} %") for name, seconds in parts.items()]


def facts(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures at the top of the page."""
    machine, peak = manifest["machine"], summary["peak"]
    return [
        ("rows trained", f"{summary['rows']:,}"),
        ("steps", f"{summary['steps']:,}"),
        ("training", f"{summary['train_seconds']:.1f} s"),
        ("evaluation", f"{summary['eval_seconds']:.1f} s"),
        ("samples a second", f"{summary['samples_per_second']:,.0f}"),
        ("MFU", f"{100 * summary['mfu']:.2f} %"),
        ("peak of a rank", f"{peak['flops_per_second'] / 1e9:,.0f} GFLOP/s {peak['dtype']} ({peak['source']})"),
        ("machine", f"{machine['world']} {machine['device']} {machine['name']}"),
        ("dense parameters", f"{manifest['parameters']['dense']:,}"),
        ("table parameters", f"{manifest['parameters']['tables']:,}"),
        ("seed", str(summary["seed"])),
        ("first step after", f"{summary['first_step_seconds']:.1f} s"),
        *([("compiling", f"{compiled['seconds']:.1f} s, {compiled['graphs']} graphs")] if (compiled := summary["compile"])["graphs"] else []),
    ]


def grouped_decisions(decisions: Iterable[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Precision decisions that share format and reason, together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for decision in decisions:
        groups.setdefault((decision["format"], decision["reason"]), []).append(decision["module"])
    return [{"format": form, "reason": reason, "modules": modules} for (form, reason), modules in groups.items()]


def _part_curves(trains: Records) -> list[Curve]:
    """Milliseconds of a mean step by part, of the parts that took most in the last window."""
    names = list(trains[-1]["time"]["parts"])[: len(_COLOURS)] if trains else []
    steps = [r["step"] for r in trains]
    return [(name, steps, [1e3 * r["time"]["parts"].get(name, 0.0) for r in trains]) for name in names]


def _metric_curves(evals: Records, baselines: Mapping[str, Any], key: str) -> tuple[list[Curve], list[Level]]:
    tasks = list(evals[-1]["test"]) if evals else []
    curves: list[Curve] = []
    for task in tasks:
        points = [(r["step"], r["test"][task][key]) for r in evals if r["test"][task][key] is not None]
        curves.append((task, [x for x, _ in points], [y for _, y in points]))
    levels = [(f"{name}, {task}", b[task][key]) for name, b in baselines.items() for task in tasks if b.get(task, {}).get(key) is not None]
    return curves, levels


def _svg(curves: Sequence[Curve], levels: Sequence[Level], last: int) -> Markup:
    """A line chart over the steps 0 to ``last`` as an inline SVG element; ``levels`` are horizontal, dashed."""
    figure = Figure(figsize=(5.4, 2.9), layout="constrained")
    axes = figure.subplots()
    for (label, x, y), colour in zip(curves, _COLOURS * len(curves), strict=False):
        axes.plot(x, y, label=label, color=colour, linewidth=1.8, marker="o" if len(x) < 12 else None, markersize=4)
    for (label, level), colour in zip(levels, _COLOURS[::-1] * len(levels), strict=False):
        axes.axhline(level, label=label, color=colour, linewidth=1.2, linestyle="--")
    axes.set_xlabel("step", color=_INK)
    axes.set_xlim(0, 1.02 * last)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GRID)
    if len(curves) + len(levels) > 1:
        axes.legend(frameon=False, fontsize=8, labelcolor=_INK)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return Markup(text[text.index("<svg") :])  # drawn here: matplotlib escapes the labels
