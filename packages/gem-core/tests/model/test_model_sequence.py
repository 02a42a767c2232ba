"""Event tokens, times, rotation, personalised feed-forward and self-attention, against plain loops."""

import math
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.batch import Jagged, lengths_to_offsets
from gem_core.model.crossing import KeyValues, WeightGen
from gem_core.model.jagged import from_end, mean_rows, regular_offsets, row_of
from gem_core.model.layers import NormLinear
from gem_core.model.options import SequenceOptions
from gem_core.model.sequence import (
    Events,
    EventTokens,
    LogEmbedding,
    LookUpSum,
    PersonalFfn,
    RotaryAngles,
    SelfAttention,
    event_age,
    log_buckets,
    rotate,
)
from gem_core.spec import RequestError

LENGTHS = [3, 0, 5, 1]


def events_of(dim: int = 8, angles: int | None = None, lengths: list[int] = LENGTHS) -> Events:
    torch.manual_seed(0)
    offsets, total = lengths_to_offsets(torch.tensor(lengths)), sum(lengths)
    turn = None if angles is None else torch.rand(total, angles) * 3
    return Events(torch.randn(total, dim), offsets, max(lengths), None, turn)


def rows_of(events: Events) -> list[slice]:
    edges = events.offsets.tolist()
    return [slice(a, b) for a, b in pairwise(edges)]


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def linear(layer: NormLinear, x: Tensor) -> Tensor:
    """The layer's matrix without its norm."""
    return nn.functional.linear(x, layer.weight, layer.bias)


class TestIndices:
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(lengths=st.lists(st.integers(0, 4), max_size=6))
    def test_rows_places_and_means(self, lengths: list[int]) -> None:
        offsets = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64))
        row = row_of(offsets, sum(lengths))
        assert row.tolist() == [r for r, n in enumerate(lengths) for _ in range(n)]
        assert from_end(offsets, row).tolist() == [n - 1 - i for n in lengths for i in range(n)]
        values = torch.arange(float(2 * sum(lengths))).view(-1, 2)
        means = mean_rows(Jagged(values, offsets, max(lengths, default=0)))
        parts = values.split(lengths) if lengths else []
        for mean, part in zip(means, parts):
            torch.testing.assert_close(mean, part.mean(0) if len(part) else torch.zeros(2))

    def test_regular(self) -> None:
        assert regular_offsets(3, 2, torch.device("cpu")).tolist() == [0, 2, 4, 6]


