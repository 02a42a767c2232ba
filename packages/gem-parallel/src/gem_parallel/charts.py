"""What the plots of this package share. Matplotlib comes with gem-core, and is imported by what draws."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gem_core.spec import RequestError

INK, GRID = "#334155", "#e2e8f0"
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")


def check_name(command: str, path: Path | None) -> None:
    """Raise RequestError unless the file of a plot, if one is wanted, is named as SVG."""
    if path is not None and path.suffix != ".svg":
        raise RequestError(f"{command} --plot {path}", "it is drawn as SVG", "Give the file a name that ends in .svg.")


def save(figure: Any, every: Iterable[Any], path: Path) -> None:
    """Give all axes the same look and write the figure; the same figure gives the same bytes."""
    for axes in every:
        axes.grid(color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=INK, labelsize=8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
