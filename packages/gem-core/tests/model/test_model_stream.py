"""The residual stream of events: layers hand it on beside what they add to it, and the next norm adds both. Held against layers that add at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from gem_core.model.gem import GemModel, GemOptions
from gem_core.model.hstu import HstuLayer, HstuModel, HstuOptions
from gem_core.model.layers import NormLinear, PreNormLinear
from gem_core.model.options import SequenceOptions
from gem_core.model.sequence import Events, PersonalFfn, SelfAttention
from gem_core.ops.slot import kernel_slots

SMALL = {"dim": 8, "heads": 2, "seeds": 2, "queries": 1}
GEM = {"dim": 8, "layers": 3, "tokens": 6, "x_sum": 3, "features": {"embedding_dim": 8}, "experts": [{"kind": "wukong", "hidden": [16]}]}
MODELS: dict[str, tuple[Any, Any]] = {
    "gem": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL})),
    "layer_norm": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL | {"norm": "layer", "bias": False}})),
    "fused": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL | {"pffn": "fused", "attention": "block", "block": 4}})),
    "pool_first": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL, "comp_skip": "pool_first"})),
    "attention_first": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL, "comp_skip": "attention_first"})),
    "attention_alone": (GemModel, GemOptions.model_validate(GEM | {"sequence": SMALL | {"pffn": "off"}})),
    "hstu": (HstuModel, HstuOptions(dim=8, layers=3, features={"embedding_dim": 8})),
    "hstu_plain": (HstuModel, HstuOptions(dim=8, layers=2, concat_inputs=False, features={"embedding_dim": 8})),
}
LENGTHS = [[3, 2], [0, 1], [9, 5], [1, 0], [0, 0]]


@contextmanager
def adding_at_once(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plain form: every layer adds its summand to the stream itself, and a norm gets the sum."""
    hstu = HstuLayer.forward

    def holding(self: Events, values: Tensor, pending: Tensor | None = None) -> Events:
        return self._replace(values=values if pending is None else values + pending)

    def norm(self: PreNormLinear, x: Tensor, pending: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert pending is None
        return NormLinear.forward(self, x), x

    def layer(self: HstuLayer, x: Tensor, pending: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        x, pending = hstu(self, x, None, *rest)
        return x + pending, torch.zeros_like(x)

    with patch.context() as patched:
        patched.setattr(Events, "holding", holding)
        patched.setattr(PreNormLinear, "forward", norm)
        patched.setattr(HstuLayer, "forward", layer)
        yield


def logits_and_gradients(kit: ModuleType, name: str) -> list[Tensor]:
    cls, options = MODELS[name]
    model, tables = kit.make_model(cls, kit.FULL, options)
    model, tables = model.double(), tables.double()
    batch = kit.make_batch(kit.FULL, LENGTHS)
    batch = replace(batch, dense={n: t.double() for n, t in batch.dense.items()}, event_dense={n: t.double() for n, t in batch.event_dense.items()})
    logits = model(batch, tables(batch.ids))
    weights = [*model.parameters(), *tables.parameters()]
    grads = torch.autograd.grad(kit.bce({task: logit.double() for task, logit in logits.items()}, batch), weights, allow_unused=True)
    return [*logits.values(), *(torch.zeros(1) if grad is None else grad for grad in grads)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_layers_that_add_at_once(kit: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = logits_and_gradients(kit, name)
    with adding_at_once(monkeypatch):
        plain = logits_and_gradients(kit, name)
    for got, want in zip(found, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gem", "fused", "attention_first", "hstu"])
def test_a_planted_fault_what_is_pending_is_lost(kit: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    found = logits_and_gradients(kit, name)
    forward = PreNormLinear.forward
    with monkeypatch.context() as patched:
        patched.setattr(PreNormLinear, "forward", lambda self, x, pending=None: forward(self, x))
        patched.setattr(Events, "summed", lambda self: self.values)
        lossy = logits_and_gradients(kit, name)
    assert any(not torch.allclose(a, b, rtol=1e-6) for a, b in zip(found, lossy, strict=True))


def test_no_sum_of_events_is_made_but_by_norms(kit: ModuleType) -> None:
    """Between the first norm and the last, what is pending is never added by itself."""
    model, tables = kit.make_model(GemModel, kit.FULL, MODELS["gem"][1])
    batch, handed = kit.make_batch(kit.FULL, LENGTHS), []
    for layer in model.layers:
        for step in layer.steps:
            for part in (step.pffn, step.attention, step.pool):
                part.register_forward_pre_hook(lambda module, inputs: handed.append((type(module).__name__, inputs[0].pending is not None)))
    model(batch, tables(batch.ids))
    assert handed == 3 * 2 * [("PersonalFfn", False), ("SelfAttention", True), ("SeedPooling", True)]


def test_a_prenorm_linear_adds_norms_and_gives_the_sum() -> None:
    layer = PreNormLinear(4, 5, norm="layer")
    x, pending = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    out, stream = layer(x, pending)
    assert torch.equal(stream, x + pending)
    torch.testing.assert_close(out, NormLinear.forward(layer, x + pending))
    out, stream = layer(x)
    assert torch.equal(stream, x)
    torch.testing.assert_close(out, NormLinear.forward(layer, x))
    assert layer.slot.features == {"layer", "before", "residual", "return_sum"}
    assert list(layer.state_dict()) == list(NormLinear(4, 5).state_dict())


def test_under_autocast_the_stream_is_in_its_dtype() -> None:
    layer = PreNormLinear(4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        out, stream = layer(torch.randn(3, 4), torch.randn(3, 4))
    assert out.dtype == stream.dtype == torch.bfloat16


def test_what_begins_with_no_norm_adds_first() -> None:
    """The fused network norms inside its kernel, and gives the whole sum."""
    torch.manual_seed(0)
    layer = PersonalFfn(2, 5, SequenceOptions(dim=8, heads=2, keys_per_token=3, pffn="fused"))
    values, pending = torch.randn(9, 8), torch.randn(9, 8)
    events, sources = Events(values, torch.tensor([0, 4, 9]), 5, None, None, pending), torch.randn(2, 2, 5)
    out, left = layer(events, sources)
    assert left is None
    assert torch.equal(out, layer(events.holding(values + pending), sources)[0])


def test_dropout_is_on_what_is_pending_alone() -> None:
    layer = SelfAttention(SequenceOptions(dim=8, heads=2, rope="off", dropout=0.99), 5)
    events = Events(torch.randn(9, 8), torch.tensor([0, 4, 9]), 5, None, None)
    stream, pending = layer(events)
    assert torch.equal(stream, events.values)
    assert float((pending == 0).float().mean()) > 0.5


def test_the_slots_of_streams_ask_for_the_sum(kit: ModuleType) -> None:
    for name in ("gem", "hstu"):
        model, _ = kit.make_model(MODELS[name][0], kit.FULL, MODELS[name][1])
        asked = [slot for slot in kernel_slots(model) if "return_sum" in slot.features]
        assert len(asked) == sum(isinstance(part, PreNormLinear) for part in model.modules()) > 0