class TestTimes:
    def test_case_G06_ages_are_whole_numbers_until_they_are_buckets(self, kit: ModuleType) -> None:
        """Unix seconds have a spacing of 8.4 million in bf16 and 128 in float32; the age of a second must survive."""
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[3]])
        now = 1_650_000_000
        batch = replace(batch, time=torch.tensor([now]), event_time={"clicks": torch.tensor([now - 7200, now - 60, now - 1])})
        with torch.autocast("cpu", torch.bfloat16):
            age = event_age(batch, "clicks", torch.zeros(3, dtype=torch.int64))
            embedding = LogEmbedding(32, 32.0, 4)
            buckets = embedding.bucket(age)
        assert age.dtype == torch.int64
        assert age.tolist() == [7200, 60, 1]
        assert len(set(buckets.tolist())) == 3

    @pytest.mark.parametrize("events", [0, 1, 300])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_vectors_of_place_and_age_against_two_look_ups(self, events: int, dtype: torch.dtype) -> None:
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        places, ages = torch.randn(5, 6, dtype=wide, requires_grad=True), torch.randn(3, 6, dtype=wide, requires_grad=True)
        place, age = torch.randint(0, 4, (events,)), torch.randint(0, 3, (events,))  # nobody looks up the last place
        out = LookUpSum.apply(places, ages, place, age, dtype)  # type: ignore[no-untyped-call]
        want = (places[place] + ages[age]).to(dtype)
        assert out.dtype is dtype
        assert torch.equal(out, want)
        upstream = torch.randn(events, 6).to(dtype)
        tolerance = 1e-12 if dtype is torch.float64 else 2e-2
        for mine, other in zip(torch.autograd.grad(out, (places, ages), upstream), torch.autograd.grad(want, (places, ages), upstream)):
            assert mine.dtype is wide
            torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)

    def test_case_G06_the_check_sees_low_precision(self) -> None:
        """Planted fault: the same ages from bf16 times fall into one bucket."""
        now = torch.tensor(1_650_000_000).to(torch.bfloat16)
        events = (torch.tensor([7200, 60, 1]).neg() + 1_650_000_000).to(torch.bfloat16)
        assert len(set(LogEmbedding(32, 32.0, 4).bucket((now - events).long()).tolist())) == 1

    def test_case_G06_rotary_angles_are_float32_under_autocast_and_in_a_bf16_model(self) -> None:
        angles = RotaryAngles(8, 3600.0)
        place, age = torch.tensor([0, 1, 2000]), torch.tensor([0, 30, 10_000_000])
        want = angles(place, age)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(angles(place, age), want)
        assert torch.equal(angles.bfloat16()(place, age), want)
        assert want.dtype == torch.float32
        torch.testing.assert_close(want[:, 0], place + torch.log1p(age / 3600.0))
        torch.testing.assert_close(RotaryAngles(8, None)(place, age)[:, 1], place * 10000.0**-0.25)

    def test_buckets_rise_and_cover(self) -> None:
        edges = log_buckets(32, 32.0, torch.device("cpu"))
        assert edges.dtype == torch.int64
        assert edges.shape == (31,)
        assert bool((edges.diff() > 0).all())
        embedding = LogEmbedding(32, 32.0, 4)
        assert embedding.bucket(torch.tensor([0, 1, 2**62])).tolist() == [0, 1, 31]

    def test_events_after_the_impression_count_as_now(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[1]])
        batch = replace(batch, event_time={"clicks": batch.time + 5})
        assert event_age(batch, "clicks", torch.tensor([0])).tolist() == [0]

    def test_missing_impression_times(self, kit: ModuleType) -> None:
        batch = replace(kit.make_batch(kit.SCHEMAS["one_group"], [[1]]), time=None)
        with pytest.raises(RequestError, match="no impression times"):
            event_age(batch, "clicks", torch.tensor([0]))


class TestRotation:
    def test_scores_depend_on_the_difference_of_angles(self) -> None:
        q, k = torch.randn(2, 2, 1, 6)
        angles = torch.rand(2, 3)
        shift = torch.rand(1, 3)
        first = (rotate(q, angles) * rotate(k, angles[[1, 0]])).sum(-1)
        second = (rotate(q, angles + shift) * rotate(k, angles[[1, 0]] + shift)).sum(-1)
        torch.testing.assert_close(first, second)
        torch.testing.assert_close(rotate(q, angles).norm(dim=-1), q.norm(dim=-1))

    def test_pairs_are_interleaved(self) -> None:
        x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
        a, b = 0.3, 1.1
        want = [math.cos(a) - 2 * math.sin(a), math.sin(a) + 2 * math.cos(a), 3 * math.cos(b) - 4 * math.sin(b), 3 * math.sin(b) + 4 * math.cos(b)]
        torch.testing.assert_close(rotate(x, torch.tensor([[a, b]]))[0, 0], torch.tensor(want))

    def test_dtype_is_kept_and_empty_is_fine(self) -> None:
        assert rotate(torch.randn(3, 2, 4).bfloat16(), torch.rand(3, 2)).dtype == torch.bfloat16
        assert rotate(torch.empty(0, 2, 2, 4), torch.empty(0, 2)).shape == (0, 2, 2, 4)


