"""The ``sharded_2d`` engine gives what one process gives, in every grid of 1, 2 and 4 gloo ranks. The ranks' work is in ranks_sharded2d.py."""

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_batches import KEYS, TABLES, pack, share, torch_engine, train
from torch import Tensor

from gem_core.batch import Jagged, KeyedJagged
from gem_core.spec import RequestError, SparseOptimizer, TableSpec
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.sharded2d import Sharded2DEmbeddings

SCRIPT = Path(__file__).with_name("ranks_sharded2d.py")
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")
GRIDS = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
"""Ranks and replicas."""


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    return {world: on_ranks(SCRIPT, tmp_path_factory.mktemp(f"ranks{world}"), world) for world in (2, 4)}


def alone(optimizer: str = "sgd") -> Sharded2DEmbeddings:
    return Sharded2DEmbeddings(TABLES, SparseOptimizer(name=optimizer, lr=0.2), device="cpu", seed=3)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-5), f"{name}: off by {float((got[name] - tensor).abs().max())}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_equals_the_torch_engine(optimizer: str) -> None:
    got, want = alone(optimizer), torch_engine(optimizer)
    for mine, theirs in zip(train(got, 0, 1), train(want, 0, 1), strict=True):
        same(mine, theirs)
    for table, tensors in want.export_tables().items():
        same(got.export_tables()[table], tensors)


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("world", "replicas"), GRIDS)
def test_every_grid_equals_the_torch_engine_in_one_process(
    ranks: dict[int, list[dict[str, Any]]], world: int, replicas: int, optimizer: str, prefetch: bool
) -> None:
    """Five steps with unequal shares, one of them on one rank alone: outputs of each step and tables with their optimiser state."""
    want = torch_engine(optimizer)
    outputs = train(want, 0, 1)
    for table, tensors in want.export_tables().items():
        for rank in ranks[world]:
            same(rank["tables"][replicas, optimizer, prefetch][table], tensors)
    for step, whole in enumerate(outputs):  # the ranks' rows, one after the other, are the global batch
        parts = [rank["outputs"][replicas, optimizer, prefetch][step] for rank in ranks[world]]
        same({key: torch.cat([part[key] for part in parts]) for key in whole}, whole)


def test_the_comparison_sees_a_planted_fault(ranks: dict[int, list[dict[str, Any]]]) -> None:
    """Replicas that drift: the last step is left out on one side."""
    late = torch_engine("sgd")
    step, late.step = late.step, lambda: None
    train(late, 0, 1)
    late.step = step
    with pytest.raises(AssertionError):
        same(ranks[4][0]["tables"][2, "sgd", True]["item"], late.export_tables()["item"])


@pytest.mark.parametrize(("world", "replicas"), GRIDS)
def test_micro_batches_are_one_update(ranks: dict[int, list[dict[str, Any]]], world: int, replicas: int) -> None:
    want = runpy.run_path(str(SCRIPT))["accumulated"](torch_engine("rowwise_adagrad"), 0, 1)
    for table, tensors in want.items():
        same(ranks[world][-1]["accumulated"][replicas][table], tensors)


@pytest.mark.parametrize(("world", "replicas"), GRIDS)
def test_case_F08_every_row_is_kept_once_and_ranks_keep_their_share(ranks: dict[int, list[dict[str, Any]]], world: int, replicas: int) -> None:
    held = [piece for rank in ranks[world] for piece in rank["held"][replicas]]
    for table in TABLES:
        assert sorted(row for name, start, stop in held if name == table.name for row in range(start, stop)) == list(range(table.rows))
    share_of_rank = sum(math.ceil(table.rows / world) * table.dim for table in TABLES)
    assert {rank["kept"][replicas] for rank in ranks[world]} == {share_of_rank}


