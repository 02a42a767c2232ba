"""``gem precision report``: one self-contained page about the number formats of a run, made from the files of its folder."""

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from gem_core.spec import RequestError
from gem_precision.guard import records
from gem_precision.probe.record import FILE as PROBE_FILE
from gem_precision.probe.record import read_probe, worst
from gem_precision.telemetry import FILE as TELEMETRY_FILE

Records = Sequence[Mapping[str, Any]]

PAGE = "precision.html"
PANELS = (
    ("amax", "largest value", "log"),
    ("sqnr", "SQNR (dB)", "linear"),
    ("saturated", "share saturated", "linear"),
    ("underflow", "share lost", "linear"),
)
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;color:#1e293b;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;border-bottom:1px solid #e2e8f0}"
    "svg{max-width:100%;height:auto}code{color:#334155}"
)


def write_report(run: Path, out: Path) -> Path:
    """Write the page of a run folder.

    Raises:
        RequestError: the folder holds no manifest of a run.
    """
    manifest = _manifest(run)
    options = {row["path"].removeprefix("precision."): row["value"] for row in manifest["config"] if row["path"].startswith("precision.")}
    guard = records.read_lines(run / records.FILE)
    sections = [
        ("Recipe", table(("setting", "value"), options.items())),
        ("Decisions", decisions(manifest["precision"])),
        ("The guard", guard_section(guard)),
        ("Signal to noise of each low site, measured by the guard", noise_section(guard)),
        ("Operands of each low layer while it trained", telemetry_section(records.read_lines(run / TELEMETRY_FILE))),
        ("Probe", probe_section(run, options.get("options.probe") or options.get("options.ramp.probe"))),
    ]
    body = "".join(f"<h2>{escape(title)}</h2>\n{content}\n" for title, content in sections)
    name = escape(run.resolve().name)
    head = f'<meta charset="utf-8"><title>Number formats of {name}</title><style>{_STYLE}</style>'
    page = f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n<h1>Number formats of {name}</h1>\n{body}</body></html>\n"
    out.write_text(page, encoding="utf-8")
    return out


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table of plain values."""
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table><tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def decisions(made: Records) -> str:
    """Every module and kernel with its format and reason; those that share both stand together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for decision in made:
        groups.setdefault((decision["format"], decision["reason"]), []).append(decision["module"])
    return table(("format", "reason", "modules"), [(form, reason, ", ".join(names)) for (form, reason), names in groups.items()])


def guard_section(guard: Records) -> str:
    """A curve for each task with its interval, the bound, and what was done."""
    if not guard:
        return "<p>This run did not guard itself: set <code>precision.options.guard.every</code>.</p>"
    tasks = dict.fromkeys(task for record in guard for task in record["tasks"])
    done = [record for record in guard if record["action"]]
    charts = [_svg(_guard_curve(task, guard, done)) for task in tasks]
    told = table(("step", "action", "why"), [(r["step"], r["action"], r["reason"]) for r in done]) if done else "<p>Nothing had to be done.</p>"
    return "".join(charts) + told


def noise_section(guard: Records) -> str:
    """The signal-to-noise ratio of each site's low results over the pairs."""
    sites = dict.fromkeys(site for record in guard for site in record["sites"])
    if not sites:
        return "<p>No pair was measured.</p>"
    figure = Figure(figsize=(9, 3.2 + 0.11 * len(sites)), layout="constrained")
    axes = figure.subplots()
    for site in sites:
        points = [(r["step"], r["sites"][site]) for r in guard if site in r["sites"]]
        axes.plot([x for x, _ in points], [_number(y) for _, y in points], marker=".", label=site, linewidth=1)
    _label(axes, "step", "SQNR (dB)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    return _svg(figure)


def telemetry_section(rows: Records) -> str:
    """For each layer: largest value, SQNR, saturation and underflow of its operands."""
    if not rows:
        return "<p>No telemetry: set <code>precision.options.telemetry = true</code>.</p>"
    sites = dict.fromkeys(row["site"] for row in rows)
    shown = ((site, _svg(_operands([row for row in rows if row["site"] == site]))) for site in sites)
    return "".join(f"<h3><code>{escape(site)}</code></h3>{chart}" for site, chart in shown)


def probe_section(run: Path, asked: Any) -> str:
    """The table of a sweep, if the run is one or was given one that is still there."""
    places = [run, *([Path(str(asked))] if asked else [])]
    found = next((place for place in places if (place / PROBE_FILE if place.is_dir() else place).is_file()), None)
    if found is None:
        return "<p>No probe: <code>gem precision sweep</code> makes one.</p>"
    lowest = worst(read_probe(found))
    recipes = list(dict.fromkeys(recipe for values in lowest.values() for recipe in values))
    ordered = sorted(lowest.items(), key=lambda item: min(item[1].values()))
    cells = [(site, *(_decibels(values.get(recipe)) for recipe in recipes)) for site, values in ordered]
    return f"<p>Lowest SQNR of each site's products in dB, the most sensitive site first.</p>{table(('site', *recipes), cells)}"


def _guard_curve(task: str, guard: Records, done: Records) -> Figure:
    seen = [(r["step"], r["tasks"][task]) for r in guard if task in r["tasks"]]
    steps = [step for step, _ in seen]
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, [100 * t["low"] for _, t in seen], [100 * t["high"] for _, t in seen], alpha=0.2, label="95 % interval")
    axes.plot(steps, [100 * t["difference"] for _, t in seen], marker=".", label="low against high")
    axes.axhline(100 * guard[-1]["bound"], color="#dc2626", linestyle="--", linewidth=1, label="bound")
    for record in done:
        axes.axvline(record["step"], color="#ea580c", linewidth=1, linestyle=":")
    _label(axes, "step", "rise of NE (%)")
    axes.set_title(f"{task}: the last pairs at each step", fontsize=9)
    axes.legend(fontsize=7, frameon=False)
    return figure


def _operands(rows: Records) -> Figure:
    figure = Figure(figsize=(11, 2.1), layout="constrained")
    panels = figure.subplots(1, len(PANELS))
    for axes, (key, title, scale) in zip(panels, PANELS, strict=True):
        for role in ("inputs", "weights", "grads"):
            points = [(row["step"], _number(row[key])) for row in rows if row["role"] == role]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=role, linewidth=1)
        if any(_number(row[key]) > 0 for row in rows):
            axes.set_yscale(scale)
        _label(axes, "step", "")
        axes.set_title(title, fontsize=8)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=7, frameon=False)
    return figure


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)


def _svg(figure: Figure) -> str:
    """An inline SVG element with texts as texts, which matplotlib escapes."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _decibels(value: float | None) -> str:
    return "" if value is None else "exact" if math.isinf(value) else f"{value:.1f}"


def _manifest(run: Path) -> dict[str, Any]:
    do = "Give the folder of a run, for example runs/NAME."
    try:
        content = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"gem precision report {run}", f"its manifest.json cannot be read ({error})", do) from error
    if not isinstance(content, dict) or "precision" not in content or "config" not in content:
        raise RequestError(f"gem precision report {run}", "its manifest.json is not that of a run", do)
    return content
