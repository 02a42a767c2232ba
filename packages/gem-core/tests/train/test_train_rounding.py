"""Parameters rounded together: the numbers of parameters rounded one by one, with parameters, gradients and checkpoints as ever."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_core.config.load import load_config
from gem_core.model.layers import AddNorm, NormLinear
from gem_core.spec import PrecisionDecision
from gem_core.train import compiled, compose
from gem_core.train.log import read_log
from gem_core.train.rounding import RoundTogether, rounded_together, rounds_together, to_round
from gem_core.train.run import train


class Model(nn.Module):
    """A linear layer, one that shares its weight, norms with and without a kernel, a layer that stays wide, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.second.weight = self.first.weight
        self.normed, self.wide, self.idle, self.norm = NormLinear(6, 4), nn.Linear(4, 3), nn.Linear(6, 6), nn.LayerNorm(6)
        self.added = AddNorm(6)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        x = self.normed(self.norm(self.second(self.added(self.first(x)))))
        if fail:
            raise ValueError("planted")
        with torch.autocast("cpu", enabled=False):
            return self.wide(x.float())  # type: ignore[no-any-return]


DECISIONS = [PrecisionDecision(module=name, format="bf16", reason="") for name in ("first", "second", "normed", "idle", "norm", "added")]
DECISIONS += [PrecisionDecision(module="wide", format="fp32", reason="")]


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def results(model: Model, x: Tensor) -> list[Tensor | None]:
    """Output and gradients of a call under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
    return [out, *(p.grad for p in model.parameters())]


def test_numbers_are_those_of_parameters_rounded_one_by_one() -> None:
    x, plain, together = torch.randn(5, 6), made(), made()
    want = results(plain, x)
    with rounded_together(together, DECISIONS):
        found = results(together, x)
    assert len(want) == len(found)
    for mine, other in zip(found, want):
        assert mine is None if other is None else torch.equal(mine, other)  # type: ignore[arg-type]
    assert together.idle.weight.grad is None
    assert together.first.weight.grad is not None
    assert together.first.weight.grad.dtype is torch.float32


def test_gradients_of_micro_batches_add_up() -> None:
    model, x = made(), torch.randn(5, 6)
    with rounded_together(model, DECISIONS):
        once = [None if t is None else t.clone() for t in results(model, x)[1:]]
        twice = results(model, x)[1:]
    for one, both in zip(once, twice):
        if one is not None and both is not None:
            torch.testing.assert_close(both, 2 * one)


def test_which_parameters_are_rounded() -> None:
    model = made()
    linear = [(model.first, "weight"), (model.first, "bias"), (model.second, "weight")]
    added, normed = [(model.added, "weight"), (model.added, "bias")], [(model.normed, "weight"), (model.normed, "bias")]
    idle = [(model.idle, "weight"), (model.idle, "bias")]
    assert to_round(model, DECISIONS) == [*linear, *normed, *idle, *added]
    assert to_round(model, [d for d in DECISIONS if d.module != "normed"]) == [*linear, *idle, *added]
    model.normed.forward = lambda x: x  # a recipe looks into it
    assert to_round(model, DECISIONS) == [*linear, *idle, *added]
    assert to_round(model.double(), DECISIONS) == []


def test_layers_find_rounded_parameters_in_calls_alone() -> None:
    model, seen = made(), []
    names, before = list(model.state_dict()), dict(model.named_parameters())
    model.second.register_forward_pre_hook(lambda module, inputs: seen.append((module.weight.dtype, module.weight is model.first.weight)))
    model.wide.register_forward_pre_hook(lambda module, inputs: seen.append((module.weight.dtype, True)))
    with rounded_together(model, DECISIONS):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(2, 6))
        assert seen == [(torch.bfloat16, True), (torch.float32, True)]
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="planted"):
            model(torch.randn(2, 6), fail=True)
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert list(model.state_dict()) == names
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 6))
    assert seen[0] == (torch.float32, True)


def test_without_autocast_nothing_is_rounded() -> None:
    model, x = made(), torch.randn(3, 6)
    want = model(x)
    with rounded_together(model, DECISIONS):
        assert torch.equal(model(x), want)
        with torch.autocast("cpu", torch.float16):
            assert model.first(x).dtype is torch.float16
            model(x)
    with rounded_together(nn.ReLU(), []), torch.autocast("cpu", torch.bfloat16):  # nothing to round
        pass


def test_no_gradient_at_all() -> None:
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    wide = torch.randn(3, requires_grad=True)
    (low,) = RoundTogether.apply(wide)  # type: ignore[no-untyped-call]
    Ends.apply(low).sum().backward()  # type: ignore[no-untyped-call]
    assert wide.grad is None


def test_gradients_in_another_order_of_memory() -> None:
    wide = [torch.randn(3, 4, requires_grad=True), torch.randn(0, 2, requires_grad=True), torch.randn(2, requires_grad=True)]
    low = RoundTogether.apply(*wide)  # type: ignore[no-untyped-call]
    given = [torch.randn(4, 3).to(torch.bfloat16).t(), torch.empty(0, 2, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16).expand(2)]
    found = torch.autograd.grad(low, wide, given)
    assert all(torch.equal(mine, want.float()) and mine.is_contiguous() for mine, want in zip(found, given))


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({}, True),
        ({"size": 2}, False),
        ({"device": "cpu"}, False),
        ({"dtype": "fp32"}, False),
        ({"strategies": ["memory"]}, False),
        ({"held": True}, False),
        ({"held": True, "told": "its ramp"}, False),
        ({"held": True, "told": None}, True),
    ],
)
def test_who_gains(change: dict[str, Any], want: bool) -> None:
    facts: dict[str, Any] = {"size": 1, "device": "cuda", "dtype": "bf16", "strategies": ["single"], "held": False} | change
    world: Any = SimpleNamespace(size=facts["size"], device=torch.device(facts["device"]))
    methods: dict[str, Any] = {"weights_changed": list} if facts["held"] else {}
    methods |= {"not_recordable": lambda: facts["told"]} if "told" in facts else {}
    precision: Any = SimpleNamespace(compute_dtype=lambda: facts["dtype"], **methods)
    assert rounds_together(world, precision, facts["strategies"]) is want


@pytest.mark.parametrize(("name", "blocks"), [("gem", "off"), ("gem", "default"), ("hstu", "off")])
def test_a_run_has_the_losses_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, blocks: str) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    words = [
        "run.device=cpu", "run.threads=1", f"model.name={name}", "model.options.dim=16", "model.options.layers=2", "data.options.rows=128",
        "data.batch_size=32", "train.epochs=1", "train.log_every=1", "kernels.prefer=['reference']", "precision.recipe=bf16", "train.ema_decay=0.5",
        f"compile.blocks={blocks}",
    ]  # fmt: skip
    summaries = []
    for word in ("plain", "together"):
        monkeypatch.setattr(compose, "rounds_together", lambda *facts, on=word == "together": on)
        summaries.append(train(load_config("toy", [*words, f"run.out={json.dumps(str(tmp_path / word))}"])))
        torch._dynamo.reset()
    losses = [[record["loss"] for record in read_log(tmp_path / word) if record["event"] == "train"] for word in ("plain", "together")]
    assert len(losses[0]) == 4
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)
    assert summaries[0]["compile"]["graphs"] == summaries[1]["compile"]["graphs"]
    names = [sorted(p.name for p in (tmp_path / word).rglob("*.safetensors")) for word in ("plain", "together")]
    assert names[0] == names[1] != []
