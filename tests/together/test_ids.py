"""Managed ids on every engine and number of ranks: the numbers of one process, and runs that change hands."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gem_core.config.schema import ManagedTable
from gem_core.train.ids.idmap import IdMap

Gem = Callable[..., Any]
RULES = """embedding.ids=[
  {pattern = "item", rows = 90, buckets = 6, evict_every = 3, admit_after = 2, hashed_rows = 5},
  {pattern = "category", rows = 4, buckets = 1, evict_every = 1, policy = "lfu"},
]"""
RUN = tuple(
    word
    for value in (
        'model={name = "dlrm"}',
        "data.options.rows=1001",
        "data.options.test_rows=500",
        "data.options.items=400",
        "data.options.categories=12",
        "data.batch_size=125",
        "train.epochs=1",
        "train.log_every=1",
        "train.uneven=pad",
        "train.checkpoint_every=5",
        RULES.replace("\n", " "),
    )
    for word in ("--set", value)
)
"""Eight full steps and one of a single row, which leaves all ranks but one without rows. DLRM takes the mean of a history from the engine: tables
are bags."""
LOSS_BOUND = 2e-5
VALUE_BOUND = 2e-5
"""Largest differences of losses and of table values: sums in another order."""


def engine(name: str, ranks: int, **options: Any) -> tuple[str, ...]:
    text = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items())
    words = ("--set", f"embedding.engine={name}", "--set", f"embedding.options={{{text}}}")
    return (*words, "--set", f'parallel.strategies=["{"ddp" if ranks > 1 else "single"}"]')


def records(run: Path, event: str = "train") -> dict[int, dict[str, Any]]:
    """By step; those of a resumed run replace the ones before."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if row["event"] == event}


def check(gem: Gem, one: Path, other: Path) -> None:
    """Losses and tables within rounding; ids, their rows, counts and last use, and every figure about them, to the last bit."""
    want, got = records(one), records(other)
    assert got.keys() == want.keys() == set(range(1, 10))
    assert all(abs(got[step]["loss"] / want[step]["loss"] - 1) < LOSS_BOUND for step in want)
    assert [got[step]["ids"] for step in want] == [want[step]["ids"] for step in want]
    assert records(other, "eval")[9]["ids"] == records(one, "eval")[9]["ids"]
    differ = {row["name"]: row for row in json.loads(gem("checkpoint", "diff", str(one), str(other), "--json").stdout)}
    assert not [name for name, row in differ.items() if row["so"] or name.rsplit("/", 1)[1].startswith("id")]
    assert max((row["largest"] for name, row in differ.items() if name.startswith("tables/")), default=0.0) < VALUE_BOUND


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the run of one process goes, which the tests below share."""
    return tmp_path_factory.mktemp("one") / "run"


def run_once(gem: Gem, one: Path) -> None:
    if not one.exists():
        gem("train", "-c", "synthetic", *RUN, *engine("torch", 1), "--out", str(one))
        tables = [record["ids"]["tables"] for record in records(one).values()]
        assert sum(of["item"]["evicted"] for of in tables) > 3, "rows change hands"


def test_case_F06_bags_of_managed_ids_on_the_cpu_in_two_processes(gem: Gem, torchrun: Gem, tmp_path: Path, one: Path) -> None:
    """Under torchrec, whose own managed-collision sharder has no layout for bags on the CPU."""
    run_once(gem, one)
    torchrun(2, "train", "-c", "synthetic", *RUN, *engine("torchrec", 2, sharding="row_wise"), "--out", "run")
    check(gem, one, tmp_path / "run")


def test_case_E03_four_ranks_give_the_ids_of_one_and_two_go_on_with_them(gem: Gem, torchrun: Gem, tmp_path: Path, one: Path) -> None:
    run_once(gem, one)
    torchrun(4, "train", "-c", "synthetic", *RUN, *engine("sharded_2d", 4, replicas=2), "--out", "run")
    check(gem, one, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step-9")
    torchrun(2, "train", "--resume", "run", *engine("torch", 2))
    assert records(tmp_path / "run", "resumed"), "from step 5, on another engine"
    check(gem, one, tmp_path / "run")


def test_a_plan_has_the_rows_of_the_rules(gem: Gem) -> None:
    told = json.loads(gem("plan", "-c", "synthetic", "--world", "2", *RUN, "--set", "embedding.engine=sharded_2d", "--json").stdout)
    assert {table["table"]: table["rows"] for table in told["tables"]} == {"item": 90, "category": 4, "user_group": 7, "hour": 25}


@pytest.mark.parametrize(("policy", "theirs"), [("lfu", "LFU"), ("lru", "LRU"), ("distance_lfu", "DistanceLFU")])
def test_an_id_is_worth_what_torchrec_says(policy: str, theirs: str) -> None:
    """Who loses and who gets a row among 60 owners and 40 that wait, all worth different amounts, at step 500."""
    torch = pytest.importorskip("torch")
    modules = pytest.importorskip("torchrec.modules.mc_modules")
    owners, waiting, clock = 60, 40, 500
    rng = np.random.default_rng(1)
    counts, used = rng.permutation(np.arange(1, 101)) ** 3, rng.permutation(np.arange(400, 500))
    held = IdMap(ManagedTable(pattern="*", rows=owners + 1, buckets=1, policy=policy))
    rows = np.where(np.arange(100) < owners, np.arange(1, 101), 0)
    held.load(np.stack([np.arange(100), rows, counts, used]))
    taken, new = held._evict(clock)

    counted, last = torch.from_numpy(counts), torch.from_numpy(used)
    order = torch.argsort(counted[owners:], descending=True)
    slot = torch.zeros(1, dtype=torch.int64)  # torchrec keeps one more, for ids without a row
    metadata = {"counts": torch.cat([counted[:owners], slot]), "last_access_iter": torch.cat([last[:owners], slot])}
    none = torch.zeros(waiting, dtype=torch.bool)
    evicted, chosen = getattr(modules, f"{theirs}_EvictionPolicy")().update_metadata_and_generate_eviction_scores(
        clock, owners + 1, order, counted[owners:][order], none, slot[:0], metadata, {"last_access_iter": last[owners:].clone()}
    )
    assert sorted((taken - 1).tolist()) == sorted(evicted.tolist())
    assert sorted(new.tolist()) == sorted((owners + order[chosen]).tolist())
    assert 5 < len(new) < waiting


def test_the_comparison_sees_ids_that_are_admitted_otherwise(gem: Gem, tmp_path: Path, one: Path) -> None:
    run_once(gem, one)
    gem("train", "-c", "synthetic", *(word.replace("admit_after = 2", "admit_after = 3") for word in RUN), "--out", "other")
    with pytest.raises(AssertionError):
        check(gem, one, tmp_path / "other")
