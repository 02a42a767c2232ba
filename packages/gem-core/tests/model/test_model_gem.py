"""The GEM model: its plan of work, its options, its counts."""

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gem_core.model.gem import GemModel, GemOptions, Step, plan
from gem_core.model.options import SequenceOptions
from gem_core.spec import DataSchema, IdFeature, RequestError, SequenceFeature, Task

LENGTHS = [[3, 2], [0, 1], [9, 5]]
BASE: dict[str, Any] = {
    "dim": 8,
    "tokens": 6,
    "x_sum": 3,
    "sequence": {"dim": 8, "heads": 2, "seeds": 2, "queries": 1},
    "features": {"embedding_dim": 8},
    "head": {"hidden": [8]},
}


def options_with(**changes: Any) -> GemOptions:
    merged = BASE | {
        key: BASE[key] | value if isinstance(value, dict) and isinstance(BASE.get(key), dict) else value for key, value in changes.items()
    }
    return GemOptions.model_validate(merged)


def run(kit: ModuleType, options: GemOptions, schema: DataSchema | None = None) -> Any:
    """Train one step of a full batch; every parameter must get a gradient. Returns the model."""
    data = schema or kit.FULL
    batch = kit.make_batch(data, [row[: len(data.sequences)] for row in LENGTHS])
    model, tables = kit.make_model(GemModel, data, options)
    logits = model(batch, tables(batch.ids))
    kit.bce(logits, batch).backward()
    assert [key for key, p in model.named_parameters() if p.grad is None] == []
    return model


SEQUENCE = {
    "pffn": ["gdpa", "fused", "off"],
    "attention": ["window", "block", "off"],
    "rope": ["off", "position", "time"],
    "pooled_tokens": [None, 3],
    "norm": ["rms", "layer"],
    "window": [None, 1],
}


@pytest.mark.parametrize("pffn", SEQUENCE["pffn"])
@pytest.mark.parametrize("attention", SEQUENCE["attention"])
def test_sequence_options_combine(kit: ModuleType, pffn: str, attention: str) -> None:
    rest = list(itertools.product(*(SEQUENCE[key] for key in ("rope", "pooled_tokens", "norm", "window"))))
    first = len(pffn) + len(attention)  # a different part of the product for each pair
    for values in rest[first % 5 :: 5]:
        chosen = dict(zip(("rope", "pooled_tokens", "norm", "window"), values))
        run(kit, options_with(sequence={"pffn": pffn, "attention": attention} | chosen), kit.SCHEMAS["one_group"])


@pytest.mark.parametrize("comp_skip", ["off", "pool_first", "attention_first"])
@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("targets", [False, True])
def test_layer_options_combine(kit: ModuleType, comp_skip: str, links: bool, targets: bool) -> None:
    run(kit, options_with(layers=4, comp_skip=comp_skip, links=links, targets=targets))


@pytest.mark.parametrize("ensemble", ["sum", "concat"])
@pytest.mark.parametrize("partition", [False, True])
def test_expert_options_combine(kit: ModuleType, ensemble: str, partition: bool) -> None:
    experts = [{"kind": "wukong"}, {"kind": "cross"}, {"kind": "deep"}, {"kind": "linear"}]
    run(kit, options_with(ensemble=ensemble, partition=partition, experts=experts))


@pytest.mark.parametrize("head", [{"numbers": True}, {"shared": [8]}, {"hidden": []}, {"domain": "country"}])
@pytest.mark.parametrize("wide", [False, True])
def test_head_options_combine(kit: ModuleType, head: dict[str, Any], wide: bool) -> None:
    run(kit, options_with(head=head, wide=wide, dropout=0.1))


def test_seeds_or_queries_alone(kit: ModuleType) -> None:
    run(kit, options_with(sequence={"seeds": 0}))
    run(kit, options_with(sequence={"queries": 0}))
    run(kit, options_with(sequence={"seeds": 0, "queries": 0}), kit.SCHEMAS["one_group"])


def test_tokens_of_features_in_float32_are_rounded_once(kit: ModuleType) -> None:
    """Recipes keep features in float32; rounded by whoever reads them, tokens and their gradients would travel wide and be cast at every use."""
    model, tables = kit.make_model(GemModel, kit.FULL, options_with())
    batch = kit.make_batch(kit.FULL, LENGTHS)
    features, seen = model.features.forward, []
    model.features.forward = lambda *inputs: features(*inputs).float()
    for layer in model.layers:
        layer.weight_gen.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
        layer.ensemble.register_forward_pre_hook(lambda module, inputs: seen.extend(x.dtype for x in inputs))
        layer.register_forward_pre_hook(lambda module, inputs: seen.extend(x.dtype for x in inputs[1]))
    with torch.autocast("cpu", torch.bfloat16):
        model(batch, tables(batch.ids))
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == len(model.layers) * (3 + len(model.targets))


