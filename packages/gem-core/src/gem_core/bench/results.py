"""Rows of ``gem bench step`` as a file of results and as a picture."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gem_core.bench.step import COLUMNS
from gem_core.spec import RequestError

Row = Mapping[str, Any]
_INK, _GRID, _BAR, _SECOND = "#334155", "#e2e8f0", "#2563eb", "#ea580c"


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a file of results; it is made with its header if it is not there.

    Raises:
        RequestError: the file has other columns.
    """
    check_columns(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        if new:
            writer.writeheader()
        writer.writerows({name: "" if value is None else value for name, value in row.items()} for row in rows)


def check_columns(path: Path) -> None:
    """Raise RequestError if the file exists and is no file of these results."""
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file), [])
    if tuple(header) != COLUMNS:
        raise RequestError(f"--csv {path}", f"its columns are {', '.join(header) or 'none'}", f"Give a file with {', '.join(COLUMNS)}, or a new one.")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the rungs that were measured: samples a second with the factor over the first, and MFU beside HFU.

    Args:
        rows: of one recipe on one machine, in the order of the ladder.
        path: its ending says in which format; ``.svg`` files of the same rows are the same.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [row for row in rows if row.get("samples_per_s")]
    with matplotlib.rc_context({"svg.hashsalt": "gem", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10, 1.6 + 0.45 * max(len(drawn), 1)), layout="constrained")
        rates, shares = figure.subplots(1, 2, sharey=True)
        if drawn:
            _bars(drawn, rates, shares)
            steps = sorted({int(row["steps"]) for row in drawn})
            told = " to ".join(map(str, dict.fromkeys((steps[0], steps[-1]))))
            figure.suptitle(f"{drawn[0]['recipe']} on {drawn[0]['gpu']}, {told} steps a rung", color=_INK, fontsize=11)
        for axes, label in ((rates, "samples a second, whole step"), (shares, "% of the bf16 peak")):
            axes.set_xlabel(label, color=_INK)
            axes.grid(axis="x", color=_GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.tick_params(colors=_INK, labelsize=8)
            for spine in axes.spines.values():
                spine.set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(drawn: Sequence[Row], rates: Any, shares: Any) -> None:
    """A rung a line, the first on top."""
    places = range(len(drawn))
    speeds = [row["samples_per_s"] for row in drawn]
    labels = [f"{speed:,.0f}  ({speed / speeds[0]:.2f}x)" for speed in speeds]
    rates.bar_label(rates.barh(places, speeds, color=_BAR), labels, padding=4, color=_INK, fontsize=8)
    rates.set_xlim(0, 1.35 * max(speeds))
    for name, column, shift, colour in (("MFU", "mfu_bf16", -0.2, _BAR), ("HFU", "hfu", 0.2, _SECOND)):
        shares.barh([place + shift for place in places], [100 * row[column] for row in drawn], 0.4, color=colour, label=name)
    rates.set_yticks(places, [row["rung"] for row in drawn])
    rates.invert_yaxis()
    shares.legend(frameon=False, fontsize=8, labelcolor=_INK)
