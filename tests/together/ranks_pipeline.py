"""Ranks of test_pipeline.py: training with every engine, with and without one batch ahead; what was trained is counted by row."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gem_core.builtin import toy
from gem_core.config.load import load_config
from gem_core.train import compose, loop
from gem_core.train.log import read_log

ROWS, BATCH, EPOCHS = 100, 24, 2
"""Five batches an epoch; the last has 4 rows, which leaves ranks with one row."""
ENGINES = {
    "torch": ("embedding.engine=torch",),
    "torchrec": ("embedding.engine=torchrec", 'embedding.options.tables=[{pattern="item", sharding="row_wise"}]'),
    "sharded_2d": ("embedding.engine=sharded_2d", "embedding.options.replicas=2"),
}
"""With torchrec the items lie by rows, the other tables on a rank each."""
WAYS = {2: ("True", "False", "cut"), 4: ("True", "False")}
"""Runs by the number of ranks: ahead or not, and cut and continued."""
UNEVEN = {"stop": (3, 3), "pad": (5 * EPOCHS, 3 * EPOCHS), "drop": (3 * EPOCHS, 3 * EPOCHS)}
"""Batches that ranks 0 and 1 train on, by rule."""
SETTINGS = (
    *(f"data.options.rows={ROWS}", f"data.batch_size={BATCH}", f"train.epochs={EPOCHS}", "train.log_every=1", "run.device=cpu"),
    *("train.eval_every=4", "train.checkpoint_every=3", "train.checkpoint_background=false", 'parallel.strategies=["ddp"]'),
)


def run(folder: Path, settings: Sequence[str], *, resume: bool = False) -> tuple[list[int], dict[str, Tensor]]:
    """Train; the rows that this rank has trained on, in order, and the tables as far as it keeps them."""
    seen: list[int] = []
    step = loop.train_step

    def counted(learner: Any, work: Any, **words: Any) -> Any:
        result = step(learner, work, **words)
        seen.extend(row for batch in work.batches if batch.origin is not None for row in batch.origin.tolist())
        return result

    loop.train_step = counted
    try:
        source = folder / "config.toml" if resume else "toy"
        made = compose.compose(load_config(source, [f"run.out={folder}", *settings]), resume=folder if resume else None)
        loop.train_epochs(made)
        tables = {f"{part.table} {part.name} {part.start} {part.column}": part.tensor.clone() for part in made.embeddings.table_slices()}
        made.close()
    finally:
        loop.train_step = step
    return seen, tables


def train_all(folder: Path, rank: int, world: int, device: str) -> None:
    compose.close_world = lambda world, keep: None  # one process group for all runs
    batch, pauses = toy._Columns.batch, loop._pauses
    toy._Columns.batch = lambda self, index, together: replace(batch(self, index, together), origin=index)  # type: ignore[method-assign]
    saved: dict[str, Any] = {}
    for name, engine in ENGINES.items():
        for ahead in (True, False):
            loop._pauses = pauses if ahead else lambda run, step: True
            place = folder / f"{name} {ahead}"
            seen, tables = run(place, [*SETTINGS, *engine])
            saved[f"{name} {ahead}"] = {"seen": seen, "tables": tables, "losses": losses(place)}
        loop._pauses = pauses
        if "cut" in WAYS[world]:
            place = folder / f"{name} cut"
            first, _ = run(place, [*SETTINGS, *engine, "train.max_steps=4"])
            rest, tables = run(place, ["train.max_steps=0"], resume=True)
            saved[f"{name} cut"] = {"seen": first + rest, "tables": tables, "losses": losses(place)}
    if world == 2:
        saved["uneven"] = uneven(folder, rank, pauses)
    torch.save(saved, folder / f"rank{rank}.pt")


def uneven(folder: Path, rank: int, pauses: Any) -> dict[tuple[str, str, bool], tuple[list[int], list[float]]]:
    """Rank 1 has three batches of the five: rows and losses by engine, rule and whether batches were ahead."""
    batches = toy.ToySource.batches
    toy.ToySource.batches = lambda self, split, **words: islice(batches(self, split, **words), 3 if rank == 1 and split == "train" else None)  # type: ignore[method-assign]
    out = {}
    for name in ("torchrec", "sharded_2d"):
        for rule in UNEVEN:
            for ahead in (True, False):
                loop._pauses = pauses if ahead else lambda run, step: True
                place = folder / f"{name} {rule} {ahead}"
                seen, _ = run(place, [*SETTINGS, *ENGINES[name], f"train.uneven={rule}", "train.eval_every=0"])
                out[name, rule, ahead] = seen, losses(place)
    return out


def losses(folder: Path) -> list[float]:
    """The losses of a run's log."""
    return [record["loss"] for record in read_log(folder) if record["event"] == "train"]
