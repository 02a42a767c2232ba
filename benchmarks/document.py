"""Write the figures of whole steps on one GPU into docs/efficiency.md and README.md, from the files in benchmarks/results.

    python3 benchmarks/document.py [--check]

``--check`` changes nothing and ends with 1 if a page is out of date. A table stands between two marks; one whose file is absent is left empty.
"""

import argparse
import csv
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Rows = list[dict[str, str]]


def read(name: str) -> Rows:
    """The rows of a file of results; none where it is absent."""
    path = RESULTS / name
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table(header: str, lines: list[list[str]]) -> list[str]:
    """A table of Markdown whose first column is words and whose others are numbers."""
    columns = [word.strip() for word in header.split("|")]
    return [f"| {' | '.join(columns)} |", "|---" + "|---:" * (len(columns) - 1) + "|", *(f"| {' | '.join(line)} |" for line in lines)]


def percent(value: str, digits: int = 1) -> str:
    return f"{100 * float(value):.{digits}f}" if value else ""


def number(value: str, digits: int = 0) -> str:
    return f"{float(value):,.{digits}f}" if value else ""


def where(rows: Rows, device: str = "gpu") -> str:
    """Device, torch and days of the rows."""
    machines = sorted({f"{row[device]}, torch {row['torch']}" for row in rows})
    days = sorted({row["date"] for row in rows})
    return f"{'; '.join(machines)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def latest(rows: Rows) -> dict[tuple[str, str], dict[str, str]]:
    """The last row of each recipe and rung that has figures."""
    return {(row["recipe"], row["rung"]): row for row in rows if row["samples_per_s"]}


def ladder() -> list[str]:
    """Every recipe's rungs, and what became of those without figures."""
    rows = read("h200-step.csv")
    found = latest(rows)
    if not found:
        return []
    lines = [f"Measured on {where(rows)}; `x` is samples a second over the first row of the recipe.", ""]
    for recipe in dict.fromkeys(recipe for recipe, _ in found):
        mine = [row for (name, _), row in found.items() if name == recipe]
        header = "samples/s | x | ms | p99 / p50 | TFLOP/s | MFU % | weighted % | HFU % | GiB | NE | data % | first step s | steps"
        lines += [*table(f"`{recipe}` | {header}", [rung(row, mine[0]) for row in mine]), ""]
    told = {(row["recipe"], row["rung"]): row["note"] for row in rows if not row["samples_per_s"] and (row["recipe"], row["rung"]) not in found}
    return [*lines, *(f"- `{recipe}`, {rung}: {note}" for (recipe, rung), note in told.items()), *([""] if told else [])]


def rung(row: dict[str, str], first: dict[str, str]) -> list[str]:
    """The cells of one rung."""
    factor, steady = float(row["samples_per_s"]) / float(first["samples_per_s"]), float(row["ms_p99"]) / float(row["ms"])
    speed = [number(row["samples_per_s"]), f"{factor:.2f}", number(row["ms"], 1), f"{steady:.3f}", number(row["model_tflops"])]
    shares = [percent(row[key]) for key in ("mfu_bf16", "mfu_weighted", "hfu")]
    rest = [number(row["peak_gib"], 1), number(row["ne"], 4), percent(row["data_share"], 2), number(row["first_step_s"], 1), row["steps"]]
    return [row["rung"], *speed, *shares, *rest]


def layers() -> list[str]:
    """Each layer of the large recipe alone."""
    rows = [row for row in read("h200-layers.csv") if not row["part_of"]]
    if not rows:
        return []
    times, flops = (sum(float(row[key]) * int(row["count"]) for row in rows) for key in ("ms", "flops"))
    share = flops / times / 1e9 / PEAK_TFLOPS
    about = f"`{rows[0]['recipe']}` on {where(rows, 'device')}: {flops / 1e12:.1f} TFLOP in {times:.1f} ms, local MFU {100 * share:.1f} %."
    heaviest = sorted(rows, key=lambda row: -float(row["ms"]) * int(row["count"]))
    header = "layer | times | ms, forward | ms, backward | GFLOP | MB | MFU % | bound by | over the floor"
    return [about, "", *table(header, [layer(row) for row in heaviest])]


def layer(row: dict[str, str]) -> list[str]:
    """The cells of one layer."""
    work = [f"{float(row['flops']) / 1e9:,.0f}", f"{float(row['moved']) / 1e6:,.0f}"]
    spent = [number(row["forward_ms"], 2), number(row["backward_ms"], 2)]
    return [f"{row['layer']} `{row['module']}`", row["count"], *spent, *work, percent(row["mfu"]), row["bound"], f"{float(row['over_floor']):.1f}"]


PEAK_TFLOPS = 989
"""The H200's bf16 peak, dense."""


def breakdown() -> list[str]:
    """Where the steps' time goes, recipe by recipe."""
    lines: list[str] = []
    for path in sorted(RESULTS.glob("h200-breakdown*.csv")):
        rows = read(path.name)
        step, plain = (float(rows[0][key]) for key in ("step_ms", "plain_ms"))
        lines += [f"`{rows[0]['recipe']}` on {where(rows, 'device')}: {step:.1f} ms under the profiler, {plain:.1f} ms without.", ""]
        lines += [*table("category | ms | %", [[row["category"], number(row["ms"], 1), percent(row["share"])] for row in rows]), ""]
    return lines


def headline() -> list[str]:
    """The fastest bf16 row of each recipe."""
    rows = read("h200-step.csv")
    best: dict[str, dict[str, str]] = {}
    for (recipe, rung), row in latest(rows).items():
        if rung != "fp8" and float(row["mfu_bf16"]) > float(best.get(recipe, {"mfu_bf16": "0"})["mfu_bf16"]):
            best[recipe] = row
    if not best:
        return []
    cells = {recipe: [number(row["samples_per_s"]), number(row["ms"], 1), number(row["model_tflops"])] for recipe, row in best.items()}
    lines = [[f"`{recipe}`", *cells[recipe], percent(row["mfu_bf16"])] for recipe, row in best.items()]
    about = f"Whole training steps, data, tables and updates included, on {where(rows)}:"
    return [about, "", *table("recipe | samples/s | ms | TFLOP/s | MFU %", lines)]


SECTIONS: dict[str, tuple[Path, Callable[[], list[str]]]] = {
    "ladder": (ROOT / "docs" / "efficiency.md", ladder),
    "layers": (ROOT / "docs" / "efficiency.md", layers),
    "breakdown": (ROOT / "docs" / "efficiency.md", breakdown),
    "headline": (ROOT / "README.md", headline),
}


def written(text: str, name: str, lines: list[str]) -> str:
    """``text`` with what stands between the marks of ``name`` replaced.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = f"<!-- {name}: written by benchmarks/document.py -->", f"<!-- end of {name} -->"
    head, found, rest = text.partition(begin)
    _, ended, tail = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"no marks for {name!r}")
    return "\n".join([head + begin, "", *lines, *([] if not lines or not lines[-1] else [""]), end]) + tail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the pages are up to date")
    options = parser.parse_args()
    pages = {page: page.read_text(encoding="utf-8") for page, _ in SECTIONS.values()}
    wanted = dict(pages)
    for name, (page, lines) in SECTIONS.items():
        wanted[page] = written(wanted[page], name, lines())
    stale = [page.name for page in pages if wanted[page] != pages[page]]
    if options.check and stale:
        sys.exit(f"out of date: {', '.join(stale)}; run {Path(__file__).name}")
    if not options.check:
        for page, text in wanted.items():
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
