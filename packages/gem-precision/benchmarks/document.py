"""Write what ``linear.py`` measured into docs/precision.md, from results/h200-linear.json.

    python3 packages/gem-precision/benchmarks/document.py [--check]

``--check`` changes nothing and ends with 1 if the page is out of date.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h200-linear.json"
PAGE = HERE.parents[2] / "docs" / "precision.md"
BEGIN, END = "<!-- native FP8: written by benchmarks/document.py -->", "<!-- end of native FP8 -->"
LOW = ("fp8_block", "fp8_square")
Times = dict[str, dict[str, dict[str, Any]]]
"""Records by shape and by what was timed."""


def by_shape(timings: list[dict[str, Any]]) -> Times:
    """Those that have a time."""
    found: Times = {}
    for record in timings:
        if "ms" in record:
            found.setdefault(record["shape"], {})[record["what"]] = record
    return found


def table(heads: list[str], lines: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def steps(times: Times) -> list[str]:
    """Whole layers beside bfloat16."""
    lines = []
    for shape, known in times.items():
        for name, low in known.items():
            what, _, recipe = name.rpartition(", ")
            if recipe in LOW:
                told = what if recipe == LOW[0] else f"{what}, {recipe}"
                lines.append([shape, told, f"{known[f'{what}, bf16']['ms']:.2f}", f"{low['ms']:.2f}", f"{low['over_bf16']:.2f}"])
    return table(["rows x inputs x outputs", "step", "bfloat16 ms", "FP8 ms", "times as fast"], lines)


def products(times: Times) -> list[str]:
    """Each product by each way, as many times as fast as bfloat16; the one that is chosen is marked."""
    ways = ["library", "own", "wide"]
    lines = []
    for shape, known in times.items():
        for kind in ("forward", "input gradient", "weight gradient"):
            plain = known.get(f"{kind}, bf16")
            if plain is not None:
                cells = [_beside(known.get(f"{kind}, {way}")) for way in ways]
                lines.append([shape, kind, f"{plain['tflops']:.0f}", *cells])
    return table(["rows x inputs x outputs", "product", "bfloat16 TFLOP/s", *ways], lines)


def _beside(record: dict[str, Any] | None) -> str:
    if record is None:
        return ""
    words = f"{record['over_bf16']:.2f}"
    return f"**{words}**" if record["chosen"] else words


def passes(times: Times) -> list[str]:
    """Passes over a matrix, as shares of the speed of a copy of as many bytes."""
    kinds = list(dict.fromkeys(what for known in times.values() for what, record in known.items() if "of_a_copy" in record and what != "copy"))
    lines = [
        [shape, f"{known['copy']['tb_a_second']:.2f}", *(f"{known[kind]['of_a_copy']:.0%}" if kind in known else "" for kind in kinds)]
        for shape, known in times.items()
        if "copy" in known
    ]
    return table(["rows x columns", "copy TB/s", *kinds], lines)


def section(found: dict[str, Any]) -> str:
    """What stands between the two marks."""
    about, checks, times = found["about"], found["checks"], by_shape(found["timings"])
    where = f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}, {about['date']}"
    held = sum(check["holds"] for check in checks)
    told = f"Measured on {where}; {held} of {len(checks)} checks hold. A step is forward and backward, casts and that of the weight included:"
    by_way = "Products alone, as many times as fast as bfloat16; the way that a layer takes is bold:"
    moved = "Passes, beside a copy of as many bytes. A norm reads its rows twice, the second time from the cache where it can:"
    return "\n".join([BEGIN, "", told, "", *steps(times), "", by_way, "", *products(times), "", moved, "", *passes(times), "", END])


def page(text: str, written: str) -> str:
    """``text`` with its marked section replaced."""
    head, rest = text.split(BEGIN, 1)
    return head + written + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now, section(json.loads(RESULTS.read_text())))
    if options.check and now != wanted:
        sys.exit(f"{PAGE.name} is out of date: run {Path(__file__).name}")
    if not options.check:
        PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
