"""``gem bench step``: whole training steps of a recipe, one change to the run a row. Imports no torch until it runs."""

import gc
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gem_core.cli.bench_shared import Config, Json, Overrides, measuring_in
from gem_core.cli.output import print_json
from gem_core.spec import GemError

if TYPE_CHECKING:
    from gem_core.bench.ladder import Placed

_SHOWN = {
    "rung": 16, "samples_per_s": 13, "tokens_per_s": 13, "ms": 10, "ms_p99": 10, "model_tflops": 12, "mfu_bf16": 9, "mfu_weighted": 12, "hfu": 9,
    "peak_gib": 9, "data_share": 10, "ne": 9,
}  # fmt: skip


def step(
    config: Config,
    overrides: Overrides = None,
    rung: Annotated[list[str] | None, typer.Option(help="Measure only this rung, with all below it applied; may be repeated.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave the change of this rung out, here and in all above it; may be repeated.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a rung.")] = 50,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of a rung before those, and more until nothing is compiled any more.")] = 10,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append a row for each rung to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rungs into this file, such as FILE.svg.")] = None,
    json: Json = False,
) -> None:
    """Measure whole training steps, from padded torch to all that is there, one change a row. A rung that cannot be says why."""
    from gem_core.bench.ladder import climb, rungs_named
    from gem_core.bench.results import append_rows, check_columns, draw

    wanted, left_out = rungs_named(rung or []), rungs_named(without) if without else ()
    if csv_file is not None:
        check_columns(csv_file)
    if not json:
        print(*(f"{name:<{width}}" for name, width in _SHOWN.items()), flush=True)
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as folder:
        for placed in climb(config, [*(overrides or []), *measuring_in(folder)], wanted, left_out):
            row, broken = _row(placed, steps=steps, warmup=warmup)
            failed |= broken
            rows.append(row)
            if csv_file is not None:  # at once: a ladder that is cut short keeps what it has measured
                append_rows(csv_file, [row])
            if not json:
                print(*(f"{_cell(row.get(name)):<{width}}" for name, width in _SHOWN.items()), row["note"], flush=True)
    if plot is not None:
        draw(rows, plot)
    if json:
        print_json(rows)
    if failed:
        raise typer.Exit(1)


def _row(placed: "Placed", *, steps: int, warmup: int) -> tuple[dict[str, Any], bool]:
    """The row of a rung, and whether it should have run and did not."""
    import torch

    from gem_core.bench.step import measure_steps
    from gem_core.train.compose import compose

    on_gpu = torch.cuda.is_available() and placed.loaded.config.run.device != "cpu"
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "recipe": placed.loaded.name,
        "rung": placed.rung.name,
    }
    if placed.reasons:
        return {**about, "note": f"cannot be here: {'; '.join(placed.reasons)}"}, False
    try:
        told = _progress(placed.rung.name)
        run = compose(placed.loaded)
        try:
            return {**about, **measure_steps(run, steps=steps, warmup=warmup, told=told).row()}, False
        finally:
            run.close()
            del run
    except torch.OutOfMemoryError as error:
        return {**about, "note": f"does not fit into memory: {str(error).splitlines()[0]}"}, False
    except GemError as error:
        return {**about, "note": f"failed: {error}"}, True
    finally:
        gc.collect()  # tables and weights of this rung, before the next one's are made
        if on_gpu:
            torch.cuda.empty_cache()


def _progress(rung: str) -> Callable[[int], None]:
    """What is told of the steps on standard error: a line that is rewritten on a terminal, else one at the start."""
    live = sys.stderr.isatty()
    end = "\r" if live else "\n"
    print(f"{rung}: composing", end=end, file=sys.stderr, flush=True)

    def told(done: int) -> None:
        if live:
            print(f"{rung}: step {done:<8}", end=end, file=sys.stderr, flush=True)

    return told


def _cell(value: Any) -> str:
    return "-" if value in (None, "") else f"{value:.4g}" if isinstance(value, float) else str(value)
