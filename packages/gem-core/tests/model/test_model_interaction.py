"""Pooling, interaction experts and heads, against their formulas and hand counts."""

from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.batch import Jagged, KeyedJagged, lengths_to_offsets
from gem_core.model.experts import CrossExpert, DeepExpert, Ensemble, LinearExpert, WukongExpert
from gem_core.model.heads import Heads
from gem_core.model.layers import AddNorm, Mlp, NormLinear, TokenMix, compact, lay_out, pick
from gem_core.model.options import CrossOptions, DeepOptions, HeadOptions, LinearOptions, SequenceOptions, WukongOptions
from gem_core.model.pooling import Asked, SeedPooling, SumKronLinear
from gem_core.model.sequence import Events, PersonalFfn, SelfAttention
from gem_core.ops.gated_residual import reference as gated_residual_reference
from gem_core.select.policy import use
from gem_core.spec import RequestError

LENGTHS = [3, 0, 5, 1]


def make_events(dim: int = 8) -> Events:
    torch.manual_seed(0)
    return Events(torch.randn(9, dim), lengths_to_offsets(torch.tensor(LENGTHS)), 5, None, None)


def rms(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def linear(layer: NormLinear, x: Tensor) -> Tensor:
    """The layer's matrix without its norm."""
    return nn.functional.linear(x, layer.weight, layer.bias)


def _squares(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum()


class TestPooling:
    @pytest.mark.parametrize(("further", "rows"), [(0, 7), (2, 7), (1, 1), (2, 0)])
    @pytest.mark.parametrize("strided", [False, True])
    def test_sum_kron_is_a_sum_of_products_and_hands_further_tokens_on(self, further: int, rows: int, strided: bool) -> None:
        layer = SumKronLinear(4, 3, 5, 6, 2).double()
        x = torch.randn(5, rows, 4 + further, dtype=torch.float64).permute(1, 2, 0)
        x = (x if strided else x.contiguous()).requires_grad_(True)
        want = sum(layer.tokens[i] @ x[:, :4] @ layer.channels[i] for i in range(2)), x[:, 4:]
        folded, rest = layer(x)
        assert torch.equal(rest, want[1])
        torch.testing.assert_close(folded, want[0], rtol=0, atol=1e-12)
        inputs, upstream = (x, *layer.parameters()), [torch.randn_like(part) for part in (folded, rest)]
        for mine, plain in zip(torch.autograd.grad((folded, rest), inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
            torch.testing.assert_close(mine, plain, rtol=0, atol=1e-12)
        assert sum(p.numel() for p in layer.parameters()) == 2 * (4 * 3 + 5 * 6)
        assert layer.flops(7) == 7 * 2 * 2 * (3 * 4 * 5 + 3 * 5 * 6)

    def test_sum_kron_compiles_as_a_whole(self) -> None:
        """With gradients: a compiler refuses a part of a tensor as the place of a product's result."""
        layer, x = SumKronLinear(4, 3, 5, 6, 2), torch.randn(7, 6, 5, requires_grad=True)
        compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
        inputs = (x, *layer.parameters())
        for mine, want in zip(torch.autograd.grad(_squares(compiled(x)), inputs), torch.autograd.grad(_squares(layer(x)), inputs)):
            torch.testing.assert_close(mine, want)

    def test_gradients_of_further_tokens_alone(self) -> None:
        layer, x = SumKronLinear(4, 3, 5, 6, 2), torch.randn(7, 6, 5, requires_grad=True)
        (of_x,) = torch.autograd.grad(layer(x)[1].sum(), x)
        assert torch.equal(of_x[:, :4], torch.zeros(7, 4, 5))
        assert torch.equal(of_x[:, 4:], torch.ones(7, 2, 5))

    @pytest.mark.parametrize(("seeds", "rows"), [(3, 4), (1, 1), (2, 0)])
    @pytest.mark.parametrize(("dim", "dtype"), [(3, torch.float64), (4, torch.bfloat16), (3, torch.bfloat16), (2, torch.float32)])
    def test_seeds_stand_before_each_rows_queries(self, seeds: int, rows: int, dim: int, dtype: torch.dtype) -> None:
        """Seeds whose vectors are whole numbers of eight bytes, and others; from the middle of a tensor, and with heads and channels exchanged."""
        held = torch.randn(seeds + 1, dim, 2, dtype=dtype)
        shared, mine = held[1:].transpose(1, 2).requires_grad_(True), torch.randn(rows, 2, 2, dim, dtype=dtype, requires_grad=True)
        asked: Any = Asked.apply
        assert torch.equal(asked(shared, mine), torch.cat([shared.expand(rows, -1, -1, -1), mine], dim=1))
        if dtype is torch.float64:
            assert torch.autograd.gradcheck(asked, (shared, mine))

    def test_seeds_that_begin_within_eight_bytes(self) -> None:
        shared, mine = torch.arange(9, dtype=torch.bfloat16)[1:].view(1, 2, 4), torch.randn(3, 1, 2, 4).to(torch.bfloat16)
        asked: Any = Asked.apply
        assert torch.equal(asked(shared, mine)[:, 0], shared.expand(3, 2, 4))

    def test_linear_maps_of_events_without_bias(self) -> None:
        options = SequenceOptions(dim=8, heads=2, seeds=3, bias=False, rope="off")
        layers = [SeedPooling(2, 6, options), PersonalFfn(2, 6, options), SelfAttention(options, 9)]
        biases = [name for layer in layers for name, _ in layer.named_parameters() if name.endswith("bias")]
        assert biases == ["fold.bias", "norm.bias", "query.bias", "found.bias"]  # of maps of rows
        pooling, feed_forward, attention = layers
        events = make_events()
        assert [part.shape for part in (*attention(events), *feed_forward(events, torch.randn(4, 2, 6)))] == 4 * [(9, 8)]
        assert pooling(events, torch.randn(4, 2, 6))[0].shape == (4, 5, 6)

    @pytest.mark.parametrize(("seeds", "queries", "folded"), [(3, 2, None), (3, 0, None), (0, 2, None), (3, 2, 2), (3, 0, 5)])
    def test_against_a_loop(self, seeds: int, queries: int, folded: int | None) -> None:
        events = make_events()
        layer = SeedPooling(queries, 6, SequenceOptions(dim=8, heads=2, seeds=seeds, pooled_tokens=folded))
        asked = torch.randn(4, queries, 6)
        out, stream = layer(events, asked)
        assert stream is events.values
        assert out.shape == (4, layer.tokens, 6)
        assert layer.tokens == ((folded or seeds) if seeds else 0) + queries
        edges = events.offsets.tolist()
        for r in range(4):
            k, v = linear(layer.key_value, rms(events.values[edges[r] : edges[r + 1]])).view(-1, 2, 2, 4).unbind(1)
            q = [layer.seeds] if layer.seeds is not None else []
            q += [linear(layer.query, rms(asked[r])).view(-1, 2, 4)] if queries else []
            scores = torch.einsum("ihd,jhd->hij", torch.cat(q), k) / 2.0
            found = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
            want = []
            if layer.fold is not None:
                fold = layer.fold(found[None, :seeds])
                want.append(layer.norm((fold[0] if folded else fold)[0]))
            if queries:
                want.append(rms(linear(layer.found, found[seeds:]) + asked[r]))
            torch.testing.assert_close(out[r], torch.cat(want), rtol=1e-4, atol=1e-5)

    def test_flops_by_hand(self) -> None:
        lengths = np.array(LENGTHS)
        key_value, attend = 9 * 2 * 8 * 16, 2 * 2 * 8 * 9 * 5
        rows = 4 * (2 * 2 * 6 * 8 + 2 * 2 * 8 * 6)
        plain = SeedPooling(2, 6, SequenceOptions(dim=8, heads=2, seeds=3))
        assert plain.flops(lengths) == key_value + attend + rows + 4 * 3 * 2 * 8 * 6
        folded = SeedPooling(2, 6, SequenceOptions(dim=8, heads=2, seeds=3, pooled_tokens=2))
        assert folded.fold is not None
        assert folded.flops(lengths) == key_value + attend + rows + SumKronLinear(3, 2, 8, 6, 2).flops(4)


class TestExperts:
    def test_wukong_formula(self) -> None:
        expert = WukongExpert(5, 4, 6, WukongOptions(rank=3, hidden=(7,)))
        x = torch.randn(2, 5, 6)
        assert expert.compress is not None
        assert expert.linear is not None
        pairs = x @ (x.transpose(1, 2) @ expert.compress)
        torch.testing.assert_close(expert(x)[:, :2], expert.mlp(expert.norm(pairs.flatten(1))).view(2, 2, 6), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(expert(x)[:, 2:], torch.einsum("ot,btd->bod", expert.linear.weight, x))
        hand = 2 * (5 * 3 * 6) * 2 + 2 * (15 * 7 + 7 * 12) + 2 * 5 * 2 * 6
        assert expert.flops(3) == 3 * hand

    @pytest.mark.parametrize(("rank", "linear", "tokens"), [(3, 2, 5), (8, 8, 7), (4, 0, 5), (None, 2, 5), (None, 0, 3)])
    @pytest.mark.parametrize("rows", [0, 3])
    def test_wukong_and_its_gradients_against_separate_products(self, rank: int | None, linear: int, tokens: int, rows: int) -> None:
        expert = WukongExpert(tokens, linear + 2, 6, WukongOptions(rank=rank, linear_tokens=linear, hidden=())).double()
        x = torch.randn(rows, 6, tokens, dtype=torch.float64).transpose(1, 2).requires_grad_(True)
        other = x if expert.compress is None else expert.compress.t() @ x
        want = expert.mlp(expert.norm((x @ other.mT).flatten(1))).view(-1, 2, 6)
        if expert.linear is not None:
            want = torch.cat([want, expert.linear.weight @ x], dim=1)
        torch.testing.assert_close(expert(x), want, rtol=0, atol=1e-12)
        upstream, inputs = torch.randn_like(want), (x, *expert.parameters())
        for mine, plain in zip(torch.autograd.grad(expert(x), inputs, upstream), torch.autograd.grad(want, inputs, upstream)):
            torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-12)

    def test_wukong_under_autocast_gives_bfloat16_and_float32_gradients_of_weights(self) -> None:
        expert = WukongExpert(5, 4, 6, WukongOptions(rank=3, hidden=()))
        x = torch.randn(2, 5, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            low = expert(x)
        assert low.dtype is torch.bfloat16
        high = expert(x)
        torch.testing.assert_close(low.float(), high, rtol=0.05, atol=0.05)
        inputs = (x, *expert.parameters())
        for mine, want in zip(torch.autograd.grad(low.float().sum(), inputs), torch.autograd.grad(high.sum(), inputs)):
            assert mine.dtype is torch.float32
            torch.testing.assert_close(mine, want, rtol=0.1, atol=0.1)

    def test_wukong_all_pairs_and_no_linear_part(self) -> None:
        expert = WukongExpert(5, 4, 6, WukongOptions(rank=None, linear_tokens=0, hidden=()))
        x = torch.randn(2, 5, 6)
        torch.testing.assert_close(expert(x), expert.mlp(expert.norm((x @ x.transpose(1, 2)).flatten(1))).view(2, 4, 6))
        assert expert.flops(1) == 2 * 25 * 6 + 2 * 25 * 24

    def test_wukong_without_a_machine(self) -> None:
        with pytest.raises(RequestError, match="linear_tokens = 4"):
            WukongExpert(5, 4, 6, WukongOptions(linear_tokens=4))

    def test_cross_formula(self) -> None:
        expert = CrossExpert(3, 2, 4, CrossOptions(depth=2, rank=5))
        x = torch.randn(2, 3, 4)
        z = x0 = x.flatten(1)
        for down, up in zip(expert.down, expert.up):
            z = x0 * (z @ down.weight.t() @ up.weight.t() + up.bias) + z  # type: ignore[operator, union-attr]
        torch.testing.assert_close(expert(x), torch.einsum("ot,btd->bod", expert.mix.weight, z.view(2, 3, 4)))
        assert expert.flops(1) == 2 * (2 * 2 * 12 * 5 + 3 * 2 * 4)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_compiled_cross_against_its_kernel(self, dtype: torch.dtype) -> None:
        """By inductor, whose element-by-element code rounds once as the op does."""
        expert, x = CrossExpert(3, 2, 8, CrossOptions(depth=2, rank=5)).to(dtype), torch.randn(5, 3, 8, dtype=dtype, requires_grad=True)
        expert.cross.bind(gated_residual_reference)
        compiled: Any = torch.compile(expert, fullgraph=True)
        inputs, upstream = (x, *expert.parameters()), torch.randn(5, 2, 8, dtype=dtype)
        tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-12
        mine, want = ((out, *torch.autograd.grad(out, inputs, upstream)) for out in (compiled(x), expert(x)))
        for found, plain in zip(mine, want):
            assert found.dtype is dtype
            assert float((found - plain).detach().norm()) <= tolerance * float(plain.detach().norm())

    @pytest.mark.parametrize(("how", "fuses"), [("policy", True), ("name", False), ("recipe", False)])
    def test_a_named_kernel_is_called_in_compiled_blocks_too(self, how: str, fuses: bool) -> None:
        expert, x = CrossExpert(3, 2, 4, CrossOptions(depth=2, rank=5)), torch.randn(5, 3, 4)
        called: list[Tensor] = []

        def kernel(x: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
            called.append(x)
            return gated_residual_reference(x, gate, residual)

        expert.cross.asked = "reference" if how == "recipe" else None
        with use(gated_residual="reference") if how == "name" else nullcontext():
            expert.cross.bind(kernel, "reference")
        found: Any = torch.compile(expert, backend="eager")(x)
        assert len(called) == (0 if fuses else 2)
        assert torch.equal(found, expert(x))

    def test_deep_and_linear(self) -> None:
        x = torch.randn(2, 3, 4)
        deep, linear = DeepExpert(3, 2, 4, DeepOptions(hidden=(5,))), LinearExpert(3, 2, 4, LinearOptions())
        torch.testing.assert_close(deep(x), deep.mlp(x.flatten(1)).view(2, 2, 4))
        torch.testing.assert_close(linear(x), linear.mix.weight @ x)
        assert deep.flops(1) == 2 * (12 * 5 + 5 * 8)
        assert linear.flops(1) == 2 * 3 * 2 * 4


class TestEnsemble:
    ALL = (WukongOptions(hidden=(5,)), CrossOptions(rank=2), DeepOptions(hidden=(5,)), LinearOptions())

    def make(self, tokens_in: int = 9, carried: int = 4, join: str = "sum", partition: bool = False) -> Ensemble:
        return Ensemble(tokens_in, carried, 6, 4, self.ALL, join=join, partition=partition, dropout=0.0)

    def test_sum_with_learned_shortcut(self) -> None:
        layer = self.make()
        z, x = torch.randn(2, 9, 4), torch.randn(2, 4, 4)
        assert layer.shortcut is not None
        want = layer.norm(sum(expert(z) for expert in layer.experts) + layer.shortcut(x))
        torch.testing.assert_close(layer(z, x), want)

    def test_identity_shortcut(self) -> None:
        layer = self.make(carried=6)
        assert layer.shortcut is None
        z = torch.randn(2, 9, 4)
        assert not torch.equal(layer(z, torch.zeros(2, 6, 4)), layer(z, torch.randn(2, 6, 4)))

    @pytest.mark.parametrize("join", ["sum", "concat"])
    @pytest.mark.parametrize("partition", [False, True])
    def test_shapes_and_shares(self, join: str, partition: bool) -> None:
        layer = self.make(join=join, partition=partition)
        assert layer(torch.randn(2, 9, 4), torch.randn(2, 4, 4)).shape == (2, 6, 4)
        assert [e.tokens_in for e in layer.experts] == ([3, 2, 2, 2] if partition else [9] * 4)
        assert [e.tokens_out for e in layer.experts] == ([2, 2, 1, 1] if join == "concat" else [6] * 4)

    def test_a_partitioned_expert_sees_only_its_tokens(self) -> None:
        layer = self.make(join="concat", partition=True)
        z, x = torch.randn(1, 9, 4), torch.randn(1, 4, 4)
        z.requires_grad_(True)
        layer.experts[3](z[:, 3::4]).sum().backward()
        assert z.grad is not None
        assert z.grad[0].abs().sum(1).nonzero().flatten().tolist() == [3, 7]
        assert layer(z, x).shape == (1, 6, 4)

    def test_too_many_experts(self) -> None:
        with pytest.raises(RequestError, match="4 experts on a partition: the layer has 3 tokens"):
            self.make(tokens_in=3, partition=True)
        with pytest.raises(RequestError, match="4 experts side by side"):
            Ensemble(9, 4, 3, 4, self.ALL, join="concat", partition=False, dropout=0.0)

    def test_flops_add_up(self) -> None:
        layer = self.make()
        assert layer.flops(2) == sum(e.flops(2) for e in layer.experts) + 2 * 2 * 4 * 6 * 4


class TestHeads:
    def test_shared_network_under_the_tasks(self, kit: ModuleType) -> None:
        heads = Heads(kit.FULL, 10, HeadOptions(hidden=(4,), shared=(6, 5)))
        batch = kit.make_batch(kit.FULL, [[0, 0]] * 3)
        logits = heads(torch.randn(3, 10), batch)
        assert {task: logit.shape for task, logit in logits.items()} == {"ctr": (3,), "cvr": (3,)}
        assert heads.flops(3) == 3 * 2 * (10 * 6 + 6 * 5 + 2 * (5 * 4 + 4))
        assert isinstance(heads.shared, Mlp)
        assert isinstance(heads.shared[-2], nn.GELU)

    def test_first_order_terms_are_added(self, kit: ModuleType) -> None:
        heads = Heads(kit.FULL, 10, HeadOptions())
        batch = kit.make_batch(kit.FULL, [[0, 0]] * 3)
        x, first = torch.randn(3, 10), torch.randn(3, 2)
        plain, added = heads(x, batch), heads(x, batch, first)
        torch.testing.assert_close(added["cvr"] - plain["cvr"], first[:, 1])

    def test_case_H25_each_row_gets_its_own_domains_head(self, kit: ModuleType) -> None:
        heads = Heads(kit.FULL, 10, HeadOptions(hidden=(), domain="country"))
        batch = kit.make_batch(kit.FULL, [[0, 0]] * 4)
        columns = {key: batch.ids[key] for key in batch.ids.keys}
        country = torch.tensor([2, 0, 1, 2])
        columns["country"] = Jagged(country, torch.arange(5), 1)
        batch = replace(batch, ids=KeyedJagged.from_columns(columns, 4))
        x = torch.randn(4, 10)
        logits = heads(x, batch)
        for i, task in enumerate(("ctr", "cvr")):
            layer = heads.networks[i][0]  # type: ignore[index]
            want = [(heads.norm(x[r]) @ layer.weight[c] + layer.bias[c]) for r, c in enumerate(country.tolist())]
            torch.testing.assert_close(logits[task], torch.stack(want))

    @pytest.mark.parametrize("domain", ["nothing", "tags"])
    def test_domain_must_be_a_single_id_feature(self, kit: ModuleType, domain: str) -> None:
        with pytest.raises(RequestError, match=r"\['country', 'item', 'user'\]"):
            Heads(kit.FULL, 10, HeadOptions(domain=domain))


class TestLayers:
    @pytest.mark.parametrize("norm", ["rms", "layer"])
    def test_norm_linear_both_places(self, norm: str) -> None:
        def plain(x: Tensor) -> Tensor:
            return rms(x) if norm == "rms" else nn.functional.layer_norm(x, x.shape[-1:])

        x, residual = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
        before, after = NormLinear(4, 5, norm=norm), NormLinear(4, 5, where="after", residual=True, norm=norm)
        torch.testing.assert_close(before(x), linear(before, plain(x)))
        assert after.gain is not None
        after.gain.data.uniform_(0.5, 2.0)
        torch.testing.assert_close(after(x, residual), plain(linear(after, x) + residual) * after.gain)
        assert before.slot.features == {norm, "before"}
        assert after.slot.features == {norm, "after", "affine", "residual"}
        assert before.flops(6) == 6 * 2 * 4 * 5

    def test_add_norm_is_a_layer_norm_with_a_sum_and_a_gate(self) -> None:
        x, residual, gate = (torch.randn(2, 3, 4) for _ in range(3))
        mine, plain = AddNorm(4, residual=True, gate=True), nn.LayerNorm(4)
        plain.weight.data.uniform_(0.5, 2.0)
        plain.bias.data.normal_()
        mine.load_state_dict(plain.state_dict())
        torch.testing.assert_close(mine(x, residual, gate), plain(x + residual) * gate)
        torch.testing.assert_close(mine(x), plain(x))
        assert mine.slot.features == {"layer", "affine", "residual", "gate"}
        assert AddNorm(4).slot.features == {"layer", "affine"}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert mine(x, residual, gate).dtype is torch.bfloat16

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.complex128])
    def test_compact_is_contiguous(self, dtype: torch.dtype) -> None:
        """Parts that begin within eight bytes or are no whole number of them, exchanged and repeated dimensions, none at all."""
        x = torch.arange(2 * 6 * 16).view(2, 6, 16).to(dtype)
        narrowed = (x[:, 1:], x[..., 8:], x[..., 1:9], x[..., :7], x[..., ::2])
        for part in (x, *narrowed, x.transpose(0, 1), x.mT, x[:, :1].expand(-1, 3, -1), x[0, 0, 1], x[:0]):
            assert compact(part).is_contiguous()
            assert torch.equal(compact(part), part)
        assert compact(x).data_ptr() == x.data_ptr()

    def test_compact_copies_words_of_eight_bytes(self) -> None:
        seen: list[torch.dtype] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function is torch.ops.aten.clone.default:
                    seen.append(args[0].dtype)
                return function(*args, **(kwargs or {}))

        x = torch.zeros(2, 6, 8, dtype=torch.bfloat16)
        with Watch():
            compact(x[:, 1:])
            compact(x[..., :6])
        assert seen == [torch.int64, torch.bfloat16]

    def test_pick(self) -> None:
        x = torch.randn(2, 4, 3)
        assert torch.equal(pick(x, [3, 1]), x[:, [3, 1]])
        assert pick(x, []).shape == (2, 0, 3)

    @pytest.mark.parametrize(("out", "tokens"), [(2, 3), (8, 5), (16, 8), (3, 8), (1, 1)])
    @pytest.mark.parametrize("rows", [0, 1, 4])
    def test_token_mix(self, out: int, tokens: int, rows: int) -> None:
        """Either number of tokens, neither or both lie along rows of memory; x is strided and rows may be missing."""
        mix = TokenMix(tokens, out).double()
        x = torch.randn(5, rows, tokens, dtype=torch.float64).permute(1, 2, 0).requires_grad_(True)
        want = torch.einsum("ot,btd->bod", mix.weight, x)
        torch.testing.assert_close(mix(x), want, rtol=0, atol=1e-12)
        upstream = torch.randn_like(want)
        for mine, other in zip(torch.autograd.grad(mix(x), (mix.weight, x), upstream), torch.autograd.grad(want, (mix.weight, x), upstream)):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)

    def test_token_mix_leaves_further_tokens_out(self) -> None:
        mix, x = TokenMix(3, 2), torch.randn(4, 5, 6, requires_grad=True)
        torch.testing.assert_close(mix(x), mix(x[:, :3]))
        (of_x,) = torch.autograd.grad(mix(x).sum(), x)
        assert torch.equal(of_x[:, 3:], torch.zeros(4, 2, 6))
        assert mix.flops(4, 6) == 2 * 4 * 6 * 3 * 2

    @pytest.mark.parametrize(("out", "tokens", "stride"), [(16, 90, (1, 16)), (14, 32, (32, 1)), (2, 7, (7, 1)), (8, 16, (1, 8))])
    def test_aligned_tokens_lie_along_rows(self, out: int, tokens: int, stride: tuple[int, int]) -> None:
        laid = lay_out(torch.randn(out, tokens), torch.bfloat16)
        assert laid.shape == (out, tokens)
        assert laid.stride() == stride
        assert laid.dtype is torch.bfloat16

    @pytest.mark.parametrize("out", [1, 8])
    def test_a_map_of_tokens_sums_its_gradient_over_rows_in_float32(self, out: int) -> None:
        mix = TokenMix(3, out)
        with torch.autocast("cpu", torch.bfloat16):
            made = mix(torch.ones(301, 3, 1))
        made.backward(torch.ones_like(made))
        assert made.dtype is torch.bfloat16
        assert mix.weight.grad is not None
        assert torch.equal(mix.weight.grad, torch.full((out, 3), 301.0))  # in bfloat16 300 or 302
