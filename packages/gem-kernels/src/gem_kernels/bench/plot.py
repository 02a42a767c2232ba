"""A picture of rows of results: TFLOP/s by shape, a bar for each backend and peer, forward and backward side by side."""

from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]
MODES = {"fwd": "forward", "bwd": "backward"}
WIDTH = 0.8
"""Of the bars of one shape together."""


def panels(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, dict[tuple[str, str], float]]]:
    """TFLOP/s, or GB/s for ops that compute nothing, by op and activation, then backend, then shape and mode; of rows of the same thing the last."""
    found: dict[tuple[str, str], dict[str, dict[tuple[str, str], float]]] = {}
    for row in rows:
        rate = float(row["tflops"]) or float(row["gbps"])
        found.setdefault((row["op"], row["activation"]), {}).setdefault(row["backend"], {})[row["shape"], row["mode"]] = rate
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; the ending of ``path`` says in which format."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "gem"  # the same rows give the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    found = panels(rows)
    figure = Figure(figsize=(11, 2.6 * max(len(found), 1)), layout="constrained")
    axes = figure.subplots(max(len(found), 1), len(MODES), squeeze=False)
    names = list(dict.fromkeys(backend for backends in found.values() for backend in backends))
    for line, ((op, activation), backends) in zip(axes, found.items(), strict=False):
        for axis, (mode, word) in zip(line, MODES.items(), strict=True):
            shapes = list(dict.fromkeys(shape for rates in backends.values() for shape, m in rates if m == mode))
            for i, (backend, rates) in enumerate(backends.items()):
                places = [s + WIDTH * ((i + 0.5) / len(backends) - 0.5) for s in range(len(shapes))]
                heights = [rates.get((shape, mode), 0.0) for shape in shapes]
                axis.bar(places, heights, WIDTH / len(backends), label=backend, color=f"C{names.index(backend) % 10}")
            moves = op in ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad")
            axis.set_xticks(range(len(shapes)), shapes, fontsize=7)
            axis.set_title(f"{op} {activation}, {word}", fontsize=9)
            axis.set_ylabel("GB/s" if moves else "TFLOP/s", fontsize=8)
            axis.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
