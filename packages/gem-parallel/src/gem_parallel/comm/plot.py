"""The table of ``gem bench comm`` as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_parallel.charts import COLOURS, INK, save


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Bandwidth by size, and what each collective costs the matrix products beside it; rows without figures are left out."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves: dict[str, list[tuple[int, float]]] = {}
    slowed: dict[str, float] = {}
    for row in rows:
        if "gbps" in row:
            curves.setdefault(_way(row), []).append((row["bytes"], row["gbps"]))
        if "slowdown_pct" in row:
            sms = f", {row['sms']} SMs" if "sms" in row else ""
            slowed[f"{_way(row)}{sms}"] = row["slowdown_pct"]
    for (way, points), colour in zip(curves.items(), COLOURS * len(curves), strict=False):
        left.plot([size for size, _ in points], [gbps for _, gbps in points], marker="o", color=colour, label=way)
    left.set_xscale("log", base=2)
    left.set_ylim(bottom=0)
    left.set_xlabel("bytes of the whole tensor", color=INK)
    left.set_title(f"GB/s of a rank's link, {rows[0]['ranks']} ranks on {rows[0]['device']}", color=INK, fontsize=10)
    right.barh(list(slowed), list(slowed.values()), color=COLOURS[0])
    right.invert_yaxis()
    right.set_title("A matrix product beside it takes longer by (%)", color=INK, fontsize=10)
    save(figure, (left, right), path)


def _way(row: Mapping[str, Any]) -> str:
    return f"{row['what']} {row['backend']}, {row['tier']}"
