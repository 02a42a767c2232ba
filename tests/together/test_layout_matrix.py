"""Eight ranks in every layout of the five axes equal one process, send what the formula says, keep what it says, and take over each other's runs.

The ranks' work is in ranks_layouts.py. By default 10 of the 40 layouts run; ``GEM_ALL_LAYOUTS=1`` runs them all.
"""

import json
import math
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the ranks' script is also read here

from ranks_layouts import BATCH, HALF, LAST, SETTINGS, STEPS, WORLD, chosen, layouts, words
from test_layouts import LOSS_BOUND, VALUE_BOUND, losses
from torch import Tensor

from gem_core.train.checkpoint.pieces import pieces_of
from gem_core.train.checkpoint.saved import find_checkpoint
from gem_parallel.mesh import Layout

Gem = Callable[..., Any]
FLOAT = 4
FEWER = {
    2: Layout(replicate=1, shard=1, expert=2, sparse_shard=2, sparse_replicate=1),
    4: Layout(replicate=1, shard=2, expert=2, sparse_shard=2, sparse_replicate=2),
}
"""How fewer ranks lay out a run that they take over; one process keeps all."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the ranks have worked."""
    folder = tmp_path_factory.mktemp("layouts")
    script = Path(__file__).with_name("ranks_layouts.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    errors = "\n".join(path.read_text()[-3000:] for path in folder.glob("error*.txt"))
    assert done.returncode == 0, errors + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def ranks(ran: Path) -> list[dict[str, Any]]:
    return [pickle.loads((ran / f"rank{rank}.pickle").read_bytes()) for rank in range(WORLD)]


@pytest.fixture
def one(gem: Gem, ran: Path) -> Path:
    """The run of one process."""
    if not (ran / "one").exists():
        words = [word for setting in (*SETTINGS, "run.device=cpu") for word in ("--set", setting)]
        gem("train", "-c", "synthetic", *words, "--set", f"train.max_steps={STEPS}", "--out", str(ran / "one"))
    return ran / "one"


def norms(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["grad_norm"] for row in rows if "grad_norm" in row}


def check(run: Path, one: Path) -> None:
    """Losses, norms of gradients and, at the end, weights, optimiser state, averages and tables."""
    for figures in (losses, norms):
        got, want = figures(run), figures(one)
        assert got.keys() == want.keys() == set(range(1, STEPS + 1))
        assert all(abs(got[step] / want[step] - 1) < LOSS_BOUND for step in want), (got, want)
    got, want = (tensors(path) for path in (run, one))
    assert got.keys() == want.keys()
    off = {name: float((got[name].double() - tensor.double()).abs().max()) for name, tensor in want.items() if tensor.numel()}
    assert max(off.values()) < VALUE_BOUND, max(off, key=lambda name: off[name])


def tensors(run: Path) -> dict[str, Tensor]:
    """Everything that a run's last checkpoint holds, whole."""
    saved = find_checkpoint(run)
    out = {name: torch.empty(saved.shape(name), dtype=saved.dtype(name)) for name in saved.index}
    saved.fill({name: pieces_of(tensor) for name, tensor in out.items()})
    return out


@pytest.mark.parametrize("index", range(len(chosen())), ids=[str(layout) for layout in chosen()])
def test_a_layout_equals_one_process_and_another_goes_on(ran: Path, one: Path, index: int) -> None:
    """Run ``index``: begun in one layout, finished from its checkpoint in the next."""
    check(ran / f"run{index}", one)


def finish(ran: Path, world: int, device: str) -> Path:
    """A copy of the run that the ranks have begun, trained to its end on so many."""
    run = ran / f"begun-{world}"
    shutil.copytree(ran / "begun", run)
    single = ['parallel.strategies=["single"]', "parallel.options={}", "embedding.engine=torch", "embedding.options={}"]
    settings = [*SETTINGS, f"run.device={device}", f"train.max_steps={STEPS}", *(words(FEWER[world], ddp=False) if world > 1 else single)]
    start = [
        sys.executable,
        *(("-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost", f"--nproc-per-node={world}") * (world > 1)),
    ]
    command = [*start, "-m", "gem_core", "train", "--resume", str(run), *(word for value in settings for word in ("--set", value))]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ran)
    assert done.returncode == 0, done.stderr[-4000:]
    return run


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case_E01_a_checkpoint_of_eight_ranks_is_taken_over_by_fewer(ran: Path, one: Path, world: int) -> None:
    assert max(losses(ran / "begun")) == HALF
    check(finish(ran, world, "cpu"), one)


