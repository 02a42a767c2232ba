"""The result of a probe for people: a table on the terminal, and a figure."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from gem_precision.probe.record import read_probe, worst

FIGURE = "precision.svg"


def ranking(rows: list[dict[str, Any]]) -> None:
    """Print the sites, the most sensitive first, with the lowest SQNR of their products for each recipe."""
    recipes, ordered = _ordered(rows)
    table = Table("SITE", *(f"{name.upper()} dB" for name in recipes), box=None)
    for site, values in ordered:
        table.add_row(site, *("exact" if math.isinf(values[name]) else f"{values[name]:.1f}" for name in recipes))
    Console(width=160).print(table)
    print("Lowest signal-to-quantisation-noise ratio of forward and both gradients; a bit is worth 6 dB.")


def speeds(times: list[dict[str, Any]]) -> None:
    """Print what each way takes at each size that the run met, beside the layer as it is."""
    shapes: dict[tuple[int, int, int], dict[str, str]] = {}
    for row in times:
        ms = "-" if row["ms"] is None else f"{row['ms']:.3g}"
        shapes.setdefault((row["rows"], row["inputs"], row["outputs"]), {})[row["backend"]] = ms
    ways = [row for row in times if row["ms"] is not None]
    names = list(dict.fromkeys(row["backend"] for row in ways))
    table = Table("ROWS x IN x OUT", *(f"{name} ms" for name in names), box=None)
    for shape, found in shapes.items():
        table.add_row(" x ".join(map(str, shape)), *(found[name] for name in names))
    Console(width=160).print(table)
    print("Median of forward and both gradients, casts included. Emulated ways give a format's numbers without its speed.")
    for row in {row["backend"]: row for row in times if row["why_not"]}.values():
        print(f"{row['backend']}: {'; '.join(row['why_not'])}")


def decided(folder: Path) -> None:
    """Print what a run makes of each site that its probe met, and why: from its manifest."""
    met = {row["site"] for row in read_probe(folder)}
    table = Table("SITE", "FORMAT", "WHY", box=None)
    for decision in json.loads((folder / "manifest.json").read_text())["precision"]:
        if decision["module"] in met:
            table.add_row(decision["module"], decision["format"], decision["reason"])
    Console(width=200).print(table)


def draw(rows: list[dict[str, Any]], folder: Path) -> Path:
    """Write ``precision.svg``: a line for each site, a dot for each recipe."""
    recipes, ordered = _ordered(rows)
    figure = Figure(figsize=(9, 1.5 + 0.22 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    for name in recipes:
        places = [(values[name], -i) for i, (_, values) in enumerate(ordered) if math.isfinite(values[name])]
        axes.plot([x for x, _ in places], [y for _, y in places], "o", label=name, markersize=4)
    axes.set_yticks([-i for i in range(len(ordered))], [site for site, _ in ordered], fontsize=7)
    axes.set_xlabel("lowest SQNR of the products (dB)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
    path = folder / FIGURE
    figure.savefig(path)
    return path


def _ordered(rows: list[dict[str, Any]]) -> tuple[Sequence[str], list[tuple[str, Mapping[str, float]]]]:
    """Recipes in the order of the file, and sites by the SQNR of the first of them."""
    recipes = list(dict.fromkeys(str(row["recipe"]) for row in rows))
    return recipes, sorted(worst(rows).items(), key=lambda item: [item[1][name] for name in recipes])
