"""Write what was measured of native FP8 into docs/precision.md: results/h200-norm-linear.json, results/h200-casts.json, and what of
results/h200-linear.json they do not have.

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
"""Of ``linear.py``, with the casts of before."""
LATER = HERE / "results" / "h200-casts.json"
"""Of a later run: layers, casts and products with the casts of now."""
NORMS = HERE / "results" / "h200-norm-linear.json"
"""Of ``norm_linear.py``."""
PAGE = HERE.parents[2] / "docs" / "precision.md"
BEGIN, END = "<!-- native FP8: written by benchmarks/document.py -->", "<!-- end of native FP8 -->"
LOW = ("fp8_block", "fp8_square")
LAYERS = (
    ("`fp8_block`", "linear, fp8_block"),
    ("`fp8_square`", "linear, fp8_square"),
    ("`fp8_block`, former casts", "linear, fp8_block with former casts"),
    ("bfloat16 ms, no bias", "linear without a bias, bf16"),
    ("`fp8_block`, no bias", "linear without a bias, fp8_block"),
)
CASTS = (
    ("cast", "cast, tile r128"),
    ("cast and column sums", "cast and column sums, s3 r168 p1"),
    ("cast in squares", "cast in squares"),
    ("launched as in the layers: cast", "cast"),
    ("cast and column sums", "cast and column sums"),
    ("former cast", "former cast"),
    ("former cast and column sums", "former cast and column sums"),
)
PRODUCTS = ("forward bf16, bias", "forward", "forward, bias", "input gradient", "weight gradient", "weight gradient, x in squares")
"""Heads of columns, and the records that stand in them."""
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


def layers(times: Times) -> list[str]:
    """Steps of a linear layer in one run: milliseconds and, in bold, how many times as fast as bfloat16."""
    lines = []
    for shape, known in times.items():
        if "linear, bf16" in known:
            cells = [known[what] for _, what in LAYERS]
            told = [f"{r['ms']:.2f}" + (f", **{r['over_bf16']:.2f}**" if "bf16" not in r["what"] else "") for r in cells]
            lines.append([shape, f"{known['linear, bf16']['ms']:.2f}", *told])
    return table(["rows x inputs x outputs", "bfloat16 ms", *(head for head, _ in LAYERS)], lines)


def casts(times: Times) -> list[str]:
    """Casts as shares of the speed of a copy of as many bytes."""
    lines = [
        [shape, f"{known['copy']['tb_a_second']:.2f}", *(f"{known[what]['of_a_copy']:.0%}" if what in known else "" for _, what in CASTS)]
        for shape, known in times.items()
        if "copy" in known
    ]
    return table(["rows x columns", "copy TB/s", *(head for head, _ in CASTS)], lines)


def products_alone(times: Times) -> list[str]:
    """Milliseconds of the products of a layer."""
    lines = [[shape, *(f"{known[what]['ms']:.2f}" for what in PRODUCTS)] for shape, known in times.items() if PRODUCTS[0] in known]
    return table(["rows x inputs x outputs", *PRODUCTS], lines)


def norm_steps(times: Times) -> list[str]:
    """Steps of a norm and the layer behind it: milliseconds and, in bold, how many times as fast as bfloat16."""
    lines = []
    for shape, known in times.items():
        for what in (name.removesuffix(", bf16") for name in known if name.endswith(", bf16")):
            cells = [f"{r['ms']:.2f}, **{r['over_bf16']:.2f}**" for r in (known[f"{what}, {recipe}"] for recipe in LOW)]
            lines.append([shape, what.split()[0], f"{known[f'{what}, bf16']['ms']:.2f}", *cells])
    return table(["rows x inputs x outputs", "norm", "bfloat16 ms", *(f"`{recipe}`" for recipe in LOW)], lines)


def norm_passes(times: Times) -> list[str]:
    """Passes around it: milliseconds, and the speed as a share of a copy's."""
    lines = [
        [shape, what, f"{r['ms']:.2f}", f"{r['of_a_copy']:.0%}"] for shape, known in times.items() for what, r in known.items() if "of_a_copy" in r
    ]
    return table(["rows x columns", "pass", "ms", "of a copy"], lines)


def norm_section(found: dict[str, Any]) -> list[str]:
    """The run of ``norm_linear.py``."""
    times = by_shape(found["timings"])
    told = (
        f"A norm and the layer behind it, as pre-norm layers begin, on {where(found['about'])} (`benchmarks/results/{NORMS.name}`): forward and "
        "backward, the residual and the gradient of the stream included. bfloat16 is the backend `triton` of gem-kernels; bold: times as fast:"
    )
    return [told, "", *norm_steps(times), "", "What of it is no product:", "", *norm_passes(times)]


def where(about: dict[str, Any]) -> str:
    return f"{about['gpu']}, torch {about['torch']}, triton {about['triton']}, {about['date']}"


def later_section(found: dict[str, Any]) -> list[str]:
    """The run with the casts of now."""
    times = by_shape(found["timings"])
    told = (
        f"Measured on {where(found['about'])} (`benchmarks/results/{LATER.name}`). Steps of a linear layer, forward and backward, casts and that of "
        "the weight included, with a bias but for the last two; bold: how many times as fast as bfloat16:"
    )
    moved = "Casts alone, beside a copy of as many bytes; the first two as they are launched now, which is not how the layers above ran:"
    return [told, "", *layers(times), "", moved, "", *casts(times), "", "Products alone, milliseconds:", "", *products_alone(times)]


def earlier_section(found: dict[str, Any], retold: set[str]) -> list[str]:
    """The run of ``linear.py``, but for what is ``retold`` by a later one."""
    checks, times = found["checks"], by_shape([record for record in found["timings"] if record["what"] not in retold])
    held = sum(check["holds"] for check in checks)
    told = (
        f"An earlier run on {where(found['about'])} (`benchmarks/results/{RESULTS.name}`), with the former casts and norms; {held} of "
        f"{len(checks)} checks hold. Fused layers and attention:"
    )
    by_way = "Products alone, as many times as fast as bfloat16; the way that a layer takes is bold:"
    moved = "Fused passes, beside a copy of as many bytes. A norm reads its rows twice, the second time from the cache where it can:"
    return [told, "", *steps(times), "", by_way, "", *products(times), "", moved, "", *passes(times)]


def section(found: dict[str, Any], later: dict[str, Any], norms: dict[str, Any]) -> str:
    """What stands between the two marks."""
    retold = {record["what"] for record in later["timings"] if {"over_bf16", "of_a_copy"} & record.keys()} - {"copy"}
    return "\n".join([BEGIN, "", *norm_section(norms), "", *later_section(later), "", *earlier_section(found, retold), "", END])


def page(text: str, written: str) -> str:
    """``text`` with its marked section replaced."""
    head, rest = text.split(BEGIN, 1)
    return head + written + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now, section(*(json.loads(path.read_text()) for path in (RESULTS, LATER, NORMS))))
    if options.check and now != wanted:
        sys.exit(f"{PAGE.name} is out of date: run {Path(__file__).name}")
    if not options.check:
        PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