class TestEventTokens:
    def make(self, kit: ModuleType, **options: object) -> EventTokens:
        torch.manual_seed(0)
        return EventTokens(kit.CLICKS, 8, SequenceOptions.model_validate({"dim": 8, "heads": 2} | options))

    def test_formula(self, kit: ModuleType) -> None:
        layer = self.make(kit)
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[3], [0], [2]])
        embedded = {"clicks.item": torch.randn(5, 12), "clicks.shop": torch.randn(5, 8)}
        events = layer(batch, embedded)
        assert layer.project is not None
        assert layer.age is not None
        row = torch.tensor([0, 0, 0, 2, 2])
        x = torch.cat([embedded["clicks.item"][:, :8], embedded["clicks.shop"], batch.event_dense["clicks.price"]], dim=1)
        when = layer.place(torch.tensor([2, 1, 0, 1, 0])) + layer.age(batch.time[row] - batch.event_time["clicks"])
        torch.testing.assert_close(events.values, rms(linear(layer.project, x) + when), rtol=1e-4, atol=1e-5)
        assert events.max_length == 3
        assert events.age is not None
        assert events.age.dtype == torch.int64

    @pytest.mark.parametrize("island", [False, True])
    def test_columns_are_joined_in_the_dtype_of_the_projection(self, kit: ModuleType, monkeypatch: pytest.MonkeyPatch, island: bool) -> None:
        """The same bits as columns that are joined and then rounded, and gradients; a projection that does not round gets what there is."""
        layer = self.make(kit)
        assert layer.project is not None
        if island:
            plain = layer.project.forward
            layer.project.forward = lambda *given: torch.autocast("cpu", enabled=False)(plain)(*given)  # type: ignore[method-assign, assignment]
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[3], [0], [2]])
        found = []
        for parts_given in (True, False):
            torch.manual_seed(1)
            columns = {"clicks.item": torch.randn(5, 12, requires_grad=True), "clicks.shop": torch.randn(5, 8, requires_grad=True)}
            joined, project = [], layer.project.forward
            with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
                if not parts_given:
                    patch.setattr(layer.project, "forward", lambda x, when, project=project: project(torch.cat(x, dim=-1), when))
                cat = torch.cat
                patch.setattr(torch, "cat", lambda x, dim=0, cat=cat, joined=joined: joined.append(cat(x, dim=dim)) or joined[-1])
                values = layer(batch, columns).values
            found.append([values, *torch.autograd.grad(values.float().square().sum(), list(columns.values()))])
            assert joined[0].dtype is (torch.bfloat16 if parts_given and not island else torch.float32)
        assert all(torch.equal(mine, want) for mine, want in zip(*found, strict=True))

    def test_columns_that_disagree_are_named(self, kit: ModuleType) -> None:
        batch = kit.make_batch(kit.SCHEMAS["one_group"], [[3]])
        with pytest.raises(RequestError, match=r"'clicks.item': 2, 'clicks.shop': 3"):
            self.make(kit)(batch, {"clicks.item": torch.randn(2, 8), "clicks.shop": torch.randn(3, 8)})

    def test_batches_of_other_sizes_are_compiled_for_once(self, kit: ModuleType) -> None:
        """Once for the first number of events and once for any; a size that is hashed would be compiled for by itself."""
        layer, graphs = self.make(kit), []

        def kept(module: Any, inputs: Any) -> Any:
            graphs.append(module)
            return module.forward

        counted = torch.compile(lambda batch, embedded: embedded["clicks.item"] * layer.events(batch, embedded), backend=kept, fullgraph=True)
        torch._dynamo.reset()
        for count in (3, 5, 8, 6, 9):
            embedded = {name: torch.ones(count, 8) for name in ("clicks.item", "clicks.shop")}
            assert float(counted(kit.make_batch(kit.SCHEMAS["one_group"], [[count]]), embedded)[0, 0]) == count
        assert len(graphs) == 2

    def test_rope_by_time_needs_times(self, kit: ModuleType) -> None:
        with pytest.raises(RequestError, match="no event times"):
            EventTokens(replace(kit.CLICKS, time=False), 8, SequenceOptions(rope="time"))

    def test_only_times(self, kit: ModuleType) -> None:
        layer = EventTokens(replace(kit.CLICKS, ids=(), dense=()), 8, SequenceOptions(dim=8, attention="off"))
        events = layer(kit.make_batch(kit.SCHEMAS["one_group"], [[2], [1]]), {})
        assert events.values.shape == (3, 8)
        assert events.angles is None
        assert layer.flops(3) == 0

    def test_flops(self, kit: ModuleType) -> None:
        assert self.make(kit).flops(10) == 10 * 2 * (8 + 8 + 1) * 8


