"""The ``torchrec`` engine on a GPU, where fbgemm also has Adam."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gem_core.batch import KeyedJagged
from gem_core.spec import SparseOptimizer, TableSpec
from gem_parallel.sparse.copies import copies_of
from gem_parallel.sparse.lookups import PIECE, short_bags
from gem_parallel.sparse.placement import Cluster, Place
from gem_parallel.sparse.sharded import Storage, sharded_groups
from gem_parallel.sparse.shards import draw

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


def histories(keyed: Keyed) -> KeyedJagged:
    """Rows of single ids, a long history beside short ones, ids that repeat, and a row without any."""
    lengths = (0, 1, 33, 3_000, 70)
    columns = {key: [[(7 * i + row) % 10 for i in range(n)] for row, n in enumerate(lengths)] for key in "acdef"}
    return keyed(columns | {"b": [[row] for row in range(len(lengths))]}).to("cuda")


def test_case_B01_long_histories_are_cut_and_keep_every_bit(engine: Build, keyed: Keyed) -> None:
    """Vectors are the same bits. Gradients of an id with thousands of look-ups are summed by several blocks of threads, in any order."""
    cut, whole = engine("torchrec", TABLES, device="cuda"), engine("torchrec", TABLES, device="cuda")
    assert [group._piece for group in cut._groups] == [None if group._pooled else PIECE for group in cut._groups]
    for group in whole._groups:
        group._piece = None
    batch = histories(keyed)
    ours, theirs = cut(batch), whole(batch)
    assert all(torch.equal(ours[key], vectors) for key, vectors in theirs.items())
    for vectors in (ours, theirs):
        sum((v * torch.linspace(0.001, 0.002, v.numel(), device="cuda").view_as(v)).sum() for v in vectors.values()).backward()
    expected = whole.export_tables()
    for table, tensors in cut.export_tables().items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, expected[table][name], rtol=1e-5, atol=1e-6)


def test_cutting_waits_for_nothing(keyed: Keyed) -> None:
    batch = histories(keyed)
    torch.cuda.set_sync_debug_mode("error")
    try:
        offsets = short_bags(batch, PIECE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert offsets.numel() == 6 * 97 + 1  # 3,104 ids in the longest column


def test_torchrecs_collection_cuts_bags_and_keeps_every_bit(keyed: Keyed, tmp_path: Path) -> None:
    """One rank over NCCL; the hook before fbgemm's module is taken away for the comparison."""
    pytest.importorskip("torchrec")
    batch, cuda = histories(keyed), torch.device("cuda", 0)
    places = {table.name: Place(sharding="table_wise", ranks=(0,)) for table in TABLES}
    copies = copies_of(Cluster(world=1, local=1, device="cuda"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for group in sharded_groups(TABLES, places, SparseOptimizer(), cuda, Storage(), copies):
            draw(group.slices, TABLES, 1)
            hooks = [len(tbe._forward_pre_hooks) for tbe in group.tbes]
            assert set(hooks) == {0 if group.keys == ("d", "e", "f") else 1}
            found = group.finish(group.look_up(group.start(batch)))
            for tbe in group.tbes:
                tbe._forward_pre_hooks.clear()
            whole = group.finish(group.look_up(group.start(batch)))
            assert all(torch.equal(found[key], whole[key]) for key in group.keys)
    finally:
        dist.destroy_process_group()
