"""The source ``files`` in the real trainer: cut on one rank, gone on with two, ended on one; every row trained once."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

Gem = Callable[..., Any]
ROWS = 3000


def cursors(run: Path, step: int) -> list[dict[str, Any]]:
    states: list[dict[str, Any]] = torch.load(run / "checkpoints" / f"step-{step}" / "trainer.pt", weights_only=True)["data"]
    return states


def rows_of(state: dict[str, Any], unit_rows: list[int]) -> list[tuple[int, int]]:
    """``(unit, row)`` of every row that a cursor counts as trained."""
    out = [(u, r) for first, last in state["whole"] for u in range(first, last + 1) for r in range(unit_rows[u])]
    for unit, digits in state["some"].items():
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(digits), np.uint8), count=unit_rows[int(unit)])
        out += [(int(unit), int(row)) for row in np.flatnonzero(bits)]
    return out


def test_case_E04_a_run_over_files_changes_ranks_and_trains_each_row_once(gem: Gem, torchrun: Gem, tmp_path: Path) -> None:
    gem("data", "generate", "--out", "made", "--rows", str(ROWS), "--test-rows", "200", "--set", "users=500", "--set", "items=400")
    files = ("--set", "data.source=files", "--set", "data.options={path='made', window=700}", "--set", "data.batch_size=256")
    gem(
        "train",
        "-c",
        "synthetic",
        *files,
        "--set",
        "train.epochs=1",
        "--set",
        "train.max_steps=4",
        "--set",
        "train.keep_checkpoints=9",
        "--out",
        "run",
    )
    torchrun(2, "train", "--resume", "run", "--set", "train.max_steps=9", "--set", 'parallel.strategies=["ddp"]')
    gem("train", "--resume", "run", "--set", "train.max_steps=0", "--set", 'parallel.strategies=["single"]')

    import pyarrow.parquet as pq

    about = pq.ParquetFile(tmp_path / "made/train/part-00000.parquet").metadata
    unit_rows = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    one, *nobody = cursors(tmp_path / "run", 4)
    first, second = cursors(tmp_path / "run", 9)
    (last,) = cursors(tmp_path / "run", 12)
    assert nobody == []
    assert one["base"] == {"whole": [], "some": {}}
    counted = [rows_of(state["trained"], unit_rows) for state in (one, first, second, last)]
    assert [len(rows) for rows in counted] == [4 * 256, 5 * 128, 5 * 128, ROWS - 9 * 256]
    assert set(Counter(row for rows in counted for row in rows).values()) == {1}
    assert sum(map(len, counted)) == sum(unit_rows) == ROWS
    assert sorted(rows_of(first["base"], unit_rows)) == sorted(counted[0])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["train"] == {"offered": ROWS, "trained": ROWS, "dropped_uneven": 0, "not_read": 0}
    assert summary["ledger"]["source"] == {"read": ROWS + 200, "train": ROWS, "test": 200}


def test_case_F01_ranks_with_different_numbers_of_batches_train_every_row(gem: Gem, torchrun: Gem, tmp_path: Path) -> None:
    """Batches of equal cost: the ranks have different numbers of them, and the shorter one goes along with empty batches."""
    gem("data", "generate", "--out", "made", "--rows", "1500", "--test-rows", "200", "--set", "users=300", "--set", "items=400")
    options = "data.options={path='made', window=300, balance='cost', batch_tokens=1500}"
    words = (
        "--set",
        "data.source=files",
        "--set",
        options,
        "--set",
        "train.epochs=1",
        "--set",
        "train.uneven=pad",
        "--set",
        'parallel.strategies=["ddp"]',
    )
    torchrun(2, "train", "-c", "synthetic", *words, "--out", "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["ledger"]["train"] == {"offered": 1500, "trained": 1500, "dropped_uneven": 0, "not_read": 0}
