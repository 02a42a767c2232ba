"""The strategy ``experts`` on four gloo ranks gives what one process gives, under ``fsdp`` and ``ddp``. The ranks' work is in ranks_experts.py."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from ranks_experts import DIM, JOINS, TOKENS, Ensemble, Model, layouts, train
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from gem_core.spec import STAGES, ParallelContext, PluginError, RequestError, Topology, load_object
from gem_parallel.comm.collectives import Collectives, Traffic
from gem_parallel.dense.exchange import Exchange, Rows
from gem_parallel.dense.experts import ExpertParallel, empty_out, ensembles, placement_of
from gem_parallel.plugin import gem_parallel_strategies

SCRIPT = Path(__file__).with_name("ranks_experts.py")
WORLD = 4
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def ranks(on_ranks: Callable[..., list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(SCRIPT, tmp_path_factory.mktemp("experts"), WORLD)


def check(got: list[tuple[list[float], dict[str, torch.Tensor]]], join: str, *, micro: int = 1) -> None:
    """Losses of every step, and every weight on every rank that holds it; each must be held somewhere."""
    model = Model(join)
    losses, weights = train(model, model, 0, 1, micro=micro)
    assert torch.allclose(torch.tensor([rank[0] for rank in got]).sum(0), torch.tensor(losses), **TOLERANCE)
    assert {name for rank in got for name in rank[1]} == weights.keys()
    for _, held in got:
        for name, tensor in held.items():
            assert torch.allclose(tensor, weights[name], **TOLERANCE), f"{name}: off by {float((tensor - weights[name]).abs().max())}"


@pytest.mark.parametrize("layout", layouts(WORLD), ids=str)
@pytest.mark.parametrize("join", JOINS)
def test_losses_and_weights_equal_those_of_one_process(ranks: list[dict[str, Any]], join: str, layout: tuple[int, str, int]) -> None:
    """Five steps with unequal shares: all rows on one rank, few on most, none anywhere; evaluations of ranks without rows in between."""
    check([rank["runs"][join, layout] for rank in ranks], join)


@pytest.mark.parametrize("layout", layouts(WORLD), ids=str)
def test_micro_batches_are_one_step(ranks: list[dict[str, Any]], layout: tuple[int, str, int]) -> None:
    check([rank["micro"][layout] for rank in ranks], "sum", micro=3)


def test_the_comparison_sees_gradients_that_are_not_divided(ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault is on the other side: one process whose experts' gradients are twice what they should be."""

    class Doubled(Model):
        def __init__(self, join: str) -> None:
            super().__init__(join)
            for name, p in self.named_parameters():
                if "experts." in name:
                    p.register_hook(lambda grad: 2 * grad)

    monkeypatch.setitem(globals(), "Model", Doubled)
    with pytest.raises(AssertionError):
        check([rank["runs"]["sum", (2, "fsdp", 1)] for rank in ranks], "sum")