class TestPlan:
    def steps(self, layers: int, comp_skip: Any, options: dict[str, Any]) -> str:
        """One word a layer: p for the personal network, a for attention, h for pooling."""
        made = plan(layers, SequenceOptions.model_validate(options), comp_skip)
        return " ".join("".join(c for c, on in zip("pah", (s.pffn, s.attention, s.pool)) if on) or "-" for s in made)

    @pytest.mark.parametrize(
        ("layers", "comp_skip", "options", "want"),
        [
            (2, "off", {}, "pah pah"),
            (2, "off", {"layers": 1}, "pah -"),
            (2, "off", {"pffn": "off"}, "ah ah"),
            (2, "off", {"attention": "off"}, "ph ph"),
            (1, "pool_first", {}, "ph"),
            (3, "pool_first", {}, "ph a ph"),
            (4, "pool_first", {}, "ph a ph -"),  # a last attention would reach nothing
            (1, "attention_first", {}, "ah"),
            (4, "attention_first", {}, "ah ph a ph"),
            (3, "attention_first", {}, "ah ph -"),
        ],
    )
    def test_steps(self, layers: int, comp_skip: str, options: dict[str, Any], want: str) -> None:
        assert self.steps(layers, comp_skip, options) == want

    def test_step_is_plain_data(self) -> None:
        assert plan(1, SequenceOptions(), "off") == [Step(pffn=True, attention=True, pool=True)]

    def test_comp_skip_costs_less(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.FULL, [[9, 5]] * 4)
        full, half = (GemModel(kit.FULL, options_with(layers=4, comp_skip=skip)).flops(batch) for skip in ("off", "pool_first"))
        assert half < 0.8 * full


