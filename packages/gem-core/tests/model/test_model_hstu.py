"""The HSTU ranker and the non-sequence baseline."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from gem_core.batch import lengths_to_offsets
from gem_core.model.dlrm import DlrmModel, DlrmOptions
from gem_core.model.hstu import HstuLayer, HstuModel, HstuOptions, RelativeBias
from gem_core.spec import RequestError

FEATURES: dict[str, Any] = {"features": {"embedding_dim": 8}, "dim": 8}


def options_with(**changes: Any) -> HstuOptions:
    return HstuOptions.model_validate(FEATURES | changes)


def sees(i: int, j: int, context: int, history_end: int, window: int | None) -> bool:
    """Whether token i of a row sees token j; the last token is the target."""
    if j == i and i >= history_end:
        return True
    if j < context:
        return True
    if i < context:
        return j < history_end
    return j < history_end and j <= i and (window is None or min(i, history_end) - j <= window)


@pytest.mark.parametrize("context", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.parametrize("concat", [True, False])
def test_case_B23_contextual_prefix_parity(context: int, window: int | None, concat: bool) -> None:
    """A layer against a loop over queries and keys, position 0 included."""
    torch.manual_seed(0)
    layer = HstuLayer(options_with(window=window, concat_inputs=concat), longest=11, prefix=context)
    histories = [2, 0, 4]
    lengths = [context + n + 1 for n in histories]
    x, size = torch.randn(sum(lengths), 8), max(lengths)
    bias = RelativeBias(2, timed=False)(size, None, x.device)
    out = sum(layer(x, None, lengths_to_offsets(torch.tensor(lengths)), size, bias))
    start = 0
    for length, history in zip(lengths, histories):
        row = x[start : start + length]
        made = torch.nn.functional.silu(torch.nn.functional.linear(torch.nn.functional.layer_norm(row, (8,)), layer.inputs.weight, layer.inputs.bias))
        u, v, q, k = made.view(length, 4, 2, 4).unbind(1)
        found = torch.zeros(length, 2, 4)
        for i in range(length):
            for j in range(length):
                if sees(i, j, context, context + history, window):
                    score = (q[i] * k[j]).sum(-1) / 2.0 + bias[0, :, i, j]
                    found[i] = found[i] + torch.nn.functional.silu(score)[:, None] * v[j] / 11
        gated = layer.norm(found.flatten(1)) * u.flatten(1)
        want = layer.out(torch.cat([u.flatten(1), row, gated], dim=1) if concat else gated) + row
        torch.testing.assert_close(out[start : start + length], want, rtol=1e-4, atol=1e-4)
        start += length


def test_case_B23_the_model_hands_its_prefix_to_the_layers(kit: ModuleType) -> None:
    model, tables = kit.make_model(HstuModel, kit.FULL, options_with())
    batch = kit.make_batch(kit.FULL, [[3, 2], [0, 0]])
    seen: list[tuple[Any, dict[str, Any]]] = []
    slot = model.layers[0].slot
    free = slot._public
    slot._public = lambda *args, **options: seen.append((args, options)) or free(*args, **options)
    model(batch, tables(batch.ids))
    (_, _, _, offsets), options = seen[0]
    assert [model.features.names[i] for i in model.candidate] == ["item"]
    assert len(model.context) == model.features.count - 1 == 6
    assert options["contextual"].tolist() == [6, 6]
    assert options["targets"].tolist() == [1, 1]
    assert offsets.diff().tolist() == [6 + 5 + 1, 6 + 0 + 1]
    assert options["norm_length"] == 6 + 9 + 5 + 1
    assert options["max_length"] == 6 + 3 + 2 + 1


@pytest.mark.parametrize("window", [None, 2])
def test_a_causal_context_asks_for_plain_causal_attention(kit: ModuleType, window: int | None) -> None:
    """The last token of a row sees itself and what is before it, with no word that says it is a target: a context token sees no event."""
    model, tables = kit.make_model(HstuModel, kit.FULL, options_with(context="causal", window=window, bias="none"))
    batch = kit.make_batch(kit.FULL, [[3, 2], [0, 0]])
    layer = model.layers[0]
    assert set(layer.slot.features) == ({"causal"} if window is None else {"causal", "window"})
    seen: list[dict[str, Any]] = []
    free = layer.slot._public
    layer.slot._public = lambda *args, **options: seen.append(options) or free(*args, **options)
    model(batch, tables(batch.ids))
    assert not {"contextual", "targets"} & seen[0].keys()
    lengths = [6 + 5 + 1, 6 + 0 + 1]
    pairs = sum(j <= i and (window is None or i - j <= window) for n in lengths for i in range(n) for j in range(n))
    assert layer.flops(np.array(lengths)) == 2 * (sum(lengths) * (8 * 32 + 24 * 8) + 2 * pairs * 8)


def test_parts_of_a_row_stand_in_order(kit: ModuleType) -> None:
    """Context, clicks, views, target; with order 'time' the events of both groups by age, oldest first."""
    batch = kit.make_batch(kit.FULL, [[2, 1], [0, 2]])
    now = batch.time
    batch = replace(batch, event_time={"clicks": now[0] - torch.tensor([50, 10]), "views": torch.cat([now[:1] - 30, now[1:] - torch.tensor([9, 4])])})
    for order, want in (("group", [50, 10, 30]), ("time", [50, 30, 10])):
        model, tables = kit.make_model(HstuModel, kit.FULL, options_with(order=order, bias="time"))
        embedded = tables(batch.ids)
        tokens = model.features(batch, embedded, model.features.described(batch))
        values, offsets, ages = model._sequence(batch, embedded, tokens)
        first = ages[: offsets[1]].tolist()
        assert first == [0] * 6 + want + [0]
        assert ages[offsets[1] :].tolist() == [0] * 6 + [9, 4, 0]
        torch.testing.assert_close(values[:6], tokens[0, model.context])
        torch.testing.assert_close(values[offsets[1] - 1], model.target(tokens[0, model.candidate].flatten()))
        clicks = model.events[0](batch, embedded).values
        torch.testing.assert_close(values[6], clicks[0])
        torch.testing.assert_close(values[8 if order == "time" else 7], clicks[1])


@pytest.mark.parametrize("bias", ["position", "time"])
def test_events_of_one_group_are_not_copied_before_they_are_joined_with_the_rest(kit: ModuleType, bias: str) -> None:
    """Those of two groups are: once for values, once for ages if they are read."""
    model, tables = kit.make_model(HstuModel, kit.FULL, options_with(bias=bias))
    batch = kit.make_batch(kit.FULL, [[3, 2], [0, 1]])
    events = [group(batch, tables(batch.ids)) for group in model.events]
    joined: list[int] = []
    free = model.concat._public
    model.concat._public = lambda parts, **options: joined.append(len(parts)) or free(parts, **options)
    for group in events:
        values, offsets, age = model._history([group])
        assert values is group.values
        assert torch.equal(offsets, group.offsets)
        assert age is (group.age if bias == "time" else None)
    assert not joined
    model._history(events)
    assert joined == [2] * (1 + (bias == "time"))


def test_relative_bias_by_distance_and_time() -> None:
    torch.manual_seed(0)
    bias = RelativeBias(2, timed=True)
    ages = torch.tensor([[0, 100, 3], [5, 5, 0]])
    out = bias(3, ages, ages.device)
    assert out.shape == (2, 2, 3, 3)
    assert bias.between is not None
    want = bias.distance(torch.tensor([1]))[0] + bias.between(torch.tensor([97]))[0]
    torch.testing.assert_close(out[0, :, 1, 2], want)
    torch.testing.assert_close(out, out.transpose(2, 3))


def test_without_bias_or_candidate(kit: ModuleType) -> None:
    data = kit.SCHEMAS["sequences_only"]
    model, tables = kit.make_model(HstuModel, data, options_with(bias="none"))
    batch = kit.make_batch(data, [[2, 1], [0, 0]])
    logits = model(batch, tables(batch.ids))
    assert model.candidate == []
    assert model.context == [0]
    assert "bias" not in model.layers[0].slot.features
    assert logits["ctr"].shape == (2,)


def test_hstu_flops_by_hand(kit: ModuleType) -> None:
    data = kit.SCHEMAS["one_group"]
    model, _ = kit.make_model(HstuModel, data, options_with(layers=1, window=2, head={"hidden": []}))
    batch = kit.make_batch(data, [[3], [0]])
    context, rows = 3, 2
    pairs = sum(sees(i, j, context, context + n, 2) for n in (3, 0) for i in range(context + n + 1) for j in range(context + n + 1))
    tokens = rows * (context + 1) + 3
    layer = tokens * (8 * 32 + 24 * 8) + 2 * pairs * 8
    assert model.flops(batch) == 2 * (3 * 17 * 8 + rows * 8 * 8 + layer + rows * 2 * 8)
    assert model.layers[0].flops(np.array([context + 4, context + 1])) == 2 * layer


@pytest.mark.parametrize("changes", [{"order": "time"}, {"bias": "time"}])
def test_times_that_are_not_there(kit: ModuleType, changes: dict[str, str]) -> None:
    untimed = replace(kit.FULL, sequences=(replace(kit.CLICKS, time=False), kit.VIEWS))
    with pytest.raises(RequestError, match="'clicks': False, 'views': True"):
        HstuModel(untimed, options_with(**changes))


def test_heads_must_divide() -> None:
    with pytest.raises(ValidationError, match="dim 8 is not a multiple of heads 3"):
        options_with(heads=3)


class TestDlrm:
    def make(self, kit: ModuleType, schema: str = "full", **changes: Any) -> tuple[DlrmModel, Any]:
        model, tables = kit.make_model(DlrmModel, kit.SCHEMAS[schema], DlrmOptions.model_validate(FEATURES | changes))
        return model, tables

    def test_dots_are_those_of_different_tokens(self, kit: ModuleType) -> None:
        model, _ = self.make(kit)
        x = torch.randn(2, model.tokens, 8)
        want = torch.stack([(x[:, i] * x[:, j]).sum(-1) for i in range(model.tokens) for j in range(i + 1, model.tokens)], dim=1)
        torch.testing.assert_close(model._dots(x), want)

    def test_histories_count_as_means(self, kit: ModuleType) -> None:
        model, tables = self.make(kit)
        assert model.tokens == model.features.count + 3 + 1
        batch = kit.make_batch(kit.FULL, [[3, 2], [0, 0]])
        embedded = tables(batch.ids)
        assert embedded["clicks.item"].shape == (2, 8)
        assert not bool(embedded["clicks.item"][1].any())

    def test_histories_ignored(self, kit: ModuleType) -> None:
        model, tables = self.make(kit, histories="ignore")
        assert {key for spec in tables.specs for key in spec.features} == {feature.name for feature in kit.FULL.ids}
        batch = kit.make_batch(kit.FULL, [[3, 2], [1, 1]])
        other = replace(batch, event_dense={key: value + 1 for key, value in batch.event_dense.items()})
        embedded = tables(batch.ids)
        assert torch.equal(model(batch, embedded)["ctr"], model(other, embedded)["ctr"])

    def test_flops_by_hand(self, kit: ModuleType) -> None:
        model, _ = self.make(kit, "one_group", head={"hidden": [8]})
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[3], [0], [1]])
        tokens = 4 + 2 + 1
        heads = 2 * ((tokens * 8 + tokens * (tokens - 1) // 2) * 8 + 8)
        assert model.flops(batch) == 3 * 2 * (2 * 8 * 8 + 1 * 8 + tokens * tokens * 8 + heads)