def test_norms_are_clipped_and_shares_are_odd(one: Path) -> None:
    """What makes the comparison above a hard one."""
    assert min(norms(one).values()) > 0.2
    assert BATCH % WORLD
    assert LAST < WORLD


def test_the_comparison_sees_another_bound_on_the_norm(gem: Gem, ran: Path, one: Path) -> None:
    """The planted fault: a norm that is counted wrongly clips otherwise."""
    words = [word for setting in (*SETTINGS, "run.device=cpu") for word in ("--set", setting)]
    gem("train", "-c", "synthetic", *words, "--set", f"train.max_steps={STEPS}", "--set", "optim.clip_norm=0.199", "--out", str(ran / "other"))
    with pytest.raises(AssertionError):
        check(ran / "other", one)


def shard_rows(rows: int, shards: int, shard: int) -> int:
    """Rows that a shard keeps of so many."""
    each = math.ceil(rows / shards)
    return max(0, min(each, rows - shard * each))


class Formula:
    """What a rank sends and keeps, from the model's shapes and the layout alone.

    Args:
        layout: the degrees.
        rank: of the world.
        facts: what ``ranks_layouts.facts`` tells.
    """

    def __init__(self, layout: Layout, rank: int, facts: dict[str, Any]) -> None:
        self.layout, self.facts, self.rank = layout, facts, rank
        rest, self.expert = divmod(rank, layout.expert)
        self.shard = rest % layout.shard

    def spread(self, name: str) -> tuple[int, int]:
        """Over how many shards a parameter lies, and which of them this rank keeps; an expert of another rank lies on none."""
        if ".experts." not in name:
            return self.layout.shard * self.layout.expert, self.shard * self.layout.expert + self.expert
        index = int(name.split(".experts.")[1].split(".")[0])
        share = 8 // self.layout.expert
        return (self.layout.shard, self.shard) if index // share == self.expert else (0, 0)

    def padded(self, name: str) -> int:
        """Elements of a shard on the wire: the first dimension in equal parts."""
        shards, _ = self.spread(name)
        first, *others = self.facts["shapes"][name]
        return math.ceil(first / shards) * math.prod(others) if shards else 0

    def kept(self, name: str) -> int:
        """Elements that this rank keeps."""
        shards, shard = self.spread(name)
        first, *others = self.facts["shapes"][name]
        return shard_rows(first, shards, shard) * math.prod(others) if shards else 0

    def gathers(self, name: str) -> int:
        """How often a step gathers a parameter: blocks also for backward."""
        return 2 if any(name.startswith(f"{unit}.") for unit in self.facts["units"]) else 1

    def sent(self) -> dict[str, int]:
        """Bytes of a half run that do not depend on the rows' ids."""
        sizes = {name: (self.spread(name)[0], FLOAT * self.padded(name)) for name in self.facts["shapes"]}
        out = {"dense: weights": 0, "dense: gradients": 0}
        for name, (shards, size) in sizes.items():
            if shards:
                out["dense: weights"] += HALF * self.gathers(name) * (shards - 1) * size
                out["dense: gradients"] += HALF * (shards - 1) * size
        tokens_in, tokens_out = self.facts["tokens"]
        longest = HALF * math.ceil(BATCH / WORLD) * self.facts["dim"] * FLOAT * (self.layout.expert - 1)
        if self.layout.expert > 1:
            out |= {f"experts: {name}": longest * tokens_in for name in ("activations", "input gradients")}
            out |= {f"experts: {name}": longest * tokens_out for name in ("outputs", "output gradients")}
        if self.layout.sparse_replicate > 1:
            slices = sum(math.ceil(rows / WORLD) * dim for rows, dim in self.facts["tables"])
            out["tables: gather shards"] = HALF * FLOAT * (self.layout.sparse_replicate - 1) * slices
        return {name: count for name, count in out.items() if count}

    def memory(self) -> dict[str, int]:
        """Bytes kept between steps."""
        names = self.facts["shapes"]
        kept, padded = (FLOAT * sum(count(name) for name in names) for count in (self.kept, self.padded))
        keeps = any(shard_rows(rows, WORLD, self.rank) for rows, _ in self.facts["tables"])
        tables = FLOAT * sum(math.ceil(rows / WORLD) * (dim + 1) for rows, dim in self.facts["tables"]) if keeps else 0
        return {"weights": padded, "gradients": padded, "optimizer": 2 * kept, "average": kept, "tables": tables}


