"""What the commands of ``gem bench`` share: their options, where their runs go, and how results are written. Imports no torch."""

import csv
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

Config = Annotated[str, typer.Option("--config", "-c", "--recipe", help="A TOML file, or the name of a recipe.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="PATH=VALUE; may be repeated.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def measuring_in(folder: str) -> list[str]:
    """``--set`` words of a run that is measured: its folder lies in a temporary one, and it writes no timelines, which would slow its steps."""
    return [f"run.out={str(Path(folder) / 'run')!r}", "train.trace=[]"]


def stamp(recipe: str, device: str) -> dict[str, Any]:
    """The first columns of every table of results."""
    import torch

    return {"date": datetime.now(UTC).date().isoformat(), "device": device, "torch": torch.__version__, "recipe": recipe}


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows of the same columns; the file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