def test_ranks_hold_their_experts_and_nothing_of_the_others(ranks: list[dict[str, Any]]) -> None:
    """Degree 2 and two shards: elements that each rank holds of each parameter."""
    sizes = dict(Model("sum").named_parameters())
    for number, rank in enumerate(ranks):
        held = rank["held"]["sum"]
        assert held.keys() == sizes.keys()
        for name, count in held.items():
            if "experts." not in name:
                assert count <= -(-sizes[name].shape[0] // WORLD) * sizes[name][0].numel()
                continue
            owner = int(name.split("experts.")[1][0]) // 2
            rows = -(-sizes[name].shape[0] // 2)
            assert count <= rows * sizes[name][0].numel() if owner == number % 2 else count == 0
    for name, p in sizes.items():
        assert sum(rank["held"]["sum"][name] for rank in ranks) == p.numel(), f"{name} is held once"


@pytest.mark.parametrize("join", JOINS)
def test_bytes_sent_equal_the_formula(ranks: list[dict[str, Any]], join: str) -> None:
    """Step 2: two rows on each rank but the last, which has six. Groups are the ranks 0, 1 and 2, 3."""
    rows = [2, 2, 2, 6]
    for number, rank in enumerate(ranks):
        first = number // 2 * 2
        own, other = rows[number], rows[first + 1 - number % 2]
        longest, layers = max(own, other), 3
        gather = 4 * longest * TOKENS * DIM
        sum_of_all = 4 * longest * 6 * DIM
        given = 4 * other * 3 * DIM  # side by side each rank gives three of the six tokens
        taken = 4 * own * 3 * DIM
        out, back = (sum_of_all, sum_of_all) if join == "sum" else (given, taken)
        want = {"activations": gather, "input gradients": gather, "outputs": out, "output gradients": back}
        sent, _, entries = rank["traffic"][join]
        assert sent == {"experts: row counts": 8} | {f"experts: {name}": layers * n for name, n in want.items()}
        told = [entry for entry in entries if entry["name"] == "experts: activations"]
        assert [(entry["kind"], entry["sent"], entry["ranks"], entry["stream"]) for entry in told] == [("all_gather", gather, 2, "compute")] * layers
        assert {entry["group"] for entry in told} == {"mesh_dense_expert"}


def test_what_cannot_be_is_refused_with_the_nearest(ranks: list[dict[str, Any]]) -> None:
    told = ranks[0]["refused"]
    assert "4 ranks" in told["ranks"]
    assert "Choose one of 1, 2, 4" in told["ranks"]
    assert "a host has 2 ranks" in told["host"]
    assert "Choose one of 1, 2." in told["host"]
    assert "on mix: its 6 experts cannot be divided by it. Choose one of 1, 2, 3, 6." in " ".join(told["experts"].split())
    assert "the model has no ensemble" in told["no ensemble"]


def test_the_ensembles_are_told(ranks: list[dict[str, Any]]) -> None:
    facts = ranks[3]["facts"][2, "fsdp", 2]
    assert facts[0]["ensembles"] == [{"name": name, "experts": [2, 3]} for name in ("layers.0", "layers.1.1", "last")]
    assert facts[1]["blocks"] == ["layers.0.experts", "layers.0", "layers.1.1.experts", "layers.1", "last.experts"]


def test_a_degree_of_one_changes_nothing() -> None:
    model = Model("sum")
    context = ParallelContext(rank=0, world=1, device="cpu", topology=Topology(world=1, device="cpu"))
    assert ExpertParallel(degree=1).apply(model, context) is model
    assert placement_of(model).degree == 1
    assert all(child.exchange is None for _, child in ensembles(model))
    with pytest.raises(RequestError, match="degree"):
        ExpertParallel(degree=2).apply(model, context)


def test_ensembles_are_modules_that_can_share_out() -> None:
    assert [name for name, _ in ensembles(nn.Sequential(nn.Linear(2, 2), Ensemble("sum")))] == ["1"]


class Alone:
    """A group of one rank that talks, to test the exchange without processes."""

    size, rank = 1, 0

    def all_gather(self, name: str, values: torch.Tensor) -> Any:
        from gem_parallel.comm.collectives import Gathering

        return Gathering(values[None], None)

    def reduce_scatter(self, name: str, values: torch.Tensor) -> torch.Tensor:
        return values[0]

    def all_to_all(self, name: str, values: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        assert send == receive
        return values


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("widths", [None, [2, 1]])
def test_one_rank_exchanges_with_itself(rows: int, widths: list[int] | None) -> None:
    ranks: Any = Alone()
    exchange = Exchange(ranks, Rows(ranks), [])
    x = torch.randn(rows, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(exchange.give_back(exchange.join(x), widths), x)
    if rows:
        torch.autograd.gradcheck(lambda t: exchange.give_back(exchange.join(t), widths) ** 2, x)


def test_counts_are_asked_once_a_forward_pass() -> None:
    class Counting(Alone):
        asked = 0

        def all_gather(self, name: str, values: torch.Tensor) -> Any:
            self.asked += name == "experts: row counts"
            return super().all_gather(name, values)

    ranks: Any = Counting()
    rows = Rows(ranks)
    assert [rows.counts(3), rows.counts(3)] == [[3], [3]]
    with pytest.raises(PluginError, match="called with 4 rows, after another of the same forward pass with 3"):
        rows.counts(4)
    rows.forget()
    assert rows.counts(4) == [4]
    assert ranks.asked == 2


def test_the_declaration_and_its_options() -> None:
    (declared,) = [strategy for strategy in gem_parallel_strategies() if strategy.name == "experts"]
    assert (declared.stage, declared.on_meta) == ("experts", True)
    assert declared.stage in STAGES
    assert load_object(declared.load) is ExpertParallel
    assert declared.options is not None
    options = load_object(declared.options)
    assert options(degree=2).model_dump() == {"degree": 2}
    for wrong in ({}, {"degree": 0}, {"degree": True}, {"degree": 2, "router": "top"}):
        with pytest.raises(ValidationError):
            options(**wrong)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process as the first of two whose collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_gradients_of_absent_experts_lie_where_this_rank_computes() -> None:
    """As on a GPU, for which the meta device stands: norms and clipping take the local parts of all gradients together."""
    absent = nn.Linear(3, 2)
    empty_out(absent, 1, "cpu")
    alone = Collectives(None, Traffic())
    exchange = Exchange(alone, Rows(alone), [absent])
    z = torch.ones(2, TOKENS, DIM, device="meta", requires_grad=True)
    exchange.give_back(exchange.join(z), None).sum().backward()
    for parameter in absent.parameters():
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        local = parameter.grad.to_local()
        assert (local.device.type, local.numel(), local.dtype) == ("meta", 0, torch.float32)
