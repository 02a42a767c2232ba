"""The results as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_parallel.charts import COLOURS, INK, save
from gem_parallel.scale.figures import LOCAL


def draw(path: Path, rows: Sequence[Mapping[str, Any]], details: Sequence[Mapping[str, Any]]) -> None:
    """Samples a second by ranks, measured and predicted, and the parts of a step; rows without figures are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    ran = [(row, detail) for row, detail in zip(rows, details, strict=True) if detail["status"] == "ran"]
    for layout, colour in zip(dict.fromkeys(row["layout"] for row, _ in ran), COLOURS, strict=False):
        own = [row for row, _ in ran if row["layout"] == layout]
        left.plot([row["ranks"] for row in own], [row["samples_per_s"] for row in own], marker="o", color=colour, label=layout)
        said = [row for row in own if "predicted_ms" in row]
        left.plot(
            [row["ranks"] for row in said],
            [row["samples_per_s"] * row["ms"] / row["predicted_ms"] for row in said],
            linestyle=":",
            marker="x",
            color=colour,
            label=f"{layout}, predicted",
        )
    left.set_xscale("log", base=2)
    counts = sorted({row["ranks"] for row, _ in ran})
    left.set_xticks(counts, map(str, counts))
    left.set_ylim(bottom=0)
    left.set_xlabel("ranks", color=INK)
    left.set_title("Samples a second", color=INK, fontsize=10)
    _stack(right, ran)
    save(figure, (left, right), path)


def _stack(axes: Any, ran: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """A bar for each run: its own work, blocked by collectives, waiting, data, and the rest of the step."""
    names = [f"{row['layout']} {row['ranks']}" for row, _ in ran]
    parts = {name: [row[f"{name}_ms"] for row, _ in ran] for name in ("local", "exposed", "wait", "data")}
    parts["rest"] = [sum(detail["parts"].values()) - sum(part[i] for part in parts.values()) for i, (_, detail) in enumerate(ran)]
    before = [0.0] * len(ran)
    for (name, widths), colour in zip(parts.items(), COLOURS, strict=False):
        label = f"local ({', '.join(LOCAL)})" if name == "local" else name
        axes.barh(names, widths, left=before, color=colour, label=label)
        before = [low + width for low, width in zip(before, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_title("A mean step (ms)", color=INK, fontsize=10)