@pytest.mark.parametrize("layout", chosen(), ids=str)
def test_bytes_on_the_wire_equal_the_formula(ranks: list[dict[str, Any]], layout: Layout) -> None:
    for number, rank in enumerate(ranks):
        want = Formula(layout, number, rank["facts"]).sent()
        told = {name: count for name, count in rank["sent"][astuple(layout)].items() if name in want or not name.startswith("tables: ")}
        for name in ("dense: gradients between replicas", "experts: row counts"):  # checked below
            told.pop(name, None)
        assert {name: count for name, count in told.items() if count} == want


@pytest.mark.parametrize("layout", [layout for layout in chosen() if layout.replicate > 1], ids=str)
def test_bytes_between_replicas_equal_the_formula(ranks: list[dict[str, Any]], layout: Layout) -> None:
    """A ring all-reduce of each block's shard, which is padded to equal parts."""
    for number, rank in enumerate(ranks):
        formula = Formula(layout, number, rank["facts"])
        units = sorted(rank["facts"]["units"], key=len, reverse=True)
        sizes: dict[str, int] = {}
        for name in rank["facts"]["shapes"]:
            unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
            sizes[unit] = sizes.get(unit, 0) + FLOAT * formula.padded(name)
        want = HALF * sum(2 * (layout.replicate - 1) * math.ceil(size / layout.replicate) for size in sizes.values())
        assert rank["sent"][astuple(layout)]["dense: gradients between replicas"] == want


@pytest.mark.parametrize("layout", chosen(), ids=str)
def test_memory_of_a_rank_follows_the_formula(ranks: list[dict[str, Any]], layout: Layout) -> None:
    for number, rank in enumerate(ranks):
        want = Formula(layout, number, rank["facts"]).memory()
        got = rank["kept"][astuple(layout)]
        assert got.keys() == want.keys()
        for name, size in want.items():
            assert got[name] == pytest.approx(size, rel=0.05), name


def test_the_formulas_tell_layouts_apart(ranks: list[dict[str, Any]]) -> None:
    """The planted fault: what one layout sent and kept, against the formula of another."""
    one_a_dense_part = {(layout.replicate, layout.shard, layout.expert): layout for layout in chosen()}
    for layout, other in pairwise(one_a_dense_part.values()):
        assert ranks[0]["sent"][astuple(layout)]["dense: weights"] != Formula(other, 0, ranks[0]["facts"]).sent().get("dense: weights")
    first, *_, last = chosen()
    assert ranks[0]["kept"][astuple(first)]["weights"] != pytest.approx(Formula(last, 0, ranks[0]["facts"]).memory()["weights"], rel=0.05)


def test_the_layouts_are_all_products_of_eight() -> None:
    every = layouts()
    assert len(set(every)) == len(every) == 40
    assert all(layout.world == layout.sparse_shard * layout.sparse_replicate == WORLD for layout in every)
    assert {(layout.replicate, layout.shard, layout.expert) for layout in chosen()} == {(x.replicate, x.shard, x.expert) for x in every}
    assert {layout.sparse_replicate for layout in chosen()} == {1, 2, 4, 8}
