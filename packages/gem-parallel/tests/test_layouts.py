"""Every layout of the ``torchrec`` engine against one process, on 2 and 4 gloo ranks. The ranks' work is in ranks_sharded.py."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from rank_batches import STEPS, TABLES, pack, share, torch_engine, train
from torch import Tensor

from gem_core.spec import SparseOptimizer
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.options import Sharding

EXACT = {"columns": "sgd", "mixed": "rowwise_adagrad", "planned": "rowwise_adagrad", "copies": "sgd"}
"""Layouts whose result is that of one process, and their optimiser."""
ROUNDED = {"fp16 rows": (2**-11, 2**-11), "16-bit wire": (2**-11, 2**-8), "bf16 wire": (2**-8, 2**-8)}
"""Layouts that round, all with SGD, and the relative error of one rounding: of what a look-up meets, and of the coarsest format on the way."""
WORLDS = (2, 4)
Ranks = Callable[[int], list[dict[str, Any]]]


def off(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest difference, where 1 is what float sums in another order may differ by: 1e-5, absolute and relative."""
    assert set(got) == set(want)
    return max((float(((got[n] - t).abs() / (1e-5 + 1e-5 * t.abs())).max()) for n, t in want.items() if t.numel()), default=0.0)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[dict[str, Tensor]], dict[str, dict[str, Tensor]]]]:
    """Outputs of each step and final tables of one process."""
    engines = {name: torch_engine(name) for name in ("sgd", "rowwise_adagrad")}
    return {name: (train(engine, 0, 1), engine.export_tables()) for name, engine in engines.items()}


def rows_of_all(saved: list[dict[str, Any]], layout: str, step: int) -> dict[str, Tensor]:
    parts = [rank["layouts"][layout]["outputs"][step] for rank in saved]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", EXACT)
def test_case_F09_what_is_offered_runs_and_equals_one_process(sharded_ranks: Ranks, alone: dict[str, Any], layout: str, world: int) -> None:
    outputs, tables = alone[EXACT[layout]]
    for rank in sharded_ranks(world):
        for table, want in tables.items():
            assert off(rank["layouts"][layout]["tables"][table], want) <= 1
    for step in range(STEPS):
        assert off(rows_of_all(sharded_ranks(world), layout, step), outputs[step]) <= 1


@pytest.mark.parametrize("sharding", get_args(Sharding))
def test_one_process_takes_every_layout_and_equals_the_torch_engine(alone: dict[str, Any], sharding: str) -> None:
    engine = TorchRecEmbeddings(TABLES, SparseOptimizer(name="rowwise_adagrad", lr=0.2), device="cpu", seed=3, sharding=sharding)
    outputs, tables = train(engine, 0, 1), engine.export_tables()
    for step, want in enumerate(alone["rowwise_adagrad"][0]):
        assert off(outputs[step], want) <= 1
    for table, want in alone["rowwise_adagrad"][1].items():
        assert off(tables[table], want) <= 1


