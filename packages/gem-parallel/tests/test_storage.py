"""16-bit rows, memory of rows, and first weights drawn into slices, in one process."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.batch import KeyedJagged
from gem_core.ops.first_weights import draw_rows
from gem_core.spec import MachineError, RequestError, SparseOptimizer, TableSpec, table_seed
from gem_parallel.sparse.engine import TorchRecEmbeddings
from gem_parallel.sparse.sharded import _keyed_jagged_tensor
from gem_parallel.sparse.shards import Slice, draw

Keyed = Callable[[dict[str, list[list[int]]]], KeyedJagged]


def spec(name: str = "t", *, rows: int = 50, dim: int = 8, pooling: str = "none", scale: float = 1.0) -> TableSpec:
    return TableSpec(name=name, rows=rows, dim=dim, features=(f"{name}.f",), pooling=pooling, init_scale=scale)


def engine(*tables: TableSpec, optimizer: str = "sgd", lr: float = 0.1, **options: Any) -> TorchRecEmbeddings:
    return TorchRecEmbeddings(tables, SparseOptimizer(name=optimizer, lr=lr), device="cpu", seed=1, **options)


def column(ids: torch.Tensor, offsets: list[int], name: str = "t.f") -> KeyedJagged:
    longest = max((b - a for a, b in pairwise(offsets)), default=0)
    return KeyedJagged((name,), ids, torch.tensor(offsets), len(offsets) - 1, (0, ids.numel()), (longest,))


# ---- 16-bit rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
def test_case_B17_G01_vectors_of_fp16_rows_are_float32_even_without_rows(pooling: str) -> None:
    tables = engine(spec(pooling=pooling), dtype="fp16")
    for batch in (column(torch.tensor([1, 2, 2]), [0, 1, 3]), column(torch.empty(0, dtype=torch.int64), [0])):
        assert tables(batch)["t.f"].dtype == torch.float32
    assert {piece.tensors["weight"].dtype for piece in tables._slices} == {torch.float16}


def test_case_G02_C08_a_bag_of_ten_thousand_fp16_rows_sums_in_float32() -> None:
    """Ones and a thousandth: a sum in fp16 would stop at 2048."""
    tables = engine(spec(rows=10_000, pooling="sum"), dtype="fp16")
    weight = torch.ones(10_000, 8)
    weight[::2] = 0.001
    tables.import_tables({"t": {"weight": weight}})
    out = tables(column(torch.arange(10_000, dtype=torch.int32), [0, 10_000]))["t.f"]
    want = tables.export_tables()["t"]["weight"].double().sum(0)
    torch.testing.assert_close(out[0].double(), want, rtol=1e-4, atol=0)  # ten thousand float32 additions
    assert want[0] > 5000


def test_first_weights_of_fp16_rows_are_the_rounded_ones() -> None:
    wide, narrow = engine(spec()).export_tables()["t"]["weight"], engine(spec(), dtype="fp16").export_tables()["t"]["weight"]
    assert narrow.dtype == torch.float32
    assert torch.equal(narrow, wide.half().float())
    assert not torch.equal(narrow, wide)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_an_fp16_update_is_a_float32_update_that_is_rounded(optimizer: str) -> None:
    tables = engine(spec(), optimizer=optimizer, dtype="fp16")
    before = tables.export_tables()["t"]
    grad = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    tables(column(torch.tensor([4, 4, 9]), [0, 3]))["t.f"].backward(grad)
    after = tables.export_tables()["t"]
    total = torch.zeros(50, 8).index_add(0, torch.tensor([4, 4, 9]), grad)
    if optimizer == "sgd":
        want = before["weight"] - 0.1 * total
    else:
        state = before["state"] + total.square().mean(1)
        torch.testing.assert_close(after["state"], state)
        want = before["weight"] - 0.1 * total / (state.sqrt() + 1e-8)[:, None]
    torch.testing.assert_close(after["weight"], want, rtol=2**-10, atol=2**-14)  # one unit in the last place, whichever way it is rounded
    untouched = [row for row in range(50) if row not in (4, 9)]
    assert torch.equal(after["weight"][untouched], before["weight"][untouched])


def test_on_the_cpu_updates_below_half_a_unit_are_lost() -> None:
    """fbgemm rounds stochastically on CUDA only; this holds what docs/parallelism.md warns of."""
    tables = engine(spec(rows=1000), lr=1.0, dtype="fp16")
    tables.import_tables({"t": {"weight": torch.ones(1000, 8)}})
    for _ in range(3):
        (tables(column(torch.arange(1000), [0, 1000]))["t.f"] * -1e-4).sum().backward()
    assert torch.equal(tables.export_tables()["t"]["weight"], torch.ones(1000, 8))


def test_fp16_tables_take_half_the_memory() -> None:
    held = {dtype: sum(p.tensors["weight"].nbytes for p in engine(spec(rows=999), dtype=dtype)._slices) for dtype in ("fp32", "fp16")}
    assert held["fp32"] == 2 * held["fp16"] == 999 * 8 * 4


# ---- what the CPU does not have --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bf16"}, "'bf16'.*look up no bf16 rows.*fp16"),
        ({"memory": "uvm"}, "'uvm' on the CPU.*no GPU"),
        ({"memory": "uvm_cached"}, "'uvm_cached' on the CPU"),
        ({"tables": ({"pattern": "t", "memory": "uvm"},)}, "'uvm' on the CPU"),
    ],
)
def test_case_G01_what_fbgemm_lacks_on_the_cpu_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(MachineError, match=words):
        engine(spec(), **options)


def test_a_pattern_without_a_table_is_refused_in_one_process_too() -> None:
    with pytest.raises(RequestError, match="matches none of t"):
        engine(spec(), tables=({"pattern": "item*", "sharding": "row_wise"},))


def test_case_F15_many_small_tables_take_what_they_need() -> None:
    tables = engine(*(spec(f"t{i}", rows=4) for i in range(64)))
    assert sum(piece.tensors["weight"].nbytes for piece in tables._slices) == 64 * 4 * 8 * 4


def test_case_C04_offsets_and_lengths_reach_torchrec_as_int64() -> None:
    columns = column(torch.arange(5), [0, 2, 5])
    sent = _keyed_jagged_tensor(columns)
    assert {sent.lengths().dtype, sent.offsets().dtype, sent.values().dtype} == {torch.int64}
    assert _keyed_jagged_tensor(column(torch.empty(0, dtype=torch.int64), [0])).lengths().dtype == torch.int64


# ---- first weights --------------------------------------------------------------------------------------------------------------------


@settings(max_examples=40, derandomize=True, deadline=None)
@given(rows=st.integers(1, 60), dim=st.integers(1, 9), cuts=st.lists(st.integers(0, 60), max_size=3), left=st.integers(0, 8))
def test_slices_get_the_bits_of_the_whole(rows: int, dim: int, cuts: list[int], left: int) -> None:
    table = TableSpec(name="t", rows=rows, dim=dim, features=("f",), init_scale=0.3)
    whole = torch.empty(rows, dim)
    draw_rows(whole, seed=table_seed(5, "t"), scale=0.3)
    edges = sorted({0, rows, *(min(cut, rows) for cut in cuts)})
    left = min(left, dim - 1)
    pieces = [Slice(table="t", start=a, tensors={"weight": torch.full((b - a, dim), torch.nan)}) for a, b in pairwise(edges)]
    pieces.append(Slice(table="t", start=0, column=left, tensors={"weight": torch.full((rows, dim - left), torch.nan)}))
    draw(pieces, [spec(name="other"), table], 5)
    for piece in pieces:
        assert torch.equal(piece.tensors["weight"], whole[piece.region(piece.tensors["weight"])])
