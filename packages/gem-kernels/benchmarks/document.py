"""Write the table of kernels, their measured speeds and what these were to be into docs/kernels.md, from the plugin's declarations, results/h200.csv,
results/h200_host.csv and targets.csv, and draw the speeds into results/h200.svg.

    python3 packages/gem-kernels/benchmarks/document.py [--check]

``--check`` changes nothing and ends with 1 if the page is out of date.
"""

import argparse
import csv
import sys
from pathlib import Path

from gem_core.spec import KernelImpl
from gem_kernels.bench.plot import draw
from gem_kernels.plugin import gem_kernel_impls

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "h200.csv"
HOST = HERE / "results" / "h200_host.csv"
TARGETS = HERE / "targets.csv"
"""What a kernel was to reach, and, where it does not, what was tried: op, activation, backend, shape, mode, unit, target, tried."""
HOST_US = 40
HOST_TRIED = "launches past Triton's own Python and calls past torch's dispatcher: kept"
PICTURE = RESULTS.with_suffix(".svg")
PAGE = HERE.parents[2] / "docs" / "kernels.md"
BEGIN, END = "<!-- kernels of gem-kernels: written by benchmarks/document.py -->", "<!-- end of kernels -->"
PICTURED = ("jagged_attention", "gdpa", "hstu_attention", "block_attention")
Rows = list[dict[str, str]]


def architectures(impl: KernelImpl) -> str:
    """Where a kernel runs, in words."""
    gpu = ""
    if "cuda" in impl.devices:
        low, high = impl.min_arch, impl.max_arch
        gpu = "any GPU" if low is None else f"sm{low}" if low == high else f"sm{low} and later"
    others = {"cpu": "CPU", "interpreter": "interpreter (fp32, fp16)"}
    return ", ".join(filter(None, (gpu, *(others[d] for d in impl.devices if d in others))))


def features(impl: KernelImpl) -> str:
    """Feature words, the activations in one."""
    words = [word for word in impl.features if not word.startswith("act_")]
    return " ".join([*words, "act_*"] if len(words) < len(impl.features) else words) or "none"


def declared(impls: list[KernelImpl]) -> list[str]:
    """The table of what is offered."""
    lines = ["| op | backend | runs on | dtypes | head sizes | features | bit-reproducible |", "|---|---|---|---|---|---|---|"]
    for impl in sorted(impls, key=lambda impl: (impl.op, impl.backend, impl.variant)):
        name = "/".join(filter(None, (impl.backend, impl.variant)))
        sizes = "any" if impl.head_dims is None else ", ".join(map(str, impl.head_dims))
        facts = (architectures(impl), " ".join(impl.dtypes), sizes, features(impl), "yes" if impl.deterministic else "no")
        lines.append(f"| `{impl.op}` | `{name}` | {' | '.join(facts)} |")
    return lines


