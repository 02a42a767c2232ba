"""The command ``gem bench comm``. Imports no torch until a command runs."""

import csv
from pathlib import Path
from typing import Annotated, Any

import typer

from gem_core.spec import RequestError
from gem_parallel.charts import check_name
from gem_parallel.comm.backends import NAMES

FIELDS = (
    *("date", "device", "torch", "ranks", "what", "backend", "tier", "bytes", "ms", "gbps"),
    *("gemm_ms", "overlapped_ms", "slowdown_pct", "sms", "note"),
)
_SHOWN = {"what": 16, "backend": 12, "tier": 6, "bytes": 12, "ms": 10, "gbps": 8, "gemm_ms": 9, "overlapped_ms": 14, "slowdown_pct": 13, "sms": 5}


def comm(
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; may be repeated.")] = None,
    size: Annotated[
        list[int] | None, typer.Option(help="Bytes of a whole tensor; may be repeated. Default: up to 1 GiB, on CPUs up to 4 MiB.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each kind; the median counts.")] = 10,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bandwidth, and what products beside collectives lose, into this .svg file.")] = None,
) -> None:
    """All-gather and reduce-scatter by backend, size and tier; what they cost a GEMM that runs beside them; SMs they take. Start it with torchrun."""
    for name in backend or ():
        if name not in NAMES:
            raise RequestError(f"gem bench comm --backend {name}", "there is no such backend", f"Choose among {', '.join(NAMES)}.")
    for count in size or ():
        if count < 1024:
            raise RequestError(f"gem bench comm --size {count}", "smaller than 1024 bytes it cannot be divided", "Give bytes of a whole tensor.")
    check_name("gem bench comm", plot)
    from gem_parallel.comm.bench import measure_all

    rows: list[dict[str, Any]] = []
    for row in measure_all(backends=backend or list(NAMES), sizes=size, repeats=repeats):
        if not rows:
            print(*(f"{field:>{width}}" for field, width in _SHOWN.items()))
        print(*(f"{_shown(row.get(field, '')):>{width}}" for field, width in _SHOWN.items()), row.get("note", ""), flush=True)
        if csv_file is not None:
            append(csv_file, row)
        rows.append(row)
    if plot is not None and rows:  # of the first rank alone
        from gem_parallel.comm.plot import draw

        draw(plot, rows)


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def append(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a CSV file, which gets a head line when it is new."""
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)
