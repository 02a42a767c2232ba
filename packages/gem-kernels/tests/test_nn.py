"""The layers for foreign models."""

import pytest
import torch

from gem_core.ops import block_attention, gdpa, hstu_attention, jagged_attention, pffn
from gem_core.spec import RequestError
from gem_core.testing import assert_close
from gem_kernels.nn import BlockAttention, GdpaAttention, HstuAttention, JaggedAttention, PffnAttention, positions

LAYERS = [GdpaAttention, JaggedAttention]


def rows(lengths, width, seed=0):
    x = torch.randn(sum(lengths), width, generator=torch.Generator().manual_seed(seed))
    return x, torch.tensor([0, *lengths]).cumsum(0)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def test_gdpa_layer_is_projection_attention_projection():
    layer = GdpaAttention(12, 3, activation="silu", window=2, backend="reference")
    x, offsets = rows([4, 0, 3], 12)
    q = layer.q(x).view(7, 3, 4)
    k, v = layer.kv(x).view(7, 2, 3, 4).unbind(1)
    o = gdpa(q, k, v, offsets, offsets, max_q=4, max_k=4, activation="silu", scale=0.5, window=2, backend="reference")
    assert_close(layer(x, offsets, 4), layer.out(o.reshape(7, 12)), bound=1e-6)


def test_softmax_layer_is_projection_attention_projection():
    layer = JaggedAttention(12, 4, head_dim=5, kv_heads=2, causal=True, backend="reference")
    x, offsets = rows([4, 0, 3], 12)
    q = layer.q(x).view(7, 4, 5)
    k, v = layer.kv(x).view(7, 2, 2, 5).unbind(1)
    o = jagged_attention(q, k, v, offsets, offsets, max_q=4, max_k=4, causal=True, backend="reference")
    assert_close(layer(x, offsets, 4), layer.out(o.reshape(7, 20)), bound=1e-6)


@pytest.mark.parametrize("layer_type", LAYERS)
def test_cross_attention_reads_the_context_only(layer_type):
    layer = layer_type(8, 2, backend="reference")
    x, offsets = rows([2, 1], 8)
    context, context_offsets = rows([0, 5], 8, seed=1)
    out = layer(x, offsets, 2, context, context_offsets, 5)
    assert out.shape == (3, 8)
    assert not out[:2].any(), "a row without context"
    changed = context.clone()
    changed[2] += 1
    moved = (layer(x, offsets, 2, changed, context_offsets, 5) - out).abs().sum(-1)
    assert not moved[:2].any()
    assert moved[2] > 0


@pytest.mark.parametrize("layer_type", LAYERS)
def test_every_parameter_gets_a_gradient(layer_type):
    layer = layer_type(8, 2, kv_heads=1, backend="reference")
    x, offsets = rows([3, 0, 2], 8)
    layer(x, offsets, 3).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_causal_tokens_do_not_see_what_follows():
    layer = JaggedAttention(8, 2, causal=True, backend="sdpa")
    x, offsets = rows([5], 8)
    later = x.clone()
    later[3:] += 1
    before, after = layer(x, offsets, 5), layer(later, offsets, 5)
    assert_close(after[:3], before[:3], bound=1e-6)
    assert (after[3:] - before[3:]).abs().sum() > 0


def test_backends_agree():
    layer = JaggedAttention(8, 2, causal=True, backend="reference")
    x, offsets = rows([5, 0, 2], 8)
    expected = layer(x, offsets, 5)
    layer.backend = "sdpa"
    assert_close(layer(x, offsets, 5), expected, bound=1e-5)


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(RequestError, match=r"width 10.*3 heads"):
        GdpaAttention(10, 3)
    assert GdpaAttention(10, 3, head_dim=4).out.in_features == 12


def test_half_a_context_is_refused():
    layer = GdpaAttention(8, 2)
    x, offsets = rows([2], 8)
    with pytest.raises(RequestError, match="context"):
        layer(x, offsets, 2, x)


def test_a_copied_layer_is_independent():
    from copy import deepcopy

    layer = GdpaAttention(8, 2, backend="reference")
    twin = deepcopy(layer)
    x, offsets = rows([3], 8)
    before = twin(x, offsets, 3)
    with torch.no_grad():
        layer.q.weight.zero_()
    assert_close(twin(x, offsets, 3), before, bound=0.0)
    assert layer(x, offsets, 3).abs().sum() == 0, "f(0) = 0"