def measured(rows: Rows) -> list[str]:
    """The table of speeds; of rows of the same thing the last counts."""
    latest = {(r["op"], r["activation"], r["shape"], r["backend"], r["mode"]): r for r in rows}
    lines = [
        "| op | with | shape | backend | forward ms | TFLOP/s | GB/s | MiB | backward ms | TFLOP/s | GB/s | MiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for op, activation, shape, backend in dict.fromkeys(key[:4] for key in sorted(latest)):
        cells = [f"`{op}`", activation or "", shape, backend]
        for mode in ("fwd", "bwd"):
            row = latest.get((op, activation, shape, backend, mode))
            cells += ["", "", "", ""] if row is None else [row["ms"], row["tflops"] if float(row["tflops"]) else "", row["gbps"], row["peak_mib"]]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def reached(target: dict[str, str], rows: Rows) -> tuple[float, bool]:
    """What was measured, in the unit of a target, and whether it is enough."""

    def figure(backend: str, column: str) -> float:
        same = {**{name: target[name] for name in ("op", "activation", "shape", "mode")}, "backend": backend}
        return float([row for row in rows if same.items() <= row.items()][-1][column])

    wanted = float(target["target"])
    if target["unit"] == "TFLOP/s":
        found = figure(target["backend"], "tflops")
        return found, found >= wanted
    found = figure(target["backend"], "ms")
    if target["unit"] == "% over the product":
        found = 100 * (found / figure("matmul", "ms") - 1)
    return found, found <= wanted


def aims(targets: Rows, rows: Rows, host: Rows) -> list[str]:
    """The table of targets: every row of them, then every call of the host's table."""
    lines = ["| op | with | shape | direction | target | reached | met | tried |", "|---|---|---|---|---|---|---|---|"]
    for target in targets:
        found, met = reached(target, rows)
        bound = "at least" if target["unit"] == "TFLOP/s" else "at most"
        cells = [f"`{target['op']}` by `{target['backend']}`", target["activation"], target["shape"], target["mode"]]
        cells += [f"{bound} {target['target']} {target['unit']}", f"{found:.4g}", "yes" if met else "no", "" if met else target["tried"]]
        lines.append(f"| {' | '.join(cells)} |")
    for row in host:
        if (row["launch"], row["path"], row["mode"]) == ("direct", "op", "fwd"):
            met = float(row["us"]) <= HOST_US
            cells = [f"`{row['op']}` by `{row['backend']}`", row["variant"], "", "call on the host", f"at most {HOST_US} us", row["us"]]
            lines.append(f"| {' | '.join([*cells, 'yes' if met else 'no', '' if met else HOST_TRIED])} |")
    return lines


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def section(impls: list[KernelImpl], rows: Rows) -> str:
    """What stands between the two marks."""
    machines = sorted({(r["gpu"], r["torch"], r["triton"]) for r in rows})
    where = "; ".join(f"{gpu}, torch {torch}, triton {triton}" for gpu, torch, triton in machines)
    dates = sorted({r["date"] for r in rows})
    days = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    about = (
        f"Measured on {where} ({days}), medians of CUDA events, the L2 cache cleared before each call.\n"
        "1,152 rows, 4 heads of 128, bf16. FLOPs count real tokens; backward attention counts 2.5 forwards, since it recomputes the scores. GB/s\n"
        "read or write each tensor once. MiB are the most memory beyond the inputs: of the forward pass, and of both passes together. `matmul`,\n"
        "`compiled`, `compiled_bmm`, `varlen_attn` and `cudnn` are peers that come with torch; `matmul` is the product without its norm,\n"
        "`compiled_bmm` two batched products with the activation between them. Rows without any MiB hold the host's launch too, which weighs on\n"
        "calls of less than half a millisecond; the others are times of the device alone. `gem kernels bench --op OP --csv FILE` measures an op\n"
        f"in one run; [a picture of them](../packages/gem-kernels/benchmarks/results/{PICTURE.name})."
    )
    limits = "Head sizes of the portable attention kernels end at 256, those of block attention at 128."
    since = (
        "Gradients of `hstu_attention` by `gluon`, the movers and most rows of `gdpa` are of 2026-11-29; `norm_linear`, `add_norm`,\n"
        "`gated_residual` and `pooled_attention` were measured in one run a day later, all else in one before it on that day."
    )
    sought = (
        "### Targets\n\nWhat the kernels were to reach on these shapes, each row, met or not; `% over the product` is how much longer a norm and a\n"
        "product take than the product alone. A call on the host is the op with its checks and its choice of a kernel, launched directly. Memory\n"
        "beyond the inputs was to be the output, gradients and statistics: five tensors of self-L1024 are 5,760 MiB, which `gdpa` and\n"
        "`hstu_attention` take; `jagged_attention` takes 54 more, three numbers a head and token."
    )
    parts = ([BEGIN], declared(impls), [limits], [about], [since], measured(rows), [sought], aims(read(TARGETS), rows, read(HOST)), [END])
    return "\n\n".join("\n".join(part) for part in parts)


def page(text: str, written: str) -> str:
    """``text`` with its marked section replaced, or with the section added at its end."""
    if BEGIN not in text:
        return f"{text.rstrip()}\n\n## The kernels of gem-kernels\n\n{written}\n"
    head, rest = text.split(BEGIN, 1)
    return head + written + rest.split(END, 1)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    options = parser.parse_args()
    rows = read(RESULTS)
    now = PAGE.read_text(encoding="utf-8")
    wanted = page(now, section(list(gem_kernel_impls()), rows))
    if options.check and now != wanted:
        sys.exit(f"{PAGE.name} is out of date: run {Path(__file__).name}")
    if not options.check:
        PAGE.write_text(wanted, encoding="utf-8")
        draw([row for row in rows if row["op"] in PICTURED], PICTURE)


if __name__ == "__main__":
    main()
