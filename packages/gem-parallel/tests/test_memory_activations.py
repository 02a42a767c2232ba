"""Strategy ``activations``: the same bits by every policy but ``fp8``, plans within their budget, and predicted bytes against those alive."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from gem_core.spec import ParallelContext, ReportsMemory, RequestError, Topology, load_object
from gem_parallel.memory.activations import Activations
from gem_parallel.memory.options import POLICIES
from gem_parallel.plugin import gem_parallel_strategies

ROWS, DIM = 96, 32
CONTEXT = ParallelContext(rank=0, world=1, device="cpu", topology=Topology(world=1, device="cpu"))


class Layer(nn.Module):
    """Attention-like: views of one tensor, an index, a softmax, dropout, a running buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.drop = nn.Dropout(0.3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, order = state
        self.steps += 1
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, DIM)).unbind(1)
        mixed = self.drop((q @ k.t()).softmax(-1)) @ v
        return x + self.out(torch.nn.functional.gelu(mixed[order])), order


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, DIM), nn.Linear(DIM, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        state = (self.stem(rows), torch.arange(rows.shape[0]).flip(0))
        for layer in self.layers:
            state = layer(state)
        return self.head(state[0])[:, 0]  # type: ignore[no-any-return]


def batch(step: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def train(steps: int = 3, **options: Any) -> tuple[list[float], dict[str, Tensor], Activations | None]:
    """Losses, and weights and buffers at the end; without options the model as it is."""
    torch.manual_seed(1)
    model = Model()
    strategy = Activations(**options) if options else None
    if strategy is not None:
        assert strategy.apply(model, CONTEXT) is model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model.state_dict(), strategy


def rules(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"pattern": pattern, "policy": policy} for pattern, policy in pairs]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    losses, weights, _ = train()
    return losses, weights


@pytest.mark.parametrize(
    "policies",
    [rules(("*", "keep")), rules(("*", "recompute")), rules(("*", "offload")), rules(("layers.0", "recompute"), ("layers.[12]", "offload"))],
    ids=lambda policies: "+".join(rule["policy"] for rule in policies),
)
def test_policies_give_the_bits_of_the_plain_model(plain: Any, policies: list[dict[str, str]]) -> None:
    """Dropout draws the same when it is computed again. Only the buffer that counts forward passes tells of a second one."""
    losses, weights, _ = train(policies=policies)
    assert losses == plain[0]
    for name, weight in plain[1].items():
        if not name.endswith("steps"):
            assert torch.equal(weights[name], weight), name


def test_a_planned_run_has_the_bits_of_the_plain_model(plain: Any) -> None:
    """The passes that measure leave random state and buffers as they were."""
    losses, weights, strategy = train(budget=1.0)
    assert strategy is not None
    assert set(strategy.describe()["policies"].values()) == {"keep"}
    assert losses == plain[0]
    assert all(torch.equal(weights[name], weight) for name, weight in plain[1].items())


FINE = ("layers.*.qkv", "layers.*.norm", "layers.3", "head")


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_blocks_that_are_named_give_the_bits_of_the_plain_model(plain: Any, policy: str) -> None:
    losses, weights, strategy = train(blocks=FINE, policies=rules(("*", policy)))
    assert strategy is not None
    small = [f"layers.{i}.{part}" for i in range(3) for part in ("qkv", "norm")]
    assert strategy.describe()["policies"] == dict.fromkeys([*small, "layers.3", "head"], policy), "of nested ones the outermost"
    assert losses == plain[0]
    assert all(torch.equal(weights[name], weight) for name, weight in plain[1].items() if not name.endswith("steps"))


def test_a_plan_of_named_blocks_measures_each() -> None:
    told = report(blocks=("layers.*.qkv", "layers.*.out"), budget=1.0)
    assert [block.name for block in told.blocks] == [f"layers.{i}.{part}" for i in range(4) for part in ("qkv", "out")]
    for block in told.blocks:
        assert block.saved == 4 * ROWS * DIM, "a linear layer saves its input"
        assert block.seconds > 0


def test_the_comparison_sees_dropout_that_draws_anew(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from gem_parallel.memory import activations

    careless: Callable[..., Any] = lambda forward, *arguments, **_: torch.utils.checkpoint.checkpoint(  # noqa: E731
        forward, *arguments, use_reentrant=False, preserve_rng_state=False
    )
    monkeypatch.setattr(activations, "checkpoint", careless)
    assert train(policies=rules(("*", "recompute")))[0] != plain[0]


def test_eight_bits_change_gradients_by_little_and_no_forward_pass(plain: Any) -> None:
    """Each activation errs by 1/16 at most and errors have both signs: gradients move by a few hundredths, and by more than nothing."""
    torch.manual_seed(1)
    exact, rounded = Model(), Model()
    rounded.load_state_dict(exact.state_dict())
    Activations(policies=rules(("*", "fp8"))).apply(rounded, CONTEXT)
    for model in (exact, rounded):
        torch.manual_seed(2)
        loss = model(batch(0)).square().mean()
        loss.backward()
        assert float(loss.detach()) == plain[0][0]
    for (name, p), q in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        error = float((p.grad - q.grad).norm() / p.grad.norm())
        assert error < 2.0**-4, name
        assert error > 0 or not name.startswith("layers.0"), name


def test_evaluation_is_left_alone() -> None:
    model = Model()
    strategy = Activations(budget=1.0)
    strategy.apply(model, CONTEXT)
    model.eval()
    with torch.no_grad():
        model(batch(0))
    assert strategy.describe()["plan"] == []
    assert all(int(layer.steps) == 1 for layer in model.layers)


def report(**options: Any) -> Any:
    torch.manual_seed(1)
    model, strategy = Model(), Activations(**options)
    strategy.apply(model, CONTEXT)
    assert isinstance(strategy, ReportsMemory)
    return strategy.memory_report(model, lambda: model(batch(0)).square().mean())


@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_bytes_are_those_alive(policy: str) -> None:
    """On the CPU an offloaded tensor is a copy in the same memory."""
    told = report(policies=rules(("layers.[123]", policy)))
    for block in told.blocks:
        assert block.measured is not None
        assert block.measured == pytest.approx(block.held, rel=0.05), block
        assert block.seconds > 0
    assert [block.policy for block in told.blocks] == ["keep", *[policy] * 3]
    saved = [block.saved for block in told.blocks]
    assert saved[0] == pytest.approx(4 * (9 * ROWS * DIM + 2 * ROWS * ROWS), rel=0.2)  # 9 tensors of the model's width, softmax and dropout
    if policy in ("recompute", "fp8"):
        assert sum(block.held for block in told.blocks) < 0.7 * sum(saved)
    assert told.peak >= max(sum(b.held for b in told.blocks), max(saved))
    assert told.measured_peak is None
    assert told.budget is None


def test_a_budget_is_kept_at_least_cost() -> None:
    whole = sum(block.saved for block in report(policies=rules(("*", "keep"))).blocks)
    told = report(budget=0.6 * whole / 1e9, allow=("recompute",))
    assert sum(block.held for block in told.blocks) <= told.budget == int(0.6 * whole)
    assert [block.policy for block in told.blocks].count("recompute") == 2
    assert sum(block.extra for block in told.blocks) == pytest.approx(sum(sorted(block.seconds for block in told.blocks)[:2]))
    ruled = report(budget=0.6 * whole / 1e9, policies=rules(("layers.3", "recompute")), allow=("fp8",))
    assert ruled.blocks[3].policy == "recompute"
    assert "fp8" in {block.policy for block in ruled.blocks[:3]}


def test_case_H10_a_budget_that_nothing_meets_is_refused_with_the_least() -> None:
    model, strategy = Model(), Activations(budget=1e-5)
    strategy.apply(model, CONTEXT)
    with pytest.raises(RequestError, match=r"10,000 bytes.*hold at least [\d,]+ bytes.*fewer rows"):
        model(batch(0))


class Pointwise(nn.Module):
    """What a compiler fuses: all that lies between two matrices can be computed again from the first one's result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 8 * DIM), nn.Linear(8 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).sin().exp().tanh())  # type: ignore[no-any-return]


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Pointwise()

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return state[0] + self.part(state[0]), state[1]


def compiled(share: float | None) -> tuple[int, Tensor]:
    """Bytes that a block saves whose part is compiled, as ``compile.blocks`` does it with the gem model, and a gradient from below it."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model = Model()
    model.layers = nn.ModuleList([Wide()])
    model.layers[0].part.compile(backend="aot_eager_decomp_partition")  # type: ignore[operator]
    strategy = Activations(policies=rules(("*", "keep")), compiled_budget=share)
    strategy.apply(model, CONTEXT)
    told = strategy.memory_report(model, lambda: model(batch(0)).square().mean())
    assert model.stem.weight.grad is not None
    return told.blocks[0].saved, model.stem.weight.grad


def test_compiled_graphs_save_within_their_budget() -> None:
    (alone, gradient), (whole, _), (least, recomputed) = (compiled(share) for share in (None, 1.0, 0.0))
    assert alone == whole
    assert least <= whole - 4 * ROWS * 8 * DIM, "at least one wide activation less"
    assert torch.equal(recomputed, gradient)
    assert torch._functorch.config.activation_memory_budget == 1.0, "only what is compiled meanwhile is bound"


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_blocks_that_are_compiled_are_measured_as_they_are_written(plain: Any, policy: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    model, strategy = Model(), Activations(budget=1.0, policies=rules(("layers.[01]", policy)))
    strategy.apply(model, CONTEXT)
    for layer in model.layers:
        layer.compile(backend="eager")
    told = strategy.memory_report(model, lambda: model(batch(0)).square().mean())
    assert [block.saved for block in told.blocks] == [block.saved for block in report(policies=rules(("*", "keep"))).blocks]
    assert all(layer._compiled_call_impl is not None for layer in model.layers), "they stay compiled"
    torch.manual_seed(2)
    assert float(model(batch(0)).square().mean().detach()) == plain[0][0]


def test_what_a_run_says_of_its_plan() -> None:
    _, _, strategy = train(steps=1, budget=1.0)
    assert strategy is not None
    described = strategy.describe()
    assert (described["strategy"], described["budget"]) == ("activations", 10**9)
    assert [block["name"] for block in described["plan"]] == [f"layers.{i}" for i in range(4)]
    assert described["plan"][0].keys() >= {"saved", "seconds", "policy", "held", "extra"}
    fixed = Activations(policies=rules(("layers.1", "offload")))
    fixed.apply(Model(), CONTEXT)
    assert fixed.describe() == {
        "strategy": "activations",
        "budget": None,
        "policies": {f"layers.{i}": "offload" if i == 1 else "keep" for i in range(4)},
        "plan": [],
    }


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(RequestError, match=r"no block has such a name; there are layers\.0"):
        Activations(policies=rules(("layer.*", "recompute"))).apply(Model(), CONTEXT)
    with pytest.raises(RequestError, match=r"blocks 'layer\.\*'.*no module has such a name; one is stem"):
        Activations(budget=1.0, blocks=("head", "layer.*")).apply(Model(), CONTEXT)
    with pytest.raises(RequestError, match="no list of blocks"):
        Activations(budget=1.0).apply(nn.Linear(2, 2), CONTEXT)


def test_the_declaration_and_its_options() -> None:
    (declared,) = [strategy for strategy in gem_parallel_strategies() if strategy.name == "activations"]
    assert (declared.stage, declared.on_meta) == ("memory", False)
    assert declared.options is not None
    options = load_object(declared.options)
    built = load_object(declared.load)(**options(budget=2.0, policies=rules(("a", "fp8"))).model_dump())
    assert built.describe()["budget"] == 2 * 10**9
    for wrong in (
        {},
        {"budget": 0},
        {"budget": float("inf")},
        {"policies": rules(("a", "drop"))},
        {"budget": 1.0, "allow": ("all",)},
        {"keep": 1},
        {"compiled_budget": 2},
    ):
        with pytest.raises(ValidationError):
            options(**wrong)