def test_the_comparison_sees_a_planted_fault(sharded_ranks: Ranks, alone: dict[str, Any]) -> None:
    """SGD's tables are not AdaGrad's, and another step's outputs are not this one's."""
    assert off(sharded_ranks(2)[0]["layouts"]["columns"]["tables"]["item"], {"weight": alone["rowwise_adagrad"][1]["item"]["weight"]}) > 1
    other = alone["sgd"][0][1]["history.item"]
    mine = rows_of_all(sharded_ranks(2), "columns", 0)["history.item"]
    n = min(len(mine), len(other))
    assert off({"history.item": mine[:n]}, {"history.item": other[:n]}) > 1


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("layout", ROUNDED)
def test_case_G01_16_bits_stay_within_their_bound(sharded_ranks: Ranks, alone: dict[str, Any], layout: str, world: int) -> None:
    """Weights are below 1 and gradients, ``k + 2 w`` summed over look-ups, below 16 a look-up; each step and direction rounds a few times."""
    outputs, tables = alone["sgd"]
    of_look_up, coarsest = ROUNDED[layout]
    bound = 4 * STEPS * 16 * coarsest
    for rank in sharded_ranks(world):
        for table, want in tables.items():
            got = rank["layouts"][layout]["tables"][table]["weight"]
            scale = max(1.0, float(want["weight"].abs().max()))
            assert float((got - want["weight"]).abs().max()) < bound * scale, table
            assert not torch.equal(got, want["weight"]), f"{table}: nothing was rounded"
    first = rows_of_all(sharded_ranks(world), layout, 0)
    for key, want in outputs[0].items():
        assert first[key].dtype == torch.float32
        assert torch.allclose(first[key], want, rtol=4 * of_look_up, atol=4 * of_look_up), key


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("layout", "dtype"), [("fp16 rows", torch.float16), ("16-bit wire", torch.float16), ("bf16 wire", torch.bfloat16)])
def test_vectors_are_rounded_to_the_format_that_was_asked_for(
    sharded_ranks: Ranks, alone: dict[str, Any], layout: str, dtype: torch.dtype, world: int
) -> None:
    """torchrec puts fp16 in the place of bf16 when it is told that ranks talk over gloo."""
    first, want = rows_of_all(sharded_ranks(world), layout, 0), alone["sgd"][0][0]
    for key in ("history.item", "history.type", "item"):  # one by one, so that nothing is summed after the rounding
        assert torch.equal(first[key], want[key].to(dtype).float()), key


@pytest.mark.parametrize("world", WORLDS)
def test_scaled_copies_follow_their_formula(sharded_ranks: Ranks, world: int) -> None:
    """Two groups see half of the ranks each; ``state / 2`` in the step, weights and state averaged. The copied table sees the whole batch."""
    want = scaled(world)
    for rank in sharded_ranks(world):
        got = rank["layouts"]["scaled copies"]["tables"]
        for table, tensors in want.items():
            assert off(got[table], tensors) <= 2, table
    unscaled = torch_engine("rowwise_adagrad")
    train(unscaled, 0, 1)
    assert off(sharded_ranks(world)[0]["layouts"]["scaled copies"]["tables"]["item"], unscaled.export_tables()["item"]) > 100


def scaled(world: int) -> dict[str, dict[str, Tensor]]:
    """The formula in dense float64: ``v += mean(g ** 2) / 2``, ``w -= lr g / (sqrt(v) + eps)`` with the group's mean gradient, then averages."""
    start = torch_engine("rowwise_adagrad").export_tables()
    tables = {t.name: {name: tensor.double() for name, tensor in start[t.name].items()} for t in TABLES}
    for step in range(STEPS):
        for table in TABLES:
            grads = [dense_gradient(table, tables[table.name]["weight"], step, rank, world) for rank in range(world)]
            groups = [sum(grads)] if table.name == "city" else [2 * sum(grads[m::2]) for m in range(2)]
            results = []
            for grad in groups:
                state = tables[table.name]["state"] + grad.square().mean(1) / len(groups)
                results.append((tables[table.name]["weight"] - 0.2 / (step + 1) * grad / (state.sqrt() + 1e-8)[:, None], state))
            tables[table.name] = {"weight": sum(w for w, _ in results) / len(groups), "state": sum(v for _, v in results) / len(groups)}
    return {name: {key: tensor.float() for key, tensor in of.items()} for name, of in tables.items()}


def dense_gradient(table: Any, weight: Tensor, step: int, rank: int, world: int) -> Tensor:
    weight, batch, loss = weight.clone().requires_grad_(), pack(share(step, rank, world)), weight.new_zeros(())
    for key in table.features:
        vectors = weight[batch.ids(key)]
        if table.pooling != "none":
            bags = torch.repeat_interleave(torch.arange(batch.rows), batch[key].offsets.diff())
            vectors = weight.new_zeros(batch.rows, table.dim).index_add(0, bags, vectors)
            if table.pooling == "mean":
                vectors = vectors / batch[key].offsets.diff().clamp(min=1)[:, None]
        loss = loss + (vectors * torch.arange(1.0, table.dim + 1) + vectors**2).sum()
    (grad,) = torch.autograd.grad(loss + 0 * weight.sum(), weight)
    return grad


