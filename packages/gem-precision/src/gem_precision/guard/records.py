"""``precision-guard.jsonl`` of a run: a line for each pair, with what it showed and what was done."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "precision-guard.jsonl"


def append(folder: Path, record: Mapping[str, Any]) -> None:
    """Add a record, which has a ``step``."""
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a file whose lines have a ``step``, none if it is absent.

    A run that goes on from a checkpoint writes steps again: a later line replaces those of its step and after that stand before it, if a larger step
    does. A last line that a killed process cut short is left out.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    kept: list[dict[str, Any]] = []
    for line in lines:
        if not line.endswith("\n"):
            continue
        record = json.loads(line)
        if kept and kept[-1]["step"] > record["step"]:
            kept = [r for r in kept if r["step"] < record["step"]]
        kept.append(record)
    return kept
