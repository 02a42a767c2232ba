"""Published points of two-dimensional sparse parallelism (arXiv 2508.03854) beside what the cost model says of them.

usage: python3 packages/gem-parallel/benchmarks/published.py [--write]

The paper gives samples a second, not what a step consists of. So one point of each series sets the compute of a step, and the others are predicted
from the hardware, the layout and the sizes below. Those that the paper does not give are assumptions: listed, and varied where they decide.
``--write`` makes results/published.csv anew.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from gem_core.spec import BatchFacts, BlockFacts, EmbeddingPlan, ModelFacts, TablePlan, Tier, Topology
from gem_parallel.costmodel.assumed import Assumed
from gem_parallel.costmodel.dense import dense_in
from gem_parallel.costmodel.step import Outcome, Step
from gem_parallel.mesh import layout_of

RESULTS = Path(__file__).parent / "results" / "published.csv"

SCALING = {256: 1.76e5, 512: 3.56e5, 1024: 6.76e5, 2048: 1.34e6, 4096: 2.53e6}
"""ExFM with tables of 1.7 TB, groups of 256 ranks: samples a second by number of GPUs."""
EXFM_TABLES, EXFM_GROUP = 1.7e12, 256
CTR = {1: 1.53e6, 4: 2.66e6}
"""A CTR model on 256 GPUs: samples a second by number of copies of the tables."""
CTR_IMBALANCE = {1: 5.70, 4: 1.57}
"""Its heaviest rank's table work over the mean, by number of copies."""

H100 = Topology(
    world=1,
    device="cuda",
    tiers=(
        Tier(name="host", size=8, bandwidth=450e9, latency=3.4e-6),
        Tier(name="zone", size=3072, bandwidth=50e9, latency=14e-6),
        Tier(name="region", size=24576, bandwidth=50e9, latency=14e-6, oversubscription=7.0),
    ),
    source="as described by h100",
    memory=80 * 10**9,
    memory_bandwidth=3.35e12,
    peak_flops={"bf16": 989.4e12},
)
ROWS, LAYERS = 1024.0, 8
EXFM_DENSE, CTR_DENSE = 10e9, 0.1e9
FEATURES, WIDTH, BYTES = 720, 160, 2
ROW_CV = 1.45
LOOKED_UP = (0.0, 2.0, 5.0, 10.0)
ASSUMED = (
    ("hardware", "H100 hosts in RoCE zones as shipped; the paper names no GPU"),
    ("rows of a rank", "1,024: Wukong's global batch of 262,144 on 256 GPUs, arXiv 2403.02545"),
    ("dense parameters", "10e9 for ExFM, Wukong's 637e9 less its tables' 627e9; 0.1e9 for the CTR model; in 8 equal blocks"),
    ("exchanged vectors", "720 features x 160 x 2 bytes a row: Wukong's internal data, 16-bit transport"),
    ("variation of rows' cost", "1.45, which gives the 15 % that the GEM article names for the heaviest of thousands of ranks"),
    ("rows looked up", "one float32 row a feature for ExFM; for the CTR model not published, and varied, since they decide its point"),
)


def plan(world: int, copies: int, imbalance: float, synced: float) -> EmbeddingPlan:
    """Tables in groups of ``world / copies`` ranks: vectors there, gradients back, ``synced`` bytes averaged over the copies after each step.

    One rank of a group has ``imbalance`` times the mean work; the others share the rest evenly.
    """
    group = world // copies
    vectors = ROWS * FEATURES * WIDTH * BYTES * (group - 1) / group
    others = (group - imbalance) / (group - 1) if group > 1 else 1.0
    sent = tuple(vectors * (imbalance if rank < copies else others) for rank in range(world))
    table = TablePlan(table="all", rows=1, dim=WIDTH, sharding="row_wise", where="all", bytes=0)
    moved = {"vectors": sent, "gradients": sent}
    if copies > 1:
        moved["average of copies"] = (2 * (copies - 1) / copies * synced,) * world
    return EmbeddingPlan(world=world, tables=(table,), held=(0,) * world, working=0, sent=moved)


def step(
    world: int, copies: int, compute: float, *, dense: float = EXFM_DENSE, imbalance: float = 1.0, synced: float = 0.0, ids: float = 1.0
) -> Outcome:
    """A step whose dense compute takes ``compute`` seconds on the mean rank."""
    flops = compute * H100.peak_flops["bf16"] * Assumed().matmul / 3 / ROWS / LAYERS
    blocks = tuple(BlockFacts(name=f"layers.{i}", parameters=int(dense / LAYERS), flops=flops, saved=0.0) for i in range(LAYERS))
    model = ModelFacts(blocks=(BlockFacts(name="rest", parameters=0, flops=0.0, saved=0.0), *blocks), dtype="bf16", row_cv=ROW_CV)
    layout = layout_of(world, replicate=max(1, world // 256), sparse_replicate=copies)
    count = ROWS * FEATURES * ids
    batch = BatchFacts(rows=ROWS, ids={"all": count}, distinct={"all": count})
    laid = dense_in(layout, model, {"payload": "bf16", "reduce_dtype": "bf16"})
    return Step(replace(H100, world=world), laid, model, batch, plan(world, copies, imbalance, synced), Assumed()).outcome()


def compute_of(seconds: float, world: int, copies: int, **words: float) -> float:
    """The dense compute with which a step takes ``seconds``, by bisection."""
    low, high = 0.0, seconds
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if step(world, copies, middle, **words).seconds < seconds else (low, middle)
    return (low + high) / 2


def scaling() -> list[tuple[str, float, float]]:
    """``(point, published, predicted)`` of the scaling series: samples a second a GPU over those at 256 GPUs."""
    synced = EXFM_TABLES / EXFM_GROUP
    first = ROWS * 256 / SCALING[256]
    compute = compute_of(first, 256, 1)
    rows = []
    for world, published in SCALING.items():
        predicted = first / step(world, world // EXFM_GROUP, compute, synced=synced).seconds
        rows.append((f"scaling at {world:,} GPUs", published / world / (SCALING[256] / 256), predicted))
    return rows


def ctr(ids: float) -> tuple[str, float, float]:
    """``(point, published, predicted)``: samples a second with one copy of the tables, from the compute of the step with four."""
    compute = compute_of(ROWS * 256 / CTR[4], 256, 4, dense=CTR_DENSE, imbalance=CTR_IMBALANCE[4], ids=ids)
    predicted = ROWS * 256 / step(256, 1, compute, dense=CTR_DENSE, imbalance=CTR_IMBALANCE[1], ids=ids).seconds
    return f"samples a second with one copy of the tables, from those with four; {ids:g} rows looked up a feature", CTR[1], predicted


def table() -> list[tuple[str, float, float]]:
    return [*scaling(), *(ctr(ids) for ids in LOOKED_UP)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    lines = [(point, f"{published:.4g}", f"{predicted:.4g}", f"{predicted / published - 1:+.1%}") for point, published, predicted in table()]
    for line in lines:
        print("  ".join(line))
    for what, why in ASSUMED:
        print(f"assumed: {what}: {why}")
    if parser.parse_args().write:
        with RESULTS.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(
                [("point", "published", "predicted", "off"), *lines, *((f"assumed: {what}", why, "", "") for what, why in ASSUMED)]
            )


if __name__ == "__main__":
    main()
