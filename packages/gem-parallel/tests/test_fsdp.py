"""The ``fsdp`` strategy on four gloo ranks gives what one process gives. The ranks' work is in ranks_fsdp.py."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from ranks_fsdp import STEPS, Blocks, Halved, first, halved, train
from torch import Tensor, nn

from gem_core.spec import ParallelContext, PluginError, RequestError, Topology, load_object
from gem_parallel.comm.lowered import Lowered, LowPart
from gem_parallel.dense.fsdp import FullyShard, blocks
from gem_parallel.plugin import gem_parallel_strategies

SCRIPT = Path(__file__).with_name("ranks_fsdp.py")
WORLD = 4


def context(world: int) -> ParallelContext:
    return ParallelContext(rank=0, world=world, device="cpu", topology=Topology(world=world, device="cpu"))


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(SCRIPT, tmp_path_factory.mktemp("fsdp"), WORLD)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_weights_equal_those_of_one_process(ranks: list[dict[str, Any]], replicas: int, reshard: bool) -> None:
    """Four steps; in one of them three ranks have no rows."""
    want = train(Blocks(), 0, 1)
    for rank in ranks:
        got = rank["weights"][replicas, reshard]
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert torch.allclose(got[name], tensor, rtol=1e-5, atol=1e-6), name


def test_the_comparison_sees_gradients_that_are_not_averaged(ranks: list[dict[str, Any]]) -> None:
    """The first rank's rows alone."""
    alone = Blocks()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05)
    alone(torch.randn(3, 5, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(ranks[0]["weights"][1, True]["head.weight"], alone.head.weight, rtol=1e-5, atol=1e-6)


def test_ranks_hold_their_share(ranks: list[dict[str, Any]]) -> None:
    size = sum(p.numel() for p in Blocks().parameters())
    for replicas in (1, 2, 4):
        held = [rank["held"][replicas] for rank in ranks]
        assert sum(held) == size * replicas
        assert max(held) < 1.6 * size * replicas / WORLD  # rows of small matrices do not divide evenly


def test_the_blocks_are_told(ranks: list[dict[str, Any]]) -> None:
    facts = ranks[0]["facts"][2]
    assert {key: facts[key] for key in ("strategy", "replicas", "reshard", "world")} == {
        "strategy": "fsdp",
        "replicas": 2,
        "reshard": False,
        "world": WORLD,
    }
    assert facts["blocks"] == ["layers.0", "layers.1"]


def shard_bytes(part: str) -> int:
    """Bytes of a rank's shard of the parameters whose names begin so, in equal parts of four."""
    shapes = {name: p.shape for name, p in Blocks().named_parameters()}
    return 4 * sum(-(-shape[0] // WORLD) * shape[1:].numel() for name, shape in shapes.items() if name.startswith(part))


@pytest.mark.parametrize("name", ["no prefetch", "two ahead", "one kept"])
def test_order_and_what_is_kept_change_no_result(ranks: list[dict[str, Any]], name: str) -> None:
    want = train(Blocks(), 0, 1)
    for rank in ranks:
        for parameter, tensor in want.items():
            assert torch.allclose(rank["options"][name][parameter], tensor, rtol=1e-5, atol=1e-6), parameter


def test_a_payload_of_16_bits_rounds_weights_once(ranks: list[dict[str, Any]]) -> None:
    """As if the weights themselves were rounded; gradients are not."""
    rounded = Blocks()
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.bfloat16())
    loss, gradients = first(rounded, 0, 1)
    for rank in ranks:
        got, got_gradients = rank["first"]["bf16 payload"]
        assert torch.allclose(got, loss, rtol=1e-6)
        assert not torch.equal(got, rank["first"]["no prefetch"][0])
        for name, tensor in gradients.items():
            assert torch.allclose(got_gradients[name], tensor, rtol=1e-5, atol=1e-6), name


def test_a_payload_of_8_bits_changes_weights_by_at_most_a_sixteenth(ranks: list[dict[str, Any]]) -> None:
    loss, _ = first(Blocks(), 0, 1)
    for rank in ranks:
        got, _ = rank["first"]["fp8 payload"]
        assert torch.allclose(got, loss, rtol=0.3)
        assert not torch.allclose(got, loss, rtol=1e-4)
        assert torch.equal(got, ranks[0]["first"]["fp8 payload"][0]), "all ranks compute with the same weights, their own part included"


def test_sums_of_16_bits_round_gradients(ranks: list[dict[str, Any]]) -> None:
    """Four summands, each rounded, and their sums: a few units of 2^-9, and never none."""
    loss, gradients = first(Blocks(), 0, 1)
    for rank in ranks:
        got, got_gradients = rank["first"]["bf16 sums"]
        assert torch.allclose(got, loss, rtol=1e-6)
        for name, tensor in gradients.items():
            largest = float(tensor.abs().max())
            assert 0 < float((got_gradients[name] - tensor).abs().max()) < 2**-6 * largest, name


def test_bytes_of_weights_and_gradients_equal_the_formula(ranks: list[dict[str, Any]]) -> None:
    """Four steps; blocks are gathered twice, what is in no block or kept once; three of four shards are sent on."""
    every, blocks_of, kept = (shard_bytes(part) for part in ("", "layers.", "layers.1"))
    for rank in ranks:
        sent = rank["sent"]
        assert sent["no prefetch"] == {"dense: weights": STEPS * 3 * (every + blocks_of), "dense: gradients": STEPS * 3 * every}
        assert sent["one kept"]["dense: weights"] == STEPS * 3 * (every + blocks_of - kept)
        assert sent["bf16 payload"] == {"dense: weights": STEPS * 3 * (every + blocks_of) // 2, "dense: gradients": STEPS * 3 * every}
        blocks = {part: -(-shard_bytes(part) // 4 // 128) for part in ("layers.0", "layers.1")}
        rest = -(-(every - blocks_of) // 4 // 128)
        assert sent["fp8 payload"]["dense: weights"] == STEPS * 3 * 129 * (2 * sum(blocks.values()) + rest)
        assert 2 * sent["bf16 sums"]["dense: gradients"] == sent["two ahead"]["dense: gradients"]
        assert 2 * sent["bf16 sums"]["dense: gradients between replicas"] == sent["two ahead"]["dense: gradients between replicas"]


def test_weights_that_modules_read_low_travel_low(ranks: list[dict[str, Any]]) -> None:
    """As if these two weights themselves were float16; a rank without rows, and a weight that modules share, which stays as it is."""
    module, _ = halved()
    weights = [module.layers[0][0].weight, module.layers[1][2].weight]
    largest = [float(weight.detach().abs().max()) for weight in weights]
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.half())
    loss, gradients = first(module, 0, 1)
    for rank in ranks:
        got, got_gradients = rank["low"]["first"]
        assert torch.allclose(got, loss, rtol=1e-6)
        for name, tensor in gradients.items():
            assert torch.allclose(got_gradients[name], tensor, rtol=1e-5, atol=1e-6), name
        assert [(rows, agreed) for rows, agreed, _ in rank["low"]["told"]] == [(3, largest[0]), (2, largest[1]), (0, 0.0)]
        assert [frees > 0 for _, _, frees in rank["low"]["told"]] == [True, True, False]
        assert rank["low"]["facts"] == [{"block": "layers.0", "weights": 1, "values": 63}, {"block": "layers.1", "weights": 1, "values": 63}]


def test_bytes_of_weights_that_travel_low_equal_the_formula(ranks: list[dict[str, Any]]) -> None:
    """Half of these two weights' bytes; and for each, twice, one float that ranks agree on, in a ring of parts of a byte."""
    module, _ = halved()
    blocks_of = [p for name, p in module.named_parameters() if name.startswith("layers.")]
    rest = [p for name, p in module.named_parameters() if not name.startswith("layers.")]
    padded = [sum(-(-p.shape[0] // WORLD) * p.shape[1:].numel() for p in part) for part in (blocks_of, rest)]
    saved = 2 * (3 * 7 + 2 * 9)
    sent = ranks[0]["low"]["sent"]
    assert sent["dense: weights"] == (WORLD - 1) * (2 * (4 * padded[0] - saved) + 4 * padded[1])
    assert sent["dense: scales of weights"] == 2 * 2 * 2 * (WORLD - 1)


def test_torch_that_lays_a_unit_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another size, or a weight at another place; NaNs are compared as well."""
    module, low = nn.Linear(2, 2), Halved()
    low.split(2, 0, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.0, torch.nan], [3.0, 4.0]]))
    monkeypatch.setattr("gem_parallel.comm.lowered._local", lambda low: low.parameter.detach())
    part = LowPart(module=module, name="weight", low=low, begin=3, rows=2, columns=2)

    def pack(own: Tensor) -> Tensor:
        return Lowered([part], 8, None, [], lambda largest: largest).pack(own)

    with pytest.raises(PluginError, match=r"has 9 values of torch.float32, where 8"):
        pack(torch.ones(9))
    own = torch.arange(8.0)
    own[3:7] = module.weight.detach().flatten()
    assert pack(own).nbytes == 2 * 4 + 4 * 4
    with pytest.raises(PluginError, match="lies in another place"):
        pack(own.roll(1))


def test_collectives_and_waits_are_recorded(ranks: list[dict[str, Any]]) -> None:
    entries = ranks[1]["recorded"]
    gathers = [entry["name"] for entry in entries if entry["kind"] == "all_gather"]
    units = ["the rest", "layers.0", "layers.1"]
    assert sorted(gathers) == sorted(f"dense: weights of {unit}" for unit in [*units, "layers.0", "layers.1"])
    assert {entry["kind"] for entry in entries} == {"all_gather", "reduce_scatter", "all_reduce", "wait"}
    assert all(entry["seconds"] >= entry["exposed"] >= 0 for entry in entries)
    assert all(entry["seconds"] > 0 for entry in entries if entry["kind"] in ("all_gather", "wait"))
    assert all((entry["ranks"], entry["group"]) == (2, "mesh_dense_shard") for entry in entries if entry["kind"] == "reduce_scatter")
    waits = [entry["name"] for entry in entries if entry["kind"] == "wait"]
    for unit in units:
        assert f"dense: wait for weights of {unit}" in waits
        assert f"dense: wait for weights of {unit}, backward" in waits
    assert waits[-1] == "dense: wait for gradients"
    assert waits.count("dense: wait for gradients") == 1


def test_a_wait_lasts_as_long_as_what_it_waits_for(ranks: list[dict[str, Any]]) -> None:
    """On the CPU the first unit's gather runs inside the wait for it."""
    entries = {entry["name"]: entry for entry in reversed(ranks[0]["recorded"])}
    assert entries["dense: wait for weights of the rest"]["exposed"] >= entries["dense: weights of the rest"]["seconds"]


def test_blocks_are_entries_of_lists_under_the_root() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.ModuleList([nn.Linear(2, 2), nn.Identity()])
            self.deep = nn.Sequential(nn.Linear(2, 2))

    assert [name for name, _ in blocks(Nested())] == ["first.0"]


def test_one_process_is_left_alone() -> None:
    module = Blocks()
    assert FullyShard().apply(module, context(1)) is module
    assert type(module) is Blocks


def test_what_cannot_be_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert "Choose one of 1, 2, 4" in ranks[0]["refused"]
    assert "keep = 'layer': no block has such a name; there are layers.0, layers.1." in ranks[0]["refused pattern"]
    assert "'copy_engine'" in ranks[0]["refused backend"]
    assert "it needs CUDA, this is cpu" in ranks[0]["refused backend"]
    with pytest.raises(RequestError, match="no process group"):
        FullyShard().apply(Blocks(), context(2))
    with pytest.raises(RequestError, match="replicas = 2"):
        FullyShard(replicas=2).apply(Blocks(), context(1))


def test_case_F12_a_bool_is_no_number_and_unknown_words_are_refused() -> None:
    (declared,) = [strategy for strategy in gem_parallel_strategies() if strategy.name == "fsdp"]
    assert (declared.stage, declared.on_meta) == ("dense", True)
    assert declared.options is not None
    options = load_object(declared.options)
    built = load_object(declared.load)(**options(replicas=1, reshard=False).model_dump())
    assert built.describe()["reshard"] is False
    for wrong in ({"replicas": 0}, {"replicas": True}, {"shards": 2}, {"prefetch": -1}, {"payload": "fp4"}, {"comm": "nccl"}, {"reserved_sms": True}):
        with pytest.raises(ValidationError):
            options(**wrong)
