"""Write rows with an embedding whose lengths range over many orders of magnitude: what a number format with one scale a tensor cannot bear.

An amount, drawn from a log-normal law, multiplies a direction; the label depends on the direction and on an item, and not on the amount, which a norm
after the first layer takes out again. Many rows of a batch are then a hundred thousand times smaller than the largest one, and so are gradients.
The folder is for the source ``files``; it needs polars, which gem-data brings:

    python wide_range.py FOLDER [SPREAD]
    gem precision guard -c FOLDER/config.toml --recipe fp8_naive --against fp32 --seeds 1,2,3 --out OUT
"""

import sys
from pathlib import Path

import numpy as np
import polars as pl

WIDTH, ITEMS = 16, 100
SCHEMA = f"""
[[id]]
name = "item"
encode = "pass"
rows = {ITEMS + 1}

[[embedding]]
name = "spent"
width = {WIDTH}

[[task]]
name = "ctr"
label = "click"
"""
CONFIG = """
[data]
source = "files"
batch_size = 512

[data.options]
path = "{folder}"
train = ["train.parquet"]
test = ["test.parquet"]

[model]
name = "dlrm"

[model.options]
dim = 32

[model.options.features]
embedding_dim = 32

[model.options.head]
hidden = [128, 64]

[optim]
lr = 2e-3
schedule = "cosine"

[train]
epochs = 2
"""


def rows(count: int, seed: int, spread: float) -> pl.DataFrame:
    """Rows of one split."""
    taste, effect = (np.random.default_rng(0).normal(size=shape) for shape in (WIDTH, ITEMS + 1))
    draw = np.random.default_rng(seed)
    direction = draw.normal(size=(count, WIDTH))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    item = draw.integers(1, ITEMS + 1, count)
    logit = 3 * direction @ taste + effect[item] - 1
    amount = np.exp(draw.normal(6.0, spread, count))
    return pl.DataFrame(
        {
            "item": item,
            "spent": (amount[:, None] * direction).astype(np.float32),
            "click": (draw.random(count) < 1 / (1 + np.exp(-logit))).astype(np.int8),
        },
        schema_overrides={"spent": pl.List(pl.Float32)},
    )


def write(folder: Path, spread: float) -> None:
    """Write both splits, the schema and a configuration. ``spread`` is the deviation of the natural logarithm of the amounts."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", 100_000, 1), ("test", 50_000, 2)):
        rows(count, seed, spread).write_parquet(folder / f"{name}.parquet")
    (folder / "schema.toml").write_text(SCHEMA)
    (folder / "config.toml").write_text(CONFIG.format(folder=folder))


if __name__ == "__main__":
    write(Path(sys.argv[1]), spread=float(sys.argv[2]) if len(sys.argv) > 2 else 4.0)