class TestPersonalFfn:
    @pytest.mark.parametrize("tau", [None, 3.0])
    def test_gdpa_form(self, tau: float | None) -> None:
        options = SequenceOptions(dim=8, heads=2, keys_per_token=3, tau=tau, activation="silu")
        events, sources = events_of(), torch.randn(4, 2, 5)
        layer = PersonalFfn(2, 5, options)
        out = events.holding(*layer(events, sources)).summed()
        key, value = layer.make(sources)
        for r, part in enumerate(rows_of(events)):
            s = events.values[part]
            q = linear(layer.query, rms(s)).view(-1, 2, 4)
            scores = torch.einsum("ihd,jhd->hij", q, key[r]) / (tau or 2.0)
            o = torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores), value[r]).flatten(1)
            torch.testing.assert_close(out[part], s + layer.out(o), rtol=1e-4, atol=1e-5)

    def test_fused_form(self) -> None:
        options = SequenceOptions(dim=8, heads=2, keys_per_token=3, pffn="fused")
        events, sources = events_of(), torch.randn(4, 2, 5)
        layer = PersonalFfn(2, 5, options)
        out = events.holding(*layer(events, sources)).summed()
        key, value = layer.make(sources)
        for r, part in enumerate(rows_of(events)):
            s = events.values[part]
            ln = torch.nn.functional.layer_norm(s, (8,))
            scores = torch.einsum("ihd,jhd->hij", ln.view(-1, 2, 4), key[r]) / 2.0
            o = torch.einsum("hij,jhd->ihd", torch.nn.functional.gelu(scores), value[r]).flatten(1) + ln
            torch.testing.assert_close(out[part], rms(o) + s, rtol=1e-4, atol=1e-5)

    def test_rows_get_their_own_network(self) -> None:
        events = events_of(lengths=[2, 2])
        events = events._replace(values=events.values[:2].repeat(2, 1))
        layer = PersonalFfn(2, 5, SequenceOptions(dim=8, heads=2))
        _, same = layer(events, torch.randn(1, 2, 5).expand(2, 2, 5))
        torch.testing.assert_close(same[:2], same[2:])
        _, differ = layer(events, torch.randn(2, 2, 5))
        assert not torch.allclose(differ[:2], differ[2:])

    def test_flops_by_hand(self) -> None:
        import numpy as np

        lengths = np.array(LENGTHS)
        generate = 4 * 2 * 2 * 5 * (2 * 3 * 8)
        pairs = 2 * 2 * 9 * 6 * 8
        gdpa = PersonalFfn(2, 5, SequenceOptions(dim=8, heads=2, keys_per_token=3))
        assert gdpa.flops(lengths) == generate + pairs + 2 * 9 * 2 * 64
        fused = PersonalFfn(2, 5, SequenceOptions(dim=8, heads=2, keys_per_token=3, pffn="fused"))
        assert fused.flops(lengths) == generate + pairs


