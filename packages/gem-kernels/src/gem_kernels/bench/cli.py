"""The command ``gem kernels bench``."""

import csv
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gem_core.spec import MachineError, RequestError
from gem_kernels.bench.plot import draw
from gem_kernels.bench.shapes import ACTIVATION_OF, BATCH, SHAPES, SHAPES_OF, VARIANTS_OF

FIELDS = ("date", "gpu", "torch", "triton", "op", "backend", "activation", "dtype", "shape", "mode", "ms", "tflops", "gbps", "peak_mib")
SMALL = (70, 0, 300)
"""Row lengths of the calls that a backend must get right before it is timed."""
SMOKE = (5, 0, 40)
"""Row lengths of a smoke run."""


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend or peer; may be repeated. The reference only if named.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Only this shape; may be repeated.")] = None,
    mode: Annotated[str | None, typer.Option(help="Only fwd or bwd.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this file, .svg or .png.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes, on a CPU too: shows that all runs, measures nothing.")] = False,
) -> None:
    """Time every op, backend, published shape and direction beside installed peers. A backend that is wrong on a small call gets no speed."""
    ops = _known("--op", op, list(SHAPES_OF))
    shapes = _known("--shape", shape, list(SHAPES))
    modes = _known("--mode", [mode] if mode else None, ["fwd", "bwd"])
    _known("--dtype", [dtype], ["bf16", "fp16", "fp32"])
    import torch

    if not smoke and not torch.cuda.is_available():
        raise MachineError("gem kernels bench", "there is no CUDA device", "Run it on one, or with --smoke to see that it runs.")
    rows: list[dict[str, Any]] = []
    _append(csv_file, rows)
    for name in ops:
        places = [s for s in SHAPES_OF[name] if s in shapes]
        for place in places[:1] if smoke else places:
            for variant in VARIANTS_OF.get(name, ("",)):
                for row in _rows(name, variant, place, dtype, backend, modes, smoke):
                    print(*(f"{row.get(field, '')!s:>{width}}" for field, width in _SHOWN.items()), row.get("note", ""), flush=True)
                    if "note" not in row:
                        rows.append(row)
                        _append(csv_file, [row])
    if plot is not None:
        draw(rows, plot)


_SHOWN = {"op": 20, "backend": 12, "activation": 14, "shape": 18, "mode": 4, "ms": 10, "tflops": 8, "gbps": 8, "peak_mib": 10}


def _known(option: str, words: list[str] | None, known: list[str]) -> list[str]:
    for word in words or ():
        if word not in known:
            raise RequestError(f"gem kernels bench {option} {word}", "there is no such word", f"Known: {', '.join(known)}.")
    return words or known


def _rows(op: str, variant: str, shape: str, dtype: str, only: list[str] | None, modes: list[str], smoke: bool) -> Iterator[dict[str, Any]]:
    """A row for each function and mode, with a ``note`` instead of figures for one that is wrong or does not fit."""
    import torch

    from gem_kernels.bench.backends import REFERENCE, backends_of, peers_of, resolve, takes
    from gem_kernels.bench.measure import FORMAT, measure, wrong
    from gem_kernels.bench.workloads import build

    kind = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    form = SHAPES[shape]
    small = build(op, variant, form, list(SMOKE if smoke else SMALL), kind, device)
    work = small if smoke else build(op, variant, form, form.lengths(BATCH), kind, device)
    about = {**machine(), "op": op, "activation": " ".join(filter(None, (ACTIVATION_OF.get(op, ""), variant))), "dtype": dtype, "shape": shape}
    peers = {} if smoke else {name: f for name, f in peers_of(work, variant).items() if takes(name, work)}
    names = [*backends_of(op), *peers] if only or smoke else [name for name in (*backends_of(op), *peers) if name != REFERENCE]
    for name in (n for n in names if only is None or n in only):
        function = peers.get(name) or resolve(small, name)
        row = {**about, "backend": name}
        if isinstance(function, str):
            yield {**row, "note": " ".join(function.split())}
            continue
        fault = None if name in peers else _fault(wrong, function, small, FORMAT.get(name))
        if fault:
            yield {**row, "note": f"no speed: {fault}"}
            continue
        for mode in modes:
            try:
                yield {**row, "mode": mode, **measure(function, work, mode)}
            except torch.OutOfMemoryError:
                yield {**row, "mode": mode, "note": "out of memory"}


def _fault(wrong: Callable[..., str | None], function: Callable[..., Any], small: Any, part: float | None) -> str | None:
    """What is wrong on a small call. An adapter may fail in what others compile for it, which is no reason to time nothing else."""
    try:
        return wrong(function, small, part)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def machine() -> dict[str, str]:
    """Date, GPU and versions, as every row of results begins."""
    import torch

    try:
        import triton

        version = triton.__version__
    except ModuleNotFoundError:
        version = ""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {"date": datetime.date.today().isoformat(), "gpu": gpu, "torch": torch.__version__, "triton": version}


def _append(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """Each row as soon as it is there: a run that is cut off keeps what it has timed."""
    if path is None:
        return
    new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerows(rows)