@pytest.mark.parametrize("world", WORLDS)
def test_case_F08_every_value_is_held_and_handed_over_once(sharded_ranks: Ranks, world: int) -> None:
    for layout in (*EXACT, *ROUNDED, "scaled copies"):
        for table in TABLES:
            held = torch.zeros(table.rows, table.dim)
            for rank in sharded_ranks(world):
                for name, start, stop, column, width in rank["layouts"][layout]["held"]:
                    if name == table.name:
                        held[start:stop, column : column + width] += 1
            assert bool((held == 1).all()), (layout, table.name)


@pytest.mark.parametrize("world", WORLDS)
def test_case_E02_E08_tables_of_every_layout_move_to_another_engine_and_back(sharded_ranks: Ranks, world: int) -> None:
    for rank in sharded_ranks(world):
        for layout in (*EXACT, *ROUNDED, "scaled copies"):
            for table, tensors in rank["layouts"][layout]["tables"].items():
                again = rank["layouts"][layout]["again"][table]
                assert all(torch.equal(again[name], tensor) for name, tensor in tensors.items()), (layout, table)


@pytest.mark.parametrize("world", WORLDS)
def test_layouts_are_what_was_asked_for(sharded_ranks: Ranks, world: int) -> None:
    saved = sharded_ranks(world)[0]["layouts"]
    everyone = tuple(range(world))
    assert saved["mixed"]["places"]["item"] == ("row_wise", everyone)
    assert saved["mixed"]["places"]["city"] == ("data_parallel", everyone)
    assert saved["mixed"]["places"]["tags"][0] == "table_wise"
    assert saved["planned"]["places"] == saved["mixed"]["places"]
    assert {name for name, (sharding, _) in saved["columns"]["places"].items() if sharding == "column_wise"} == {"item", "city"}


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_of_copies_equal_the_formula(sharded_ranks: Ranks, world: int) -> None:
    """A ring sends ``2 (M - 1) / M`` of a rank's rows and state; the copied tables ``T - 1`` times the padded gradients and row numbers."""
    for rank in sharded_ranks(world):
        floats = sum(math.ceil(t.rows / (world // 2)) * t.dim for t in TABLES) if world == 2 else None
        if floats is not None:
            assert rank["layouts"]["copies"]["sent"] == {"tables: average copies": STEPS * 4 * floats}
        mixed = rank["layouts"]["mixed"]["sent"]
        assert mixed["replicated tables: counts"] == STEPS * 8 * (world - 1)
        assert mixed["replicated tables: gradients"] == 4 * mixed["replicated tables: rows"]  # 8 floats a row, 8 bytes a row number
        assert mixed["replicated tables: rows"] == sum(8 * (world - 1) * longest(step, world) for step in range(STEPS))


def longest(step: int, world: int) -> int:
    """The most distinct cities that a rank looks up."""
    return max(len(set(pack(share(step, rank, world)).ids("city").tolist())) for rank in range(world))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("host rows", ("'table_row_wise' on cpu", "'city' with pooling sum", "gloo", "nearest that works is row_wise")),
        ("grid", ("'grid' on cpu", "'item' without pooling", "collection without pooling", "nearest that works is row_wise")),
        ("columns", ("'column_wise'", "one state a row", "nearest that works is row_wise")),
        ("planner", ("gem plan --write",)),
        ("replicas", ("cannot be divided by it", "Choose one of 1, 2")),
        ("copies in 16 bits", ("plain float32", "table_wise or row_wise")),
    ],
)
def test_case_F05_what_does_not_work_is_refused_by_name(sharded_ranks: Ranks, world: int, asked: str, words: tuple[str, ...]) -> None:
    for rank in sharded_ranks(world):
        for word in words:
            assert word in rank["layouts"]["refused"][asked]