class TestCrossing:
    def test_keys_are_generated_plus_shared(self) -> None:
        layer = KeyValues(2, 3, 5, 2, 4)
        sources = torch.randn(7, 2, 5)
        key, value = layer(sources)
        assert key.shape == value.shape == (7, 6, 2, 4)
        want = (sources[3, 1] @ layer.weight[0].t()).view(3, 2, 4) + layer.shared[0, 3:]
        torch.testing.assert_close(key[3, 3:], want)
        want = (sources[3, 0] @ layer.weight[1].t()).view(3, 2, 4) + layer.shared[1, :3]
        torch.testing.assert_close(value[3, :3], want)

    @pytest.mark.parametrize(("sources", "rows"), [(2, 7), (1, 1), (9, 3), (2, 0)])
    @pytest.mark.parametrize("compiled", [False, True])
    def test_keys_and_their_gradients_against_sums(self, sources: int, rows: int, compiled: bool) -> None:
        layer = KeyValues(sources, 3, 5, 2, 4).double()
        x = torch.randn(rows, 5, sources, dtype=torch.float64).transpose(1, 2).requires_grad_(True)
        want = [(x @ layer.weight[i].t()).view(rows, 3 * sources, 2, 4) + layer.shared[i] for i in range(2)]
        call: Any = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
        inputs, upstream = (x, layer.weight, layer.shared), [torch.randn_like(part) for part in want]
        for mine, plain in zip(call(x), want):
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)
        for mine, plain in zip(torch.autograd.grad(call(x), inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("wanted", [0, 1, 2])
    def test_each_gradient_alone_and_of_one_output(self, wanted: int) -> None:
        layer, x = KeyValues(2, 3, 5, 2, 4), torch.randn(7, 2, 5)
        inputs = (x, layer.weight, layer.shared)
        for i, tensor in enumerate(inputs):
            tensor.requires_grad_(i == wanted)
        plain = (x @ layer.weight[1].t()).view(7, -1, 2, 4) + layer.shared[1]
        mine, want = (torch.autograd.grad(out.square().sum(), inputs[wanted])[0] for out in (layer(x)[1], plain))
        torch.testing.assert_close(mine, want)

    def test_weight_gen(self) -> None:
        layer = WeightGen(4, 2, 6)
        x = torch.randn(3, 4, 6)
        z = torch.einsum("st,btd->bsd", layer.compress.weight, x)
        torch.testing.assert_close(layer(x), layer.norm(z + layer.mlp(z)))
        assert layer.flops(3) == 3 * 2 * (4 * 2 * 6 + 2 * (6 * 12 + 12 * 6))


class TestSelfAttention:
    @pytest.mark.parametrize("kind", ["window", "block", "full"])
    @pytest.mark.parametrize("rope", ["off", "position"])
    def test_against_a_loop(self, kind: str, rope: str) -> None:
        how = {"window": {"window": 1}, "block": {"attention": "block", "block": 2}, "full": {"window": None}}[kind]
        options = SequenceOptions.model_validate({"dim": 8, "heads": 2, "rope": rope} | how)
        events = events_of(angles=2 if rope == "position" else None)
        layer = SelfAttention(options, 5)
        out = events.holding(*layer(events)).summed()
        for part in rows_of(events):
            s = events.values[part]
            q, k, v = linear(layer.qkv, rms(s)).view(-1, 3, 2, 4).unbind(1)
            if events.angles is not None:
                q, k = rotate(q, events.angles[part]), rotate(k, events.angles[part])
            i = torch.arange(len(s))
            near = {"window": (i[:, None] - i).abs() <= 1, "block": i[:, None] // 2 == i // 2, "full": i[:, None] == i[:, None]}[kind]
            scores = (torch.einsum("ihd,jhd->hij", q, k) / 2.0).masked_fill(~near.expand(len(s), len(s)), -torch.inf)
            o = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
            torch.testing.assert_close(out[part], s + layer.out(o), rtol=1e-4, atol=1e-5)

    def test_a_window_over_the_longest_history_is_none(self) -> None:
        assert SelfAttention(SequenceOptions(window=4), 5).window is None
        assert SelfAttention(SequenceOptions(window=3), 5).window == 3
        assert SelfAttention(SequenceOptions(window=3), 5).slot.features == {"window"}

    @pytest.mark.parametrize(
        ("how", "pairs"), [({"window": None}, 9 + 25 + 1), ({"window": 1}, 7 + 13 + 1), ({"attention": "block", "block": 2}, 5 + 9 + 1)]
    )
    def test_flops_by_hand(self, how: dict[str, object], pairs: int) -> None:
        import numpy as np

        layer = SelfAttention(SequenceOptions.model_validate({"dim": 8, "heads": 2} | how), 5)
        assert layer.flops(np.array(LENGTHS)) == 9 * 2 * (8 * 24 + 8 * 8) + 2 * 2 * pairs * 8

    def test_dropout_only_in_training(self) -> None:
        events = events_of(angles=2)
        layer = SelfAttention(SequenceOptions(dim=8, heads=2, dropout=0.5), 5)
        assert not torch.equal(layer(events)[1], layer(events)[1])
        assert torch.equal(layer.eval()(events)[1], layer(events)[1])