class TestGroups:
    def test_sizes_by_event_type(self, kit: ModuleType) -> None:
        model = run(kit, options_with(layers=2, sequences={"views": {"dim": 4, "heads": 1, "layers": 1, "attention": "block", "seeds": 3}}))
        clicks, views = model.layers[0].steps
        assert (clicks.attention.out.in_features, views.attention.out.in_features) == (8, 4)
        assert views.attention.blocks
        assert (clicks.pool.tokens, views.pool.tokens) == (2 + 1 + 1, 3 + 1)
        assert (clicks.pffn.make.keys, views.pffn.make.keys) == (4 * (3 + 1), 4 * 3)
        assert model.layers[1].steps[1].pool is None

    def test_an_override_changes_only_its_keys(self) -> None:
        options = options_with(sequence={"window": 7, "keys_per_token": 5}, sequences={"views": {"heads": 4}})
        assert options.group("views") == options.sequence.model_copy(update={"heads": 4})
        assert options.group("clicks") == options.sequence

    def test_seen_tokens_with_links(self, kit: ModuleType) -> None:
        model = GemModel(kit.FULL, options_with(layers=3, links=True))
        pooled = (2 + 1 + 1) + (2 + 1)
        sizes = [layer.ensemble.experts[0].tokens_in for layer in model.layers]
        assert sizes == [3 + pooled + model.features.count, 3 + 2 * pooled + 6, 3 + 3 * pooled + 6]

    @pytest.mark.parametrize("links", [False, True])
    def test_links_carry_lower_poolings(self, kit: ModuleType, links: bool) -> None:
        """A link is a path from a lower pooling to the output that goes round the layers between."""
        batch = kit.make_batch(kit.FULL, LENGTHS)
        model, tables = kit.make_model(GemModel, kit.FULL, options_with(layers=2, links=links))
        seen: list[torch.Tensor] = []
        model.layers[0].ensemble.register_forward_hook(lambda *_: torch.zeros(3, 6, 8))
        model.layers[0].steps[0].pool.register_forward_hook(lambda _m, _i, out: out[0].retain_grad() or seen.append(out[0]))
        kit.bce(model(batch, tables(batch.ids)), batch).backward()
        assert (seen[0].grad is not None and bool(seen[0].grad.any())) is links

    def test_groups_that_know_the_same_candidate_share_their_sources(self, kit: ModuleType) -> None:
        buys = SequenceFeature(name="buys", ids=(IdFeature(name="item", cardinality=20),), max_length=4)
        data = replace(kit.FULL, sequences=(*kit.FULL.sequences, buys))
        model, tables = kit.make_model(GemModel, data, options_with(layers=2))
        item = model.features.names.index("item")
        assert model.targets == [[item], [], [item]]
        x: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        seen: list[tuple[torch.Tensor, ...]] = []
        model.features.register_forward_hook(lambda _m, _i, out: x.append(out))
        for layer in model.layers:
            layer.weight_gen.register_forward_hook(lambda _m, _i, out: sums.append(out))
            for step in layer.steps:
                step.register_forward_pre_hook(lambda _m, inputs: seen.append(inputs[1:]))
        batch = kit.make_batch(data, [[3, 2, 1], [0, 1, 4]])
        model(batch, tables(batch.ids))
        for x_sum, (clicks, views, last) in zip(sums, (seen[:3], seen[3:]), strict=True):
            assert clicks[0] is last[0]
            assert torch.equal(clicks[1], x[0][:, [item]])
            assert torch.equal(clicks[0], torch.cat([x_sum, clicks[1]], dim=1))
            assert torch.equal(views[0], x_sum)
            assert views[1].shape == (2, 0, 8)

    @pytest.mark.parametrize("targets", [False, True])
    def test_candidate_reaches_the_pooling(self, kit: ModuleType, targets: bool) -> None:
        """With targets one history is pooled differently for two candidates, even if X_sum says nothing."""
        data = kit.SCHEMAS["one_group"]
        model, tables = kit.make_model(GemModel, data, options_with(layers=1, targets=targets, x_sum=1))
        found: list[torch.Tensor] = []
        model.layers[0].weight_gen.register_forward_hook(lambda *_: torch.zeros(3, 1, 8))
        model.layers[0].steps[0].register_forward_hook(lambda _m, _i, out: found.append(out[1]))
        batch = kit.make_batch(data, [[3], [2], [4]])
        embedded = tables(batch.ids)
        model(batch, embedded)
        model(batch, embedded | {"item": embedded["item"].flip(0) + torch.randn(8)})
        assert (not torch.allclose(found[0], found[1])) is targets


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"layerz": 2}, "layerz"),
            ({"sequence": {"heads": 3}}, "dim 8 is not a multiple of heads 3"),
            ({"sequence": {"dim": 6, "heads": 2}}, "dim / heads must be even; it is 3"),
            ({"sequences": {"views": {"heads": 3}}}, "sequences.views: dim 8 is not a multiple of heads 3"),
            ({"sequence": {"layers": 3}}, "layers 3 is more than the model's 2"),
            ({"experts": []}, "at least 1"),
            ({"experts": [{"kind": "wukongs"}]}, "wukong"),
            ({"dropout": 1.0}, "less than 1"),
            ({"sequence": {"activation": "tanh"}}, "gelu"),
        ],
    )
    def test_options_say_what_is_wrong(self, changes: dict[str, Any], words: str) -> None:
        with pytest.raises(ValidationError, match=words):
            options_with(**changes)

    def test_unknown_group(self, kit: ModuleType) -> None:
        with pytest.raises(RequestError, match=r"model.options.sequences.likes: the schema's sequence groups are \['clicks', 'views'\]"):
            GemModel(kit.FULL, options_with(sequences={"likes": {"heads": 1}}))

    def test_group_without_query(self, kit: ModuleType) -> None:
        with pytest.raises(RequestError, match="'views': it has no pooling query"):
            GemModel(kit.FULL, options_with(sequence={"seeds": 0, "queries": 0}))

    def test_group_without_columns(self) -> None:
        schema = DataSchema(sequences=(SequenceFeature(name="empty", max_length=3),), tasks=(Task(name="y"),))
        with pytest.raises(RequestError, match="'empty': it has no columns"):
            GemModel(schema, options_with())

    def test_options_are_frozen_and_documented(self) -> None:
        with pytest.raises(ValidationError, match="frozen"):
            GemOptions().dim = 3  # type: ignore[misc]
        fields = GemOptions.model_json_schema()["properties"]
        assert "Summary tokens" in fields["x_sum"]["description"]


def test_flops_by_hand(kit: ModuleType) -> None:
    """One layer, one group, with a window: every matmul written out."""
    data = kit.SCHEMAS["one_group"]
    options = options_with(layers=1, sequence={"window": 1, "keys_per_token": 2}, experts=[{"kind": "linear"}])
    batch = kit.make_batch(data, [[3], [0], [9]])
    d, events, rows = 8, 12, 3
    windows = (3 * 3 - 2) + (3 * 9 - 2)
    per_event = 17 * d + d * d + d * d + d * 3 * d + d * d + d * 2 * d
    keys, sources, queries, seeds = 8, 4, 2, 2
    pairs = events * keys + windows + events * (queries + seeds)
    generate = sources * d * (2 * 2 * d)
    weight_gen = 4 * 3 * d + 3 * (d * 2 * d + 2 * d * d)
    pool = seeds * d * d + queries * (d * d + d * d) + 3 * 1 * d
    tokens = 3 + (seeds + queries) + 4
    experts = tokens * 6 * d + 4 * 6 * d
    heads = 2 * (6 * d * 8 + 8)
    hand = 2 * (events * per_event + 2 * pairs * d + rows * (generate + weight_gen + pool + experts + heads))
    assert GemModel(data, options).flops(batch) == hand
