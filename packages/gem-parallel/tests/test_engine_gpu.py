"""The ``torchrec`` engine on a GPU, where fbgemm also has Adam."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gem_core.batch import KeyedJagged
from gem_core.spec import TableSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPTIMIZERS = ("rowwise_adagrad", "sgd", "adam")
Build = Callable[..., Any]
Keyed = Callable[[dict[str, list[list[int]]]], KeyedJagged]


def spec(name: str, *features: str, dim: int = 8, pooling: str = "none") -> TableSpec:
    return TableSpec(name=name, rows=10, dim=dim, features=features, pooling=pooling, init_scale=1.0)


TABLES = (
    spec("ids", "a", "b"),
    spec("narrow.ids", "c", dim=4),
    spec("sums", "d", pooling="sum"),
    spec("narrow.sums", "e", dim=4, pooling="sum"),
    spec("means", "f", dim=12, pooling="mean"),
)


def batches(keyed: Keyed, count: int) -> list[KeyedJagged]:
    g = torch.Generator().manual_seed(0)

    def lists() -> list[list[int]]:
        return [torch.randint(0, 10, (int(n),), generator=g).tolist() for n in torch.randint(0, 5, (6,), generator=g)]

    return [keyed({key: lists() for key in "acbdef"}) for _ in range(count)]


def train(engine: Any, data: list[KeyedJagged], device: str) -> None:
    for step, batch in enumerate(data):
        engine.set_lr(0.1 / (step + 1))
        engine.zero_grad()
        out = engine(batch.to(device))
        sum((v * torch.arange(1.0, v.shape[1] + 1, device=device) + v**2).sum() for v in out.values()).backward()
        engine.step()
        with torch.no_grad():  # an evaluation between steps does not count as an update
            engine(batch.to(device))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("name", "device"), [("torchrec", "cuda"), ("torch", "cuda")])
def test_case_E11_five_steps_equal_the_torch_engine_on_the_cpu(engine: Build, keyed: Keyed, optimizer: str, name: str, device: str) -> None:
    """Widths 12, 8 and 4 beside each other, every pooling, evaluations in between."""
    ours, theirs = engine(name, TABLES, optimizer, device=device), engine("torch", TABLES, optimizer)
    data = batches(keyed, 5)
    train(ours, data, device)
    train(theirs, data, "cpu")
    got = ours.export_tables()
    for table, tensors in theirs.export_tables().items():
        for tensor_name, tensor in tensors.items():
            torch.testing.assert_close(got[table][tensor_name], tensor, rtol=1e-4, atol=2e-5, msg=lambda text: f"{optimizer}: {text}")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_case_E02_a_cpu_checkpoint_continues_on_the_gpu(engine: Build, keyed: Keyed, optimizer: str) -> None:
    cpu, cuda = engine("torch", TABLES, optimizer), engine("torchrec", TABLES, optimizer, device="cuda", seed=5)
    data = batches(keyed, 4)
    train(cpu, data[:2], "cpu")
    saved = cpu.export_tables()
    cuda.import_tables(saved)
    for table, tensors in cuda.export_tables().items():
        assert all(torch.equal(tensor, saved[table][name]) for name, tensor in tensors.items())
    train(cpu, data[2:], "cpu")
    train(cuda, data[2:], "cuda")
    for table, tensors in cpu.export_tables().items():
        torch.testing.assert_close(cuda.export_tables()[table]["weight"], tensors["weight"], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["torchrec", "torch"])
def test_case_B02_no_rows_and_no_ids(engine: Build, keyed: Keyed, name: str) -> None:
    tables = engine(name, TABLES, device="cuda")
    before = tables.export_tables()
    for batch in (keyed({key: [] for key in "abcdef"}), keyed({key: [[], []] for key in "abcdef"})):
        out = tables(batch.to("cuda"))
        assert {key: v.shape[0] for key, v in out.items()} == {key: batch.rows if key in "def" else 0 for key in "abcdef"}
        sum(v.sum() for v in out.values()).backward()
        tables.step()
    for table, tensors in tables.export_tables().items():
        assert torch.equal(tensors["weight"], before[table]["weight"])


def test_outputs_are_float32_on_the_gpu(engine: Build, keyed: Keyed) -> None:
    out = engine("torchrec", TABLES, device="cuda")(batches(keyed, 1)[0].to("cuda"))
    assert {(v.device.type, v.dtype) for v in out.values()} == {("cuda", torch.float32)}
