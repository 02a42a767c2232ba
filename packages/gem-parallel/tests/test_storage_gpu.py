"""Formats, memory and layouts that only CUDA has. The ranks' work is in ranks_cuda.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_cuda import LAYOUTS

from gem_core.batch import KeyedJagged
from gem_core.spec import MachineError, SparseOptimizer, TableSpec
from gem_parallel.sparse.engine import TorchRecEmbeddings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def spec(rows: int = 1000, pooling: str = "none") -> TableSpec:
    return TableSpec(name="t", rows=rows, dim=8, features=("f",), pooling=pooling, init_scale=1.0)


def engine(table: TableSpec, optimizer: str = "rowwise_adagrad", lr: float = 0.1, device: str = "cuda", **options: Any) -> TorchRecEmbeddings:
    return TorchRecEmbeddings((table,), SparseOptimizer(name=optimizer, lr=lr), device=device, seed=1, **options)


def batch(rows: int, step: int = 0, device: str = "cuda") -> KeyedJagged:
    ids = torch.randint(0, rows, (64,), generator=torch.Generator().manual_seed(step))
    return KeyedJagged(("f",), ids, torch.tensor([0, 10, 10, 64]), 3, (0, 64), (54,)).to(device)


def train(tables: TorchRecEmbeddings, rows: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    for step in range(4):
        out = tables(batch(rows, step, device))["f"]
        (out * torch.arange(1.0, 9.0, device=device) + out**2).sum().backward()
        tables.step()
    return tables.export_tables()["t"]


@pytest.mark.parametrize("memory", ["uvm", "uvm_cached"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "adam"])
def test_rows_in_host_memory_give_the_numbers_of_the_device(memory: str, optimizer: str) -> None:
    want = train(engine(spec(), optimizer), 1000)
    got = engine(spec(), optimizer, memory=memory)
    for name, tensor in train(got, 1000).items():
        torch.testing.assert_close(tensor, want[name], rtol=1e-5, atol=1e-6)
    got.import_tables({"t": want})
    with torch.no_grad():  # a cache must not answer with the rows of before
        assert torch.equal(got(batch(1000))["f"].cpu(), want["weight"][batch(1000, device="cpu").values])


@pytest.mark.parametrize("pooling", ["none", "sum", "mean"])
def test_case_G01_16_bit_rows_give_float32(pooling: str) -> None:
    tables = engine(spec(pooling=pooling), dtype="fp16")
    assert tables(batch(1000))["f"].dtype == torch.float32
    want = train(engine(spec(pooling=pooling), device="cpu"), 1000, "cpu")
    torch.testing.assert_close(train(tables, 1000)["weight"], want["weight"], rtol=40 * 2**-10, atol=40 * 2**-10)


def test_case_G01_bf16_rows_are_refused_as_on_the_cpu() -> None:
    with pytest.raises(MachineError, match="look up no bf16 rows"):
        engine(spec(), dtype="bf16")


def test_small_updates_of_16_bit_rows_count_on_average() -> None:
    """Rounding is stochastic: 3 updates of 1e-4 are far below half a unit, and are kept in the mean."""
    tables = engine(spec(rows=50_000), "sgd", 1.0, dtype="fp16")
    tables.import_tables({"t": {"weight": torch.ones(50_000, 8)}})
    every = KeyedJagged(("f",), torch.arange(50_000), torch.tensor([0, 50_000]), 1, (0, 50_000), (50_000,)).to("cuda")
    for _ in range(3):
        (tables(every)["f"] * -1e-4).sum().backward()
    assert float(tables.export_tables()["t"]["weight"].double().mean()) == pytest.approx(1 + 3e-4, abs=5e-5)


def test_case_G02_a_bag_of_ten_thousand_fp16_rows_sums_in_float32() -> None:
    tables = engine(spec(10_000, "sum"), dtype="fp16")
    ids = torch.arange(10_000, device="cuda")
    out = tables(KeyedJagged(("f",), ids, torch.tensor([0, 10_000], device="cuda"), 1, (0, 10_000), (10_000,)))["f"]
    want = tables.export_tables()["t"]["weight"].double().sum(0)
    torch.testing.assert_close(out[0].double().cpu(), want, rtol=1e-4, atol=1e-3)


@pytest.fixture(scope="module")
def over_nccl(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(Path(__file__).with_name("ranks_cuda.py"), tmp_path_factory.mktemp("nccl"), 2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_on_two_gpus_equals_one_process(over_nccl: list[dict[str, Any]], layout: str) -> None:
    """Ids are sent ahead on a stream of their own, and travel over NCCL; against the torch engine on the CPU."""
    for rank in over_nccl:
        assert not isinstance(rank[layout], str), rank[layout]
        got, want, bound = rank[layout]
        for table, tensors in want.items():
            for name, tensor in tensors.items():
                torch.testing.assert_close(got[table][name], tensor, rtol=bound, atol=bound, msg=lambda text, at=(layout, table): f"{at}: {text}")