def expected_traffic(world: int, replicas: int, rank: int) -> dict[str, int]:
    """Bytes of a step on the shares of step 0, counted row by row: 8 for a row number, 4 for each of its floats."""
    groups, out = world // replicas, dict.fromkeys(NAMES, 0)
    group, replica = divmod(rank, replicas)
    peers = [g * replicas + replica for g in range(groups)]

    def wanted(of: int) -> set[tuple[str, int, int]]:
        """``(table, id, dim)`` of the rows that a rank looks up."""
        batch = pack(share(0, of, world))
        return {(table.name, i, table.dim) for table in TABLES for key in table.features for i in batch.ids(key).tolist()}

    def owner(row: tuple[str, int, int]) -> int:
        rows = {table.name: table.rows for table in TABLES}[row[0]]
        return row[1] // math.ceil(rows / world)

    away = [row for row in wanted(rank) if owner(row) // replicas != group]
    asked = [row for peer in peers if peer != rank for row in wanted(peer) if owner(row) // replicas == group]
    summed = {row for peer in peers for row in wanted(peer) if owner(row) // replicas == group}
    passed = [row for row in summed if owner(row) % replicas != replica]
    banks = len({table.dim for table in TABLES})
    out["tables: gather shards"] = 4 * (replicas - 1) * sum(math.ceil(table.rows / world) * table.dim for table in TABLES)
    for name in ("tables: ask, counts", "tables: gradients, counts"):
        out[name] = 8 * banks * (groups - 1)
    out["tables: gradients to owner, counts"] = 8 * banks * (replicas - 1)
    out["tables: ask"] = out["tables: gradients, rows"] = 8 * len(away)
    out["tables: answer"] = 4 * sum(row[2] for row in asked)
    out["tables: gradients"] = 4 * sum(row[2] for row in away)
    out["tables: gradients to owner, rows"] = 8 * len(passed)
    out["tables: gradients to owner"] = 4 * sum(row[2] for row in passed)
    return {name: count for name, count in out.items() if count}


NAMES = (
    "tables: gather shards",
    "tables: ask, counts",
    "tables: ask",
    "tables: answer",
    "tables: gradients, counts",
    "tables: gradients, rows",
    "tables: gradients",
    "tables: gradients to owner, counts",
    "tables: gradients to owner, rows",
    "tables: gradients to owner",
)


@pytest.mark.parametrize(("world", "replicas"), GRIDS)
def test_bytes_sent_equal_the_formula(ranks: dict[int, list[dict[str, Any]]], world: int, replicas: int) -> None:
    for number, rank in enumerate(ranks[world]):
        sent = {name: count for name, count in rank["traffic"][replicas].items() if count}
        assert sent == expected_traffic(world, replicas, number)


def test_case_E02_tables_of_another_engine_move_in_with_their_bits(ranks: dict[int, list[dict[str, Any]]]) -> None:
    for world in (2, 4):
        for rank in ranks[world]:
            for table, tensors in rank["source"].items():
                assert all(torch.equal(rank["moved"][table][name], tensor) for name, tensor in tensors.items())
            same(rank["first look-up after import"], rank["wanted after import"])


def test_replicas_that_do_not_divide_the_ranks_are_refused(ranks: dict[int, list[dict[str, Any]]]) -> None:
    assert "2 ranks cannot be divided by it" in ranks[2][0]["refused"]
    assert "Choose one of 1, 2, 4" in ranks[4][0]["refused"]
    with pytest.raises(RequestError, match="replicas = 2"):
        Sharded2DEmbeddings(TABLES, SparseOptimizer(), device="cpu", seed=1, replicas=2)


def test_an_id_without_a_row_is_named_on_every_rank(ranks: dict[int, list[dict[str, Any]]]) -> None:
    for number, rank in enumerate(ranks[4]):
        assert f"id {11 + number} is not a row of table 'tags', which has 11" in rank["bad id"]


@pytest.mark.parametrize("engine", [Sharded2DEmbeddings, TorchRecEmbeddings])
def test_case_B15_each_feature_keeps_its_count_and_ids_beyond_the_table_are_refused_first(engine: Any) -> None:
    """Two features of one table, looked up as distinct rows: 5 and 3 ids, of which 3 are distinct; then raw ids on the first."""
    tables = (TableSpec(name="item", rows=10, dim=4, features=("long", "short"), init_scale=0.5),)
    made = engine(tables, SparseOptimizer(name="sgd", lr=0.1), device="cpu", seed=1)
    columns = {"short": [7, 7, 2], "long": [7, 9, 9, 2, 7]}

    def packed(columns: dict[str, list[int]]) -> KeyedJagged:
        jagged = {key: Jagged(torch.tensor(ids), torch.tensor([0, len(ids)]), len(ids)) for key, ids in columns.items()}
        return KeyedJagged.from_columns(jagged, 1)

    out, weight = made(packed(columns)), made.export_tables()["item"]["weight"]
    assert all(torch.equal(out[key], weight[ids]) for key, ids in columns.items())
    with pytest.raises(RequestError, match="ids of feature 'long': id 12345678901 is not a row of table 'item', which has 10"):
        made(packed({**columns, "long": [7, 12345678901, 9]}))


def test_empty_batches_and_empty_bags() -> None:
    engine = alone()
    nothing = engine(pack([]))
    assert {key: tuple(vectors.shape) for key, vectors in nothing.items()}["city"] == (0, 8)
    sum(vectors.sum() for vectors in nothing.values()).backward()
    row = {key: [] for key in KEYS}
    empty = engine(pack([row, row]))
    assert empty["tags"].shape == (2, 4)
    assert not empty["tags"].any()
    sum(vectors.sum() for vectors in empty.values()).backward()
    before = engine.export_tables()
    engine.step()
    for table, tensors in engine.export_tables().items():
        assert torch.equal(tensors["weight"], before[table]["weight"])


def test_tables_with_fewer_rows_than_ranks_and_wide_ids() -> None:
    tables = (TableSpec(name="flag", rows=2, dim=3, features=("flag",), init_scale=0.1),)
    engine = Sharded2DEmbeddings(tables, SparseOptimizer(name="sgd", lr=1.0), device="cpu", seed=1)
    assert engine.export_tables()["flag"]["weight"].shape == (2, 3)