def test_positions_count_from_the_start_of_each_row():
    assert positions(torch.tensor([0, 3, 3, 5]), 5).tolist() == [0, 1, 2, 0, 1]
    assert positions(torch.tensor([0]), 0).tolist() == []


def test_block_layer_is_projection_attention_projection():
    layer = BlockAttention(12, 3, block=2, base=100.0, rotate_values=True, backend="reference")
    x, offsets = rows([5, 0, 3], 12)
    q = layer.q(x).view(8, 3, 4)
    k, v = layer.kv(x).view(8, 2, 3, 4).unbind(1)
    turns = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])[:, None] * torch.tensor([1.0, 0.1])
    o = block_attention(q, k, v, offsets, max_length=5, block=2, rope=turns, rope_on_v=True, backend="reference")
    assert_close(layer(x, offsets, 5), layer.out(o.reshape(8, 12)), bound=1e-6)
    plain = BlockAttention(12, 3, base=None, rotate_values=True, backend="reference")
    assert plain(x, offsets, 5).shape == (8, 12)


def test_block_layer_norms_queries_and_keys_by_learned_gains():
    layer = BlockAttention(12, 3, qk_norm=True, backend="reference")
    x, offsets = rows([5, 0, 3], 12)
    with torch.no_grad():
        layer.q_gain.uniform_(0.5, 2.0)
        before = layer(x, offsets, 5)
        layer.q.weight.mul_(100.0)
        assert_close(layer(x, offsets, 5), before, bound=1e-3)
    layer(x, offsets, 5).square().sum().backward()
    assert layer.q_gain.grad.abs().sum() > 0
    assert layer.k_gain.grad.abs().sum() > 0


def test_hstu_layer_is_the_published_one():
    layer = HstuAttention(12, 3, window=4, backend="reference")
    x, offsets = rows([5, 0, 3], 12)
    parts = {"contextual": torch.tensor([1, 0, 0]), "targets": torch.tensor([2, 0, 1])}
    u, v, q, k = (t.reshape(8, 3, 4) for t in torch.nn.functional.silu(layer.uvqk(layer.norm(x))).split(12, dim=1))
    o = hstu_attention(q, k, v, offsets, max_length=5, window=4, **parts, backend="reference")
    expected = x + layer.out(layer.inner_norm(o.reshape(8, 12)) * u.reshape(8, 12))
    assert_close(layer(x, offsets, 5, **parts), expected, bound=1e-6)


def test_pffn_layer_gives_each_row_its_own_weights():
    layer = PffnAttention(12, 3, summary=6, hidden=5, activation="silu", backend="reference")
    x, offsets = rows([5, 0, 3], 12)
    summary = torch.randn(3, 6)
    k, v = layer.kv(summary).view(3, 2, 5, 3, 4).unbind(1)
    expected = pffn(x.view(8, 3, 4), k, v, offsets, max_q=5, activation="silu", scale=0.5, backend="reference").reshape(8, 12)
    out = layer(x, offsets, 5, summary)
    assert_close(out, expected, bound=1e-6)
    other = summary.clone()
    other[2] += 1
    moved = (layer(x, offsets, 5, other) - out).abs().sum(-1)
    assert not moved[:5].any()
    assert moved[5:].all()


@pytest.mark.parametrize(
    "layer", [BlockAttention(8, 2), HstuAttention(8, 2), PffnAttention(8, 2, summary=4, hidden=3)], ids=lambda m: type(m).__name__
)
def test_every_parameter_of_the_other_layers_gets_a_gradient(layer):
    layer.backend = "reference"
    x, offsets = rows([3, 0, 2], 8)
    extra = (torch.randn(3, 4),) if isinstance(layer, PffnAttention) else ()
    layer(x, offsets, 3, *extra).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("make", [lambda: HstuAttention(10, 3), lambda: PffnAttention(10, 3, summary=2, hidden=2)], ids=["hstu", "pffn"])
def test_heads_that_do_not_divide_the_width_are_refused_by_the_other_layers(make):
    with pytest.raises(RequestError, match=r"width 10.*3 heads"):
        make()
