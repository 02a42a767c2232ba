"""Layouts of the dense and of the sparse part together give what one process gives, and take over each other's runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Gem = Callable[..., Any]
RUN = ("train", "-c", "synthetic", "--set", "data.options.rows=1001", "--set", "data.options.test_rows=500", "--set", "data.batch_size=125")
WITH = (
    "--set",
    "train.epochs=1",
    "--set",
    "train.log_every=1",
    "--set",
    "train.ema_decay=0.9",
    "--set",
    "train.checkpoint_every=4",
    "--set",
    "train.uneven=pad",
)
"""Eight full steps and one of a single row, which leaves all ranks but one without rows."""
LOSS_BOUND = 2e-5
VALUE_BOUND = 2e-5
"""Largest difference of a weight, its average or its optimiser state: sums in another order, and AdamW divides small gradients by their size."""


def layout(dense: str, replicas: int, engine: str, tables: int = 1) -> tuple[str, ...]:
    """Settings of a dense strategy and an embedding engine with their replicas."""
    words = ["--set", f'parallel.strategies=["{dense}"]', "--set", f"embedding.engine={engine}"]
    if dense == "fsdp":
        words += ["--set", f"parallel.options.fsdp.replicas={replicas}"]
    return (*words, "--set", f"embedding.options={{replicas={tables}}}" if engine == "sharded_2d" else "embedding.options={}")


def losses(run: Path) -> dict[int, float]:
    """Training losses by step; those of a resumed run replace the ones before."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def largest(gem: Gem, first: str, second: str) -> float:
    """The largest difference between the values of two runs' checkpoints."""
    told = json.loads(gem("checkpoint", "diff", first, second, "--json").stdout)
    assert not [row for row in told if row["so"]]
    return max((row["largest"] for row in told), default=0.0)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, shared by the tests below."""
    return tmp_path_factory.mktemp("one")


def check(gem: Gem, folder: Path, one: Path, name: str) -> None:
    if not (one / "one").exists():
        gem(*RUN, *WITH, "--out", str(one / "one"))
    want = losses(one / "one")
    got = losses(folder / name)
    assert got.keys() == want.keys() == set(range(1, 10))
    assert all(abs(got[step] / want[step] - 1) < LOSS_BOUND for step in want)
    assert largest(gem, str(one / "one"), name) < VALUE_BOUND


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, layout("fsdp", 1, "torch")),
        (2, layout("fsdp", 2, "torchrec")),
        (4, layout("fsdp", 2, "sharded_2d", 2)),
    ],
    ids=["sharded dense", "replicated shards of one, torchrec tables", "both in two dimensions"],
)
def test_a_layout_equals_one_process_and_goes_on_in_another(
    gem: Gem, torchrun: Gem, tmp_path: Path, one: Path, ranks: int, settings: tuple[str, ...]
) -> None:
    torchrun(ranks, *RUN, *WITH, *settings, "--out", "spread")
    check(gem, tmp_path, one, "spread")
    if ranks == 4:  # cut at step 8 and gone on with by two ranks in another layout
        shutil.rmtree(tmp_path / "spread/checkpoints/step-9")
        torchrun(2, "train", "--resume", "spread", *layout("fsdp", 1, "torch"))
        check(gem, tmp_path, one, "spread")


def test_the_comparison_sees_another_seed(gem: Gem, tmp_path: Path, one: Path) -> None:
    gem(*RUN, *WITH, "--seed", "2", "--out", "other")
    with pytest.raises(AssertionError):
        check(gem, tmp_path, one, "other")
