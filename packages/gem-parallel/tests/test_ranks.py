"""Two gloo ranks: sharded tables and ``ddp`` give what one process gives on the global batch. The work is in ranks_sharded.py."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

SCRIPT = Path(__file__).with_name("ranks_sharded.py")
SHARDINGS = ("auto", "table_wise", "row_wise", "data_parallel")
OPTIMIZERS = ("rowwise_adagrad", "sgd")


@pytest.fixture(scope="module")
def ranks(sharded_ranks: Callable[[int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sharded_ranks(2)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def same(got: dict[str, Tensor], want: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert torch.allclose(got[name], tensor, rtol=rtol, atol=1e-5), f"{name}: off by {float((got[name] - tensor).abs().max())}"


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_tables_equal_the_torch_engine_in_one_process(
    ranks: list[dict[str, Any]], script: dict[str, Any], optimizer: str, sharding: str
) -> None:
    """Five steps of the same global batches; sum, mean and no pooling; tables of two widths; a feature pair on one table."""
    alone = script["torch_engine"](optimizer)
    outputs = script["train"](alone, 0, 1)
    for table, want in alone.export_tables().items():
        for rank in ranks:
            same(rank["tables"][sharding, optimizer][table], want)
    for step, want in enumerate(outputs):  # the ranks' rows, one after the other, are the global batch
        parts = [rank["outputs"][sharding, optimizer][step] for rank in ranks]
        same({key: torch.cat([part[key] for part in parts]) for key in want}, want)


def test_the_comparison_sees_a_planted_fault(ranks: list[dict[str, Any]], script: dict[str, Any]) -> None:
    """Gradients summed over ranks instead of averaged are twice as large; SGD must not pass with them."""
    doubled = script["torch_engine"]("sgd")
    doubled_set_lr = doubled.set_lr
    doubled.set_lr = lambda lr: doubled_set_lr(2 * lr)
    script["train"](doubled, 0, 1)
    with pytest.raises(AssertionError):
        same(ranks[0]["tables"]["auto", "sgd"]["item"], doubled.export_tables()["item"])


def test_case_B02_a_rank_without_rows_gets_empty_outputs(ranks: list[dict[str, Any]]) -> None:
    for sharding in SHARDINGS:
        empty = ranks[1]["outputs"][sharding, "sgd"][1]
        assert {key: tuple(vectors.shape) for key, vectors in empty.items()} == {
            "item": (0, 8),
            "history.item": (0, 8),
            "history.type": (0, 4),
            "tags": (0, 4),
            "more.tags": (0, 4),
            "city": (0, 8),
        }
        assert {vectors.dtype for vectors in empty.values()} == {torch.float32}


def test_case_F05_row_wise_bags_work_on_gloo(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["places"]["row_wise"] == dict.fromkeys(("item", "event.type", "tags", "city"), ("row_wise", (0, 1)))
    assert ranks[0]["outputs"]["row_wise", "sgd"][3]["tags"].shape == (2, 4)
    assert ranks[1]["outputs"]["row_wise", "sgd"][3]["tags"].shape == (4, 4)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_case_F08_every_row_of_every_table_is_held_once(ranks: list[dict[str, Any]], script: dict[str, Any], sharding: str) -> None:
    held = [piece for rank in ranks for piece in rank["held"][sharding]]
    for table in script["TABLES"]:
        rows = [row for name, start, stop in held if name == table.name for row in range(start, stop)]
        assert sorted(rows) == list(range(table.rows)), table.name


def test_placement_is_used(ranks: list[dict[str, Any]]) -> None:
    places = ranks[0]["places"]["table_wise"]
    for rank, saved in enumerate(ranks):
        assert {name for name, _, _ in saved["held"]["table_wise"]} == {name for name, (_, home) in places.items() if home == (rank,)}
        assert saved["held"]["table_wise"]
    assert {sharding for sharding, _ in ranks[0]["places"]["auto"].values()} == {"row_wise", "table_wise"}


def test_case_E02_E08_tables_move_between_engines_and_placements(ranks: list[dict[str, Any]]) -> None:
    """A checkpoint of the ``torch`` engine goes into sharded tables and back with its bits, optimiser state included."""
    for rank in ranks:
        for table, tensors in rank["source"].items():
            assert tensors["state"].shape == tensors["weight"].shape[:1]
            assert tensors["state"].any()
            for name, tensor in tensors.items():
                assert torch.equal(rank["moved"][table][name], tensor), (table, name)
                assert torch.equal(rank["back"][table][name], tensor), (table, name)


@pytest.mark.parametrize("engine", ["torch", "torchrec"])
def test_ddp_with_either_engine_equals_one_process(ranks: list[dict[str, Any]], script: dict[str, Any], engine: str) -> None:
    """A rank leaves out a layer when it has no rows, one layer is never used, and ranks start from different weights."""
    alone = script["train_both"](0, 1, script["torch_engine"]("rowwise_adagrad"))
    for rank in ranks:
        same(rank[f"dense and {engine}"], alone, rtol=1e-4)
    assert all(torch.equal(ranks[0][f"dense and {engine}"][name], tensor) for name, tensor in ranks[1][f"dense and {engine}"].items())


def test_case_H10_B15_a_bad_id_is_named_before_anything_is_sent(ranks: list[dict[str, Any]]) -> None:
    for rank, saved in enumerate(ranks):
        for word in ("'more.tags'", "'tags'", str(11 + rank)):
            assert word in saved["bad id"]
