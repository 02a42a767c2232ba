"""Grouped linear layers against float64 products of operands rounded group by group, stacked and ragged."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.spec import KernelUnavailable, RequestError, load_object
from gem_precision.formats import fake_quantize, find_format
from gem_precision.grouped import grouped_linear, ragged_linear
from gem_precision.linear import LinearRule
from gem_precision.presets import PRESETS
from gem_precision.recipes.low_precision import LowPrecision
from gem_precision.sites import sites
from gem_precision.weights import HeldWeight

RULES = {name: preset.rule() for name, preset in PRESETS.items()}
RULES["mixed"] = LinearRule(inputs=find_format("mxfp8_e4m3"), weights=find_format("fp8_e4m3_128x128"), grads=find_format("mxfp8_e5m2"))


def expected(x: Tensor, weight: Tensor, grad: Tensor, rule: LinearRule) -> dict[str, Tensor]:
    """Of one group: the three products in float64, of operands rounded along the axis that each contracts."""

    def low(t: Tensor, form: str) -> Tensor:
        return fake_quantize(t.contiguous(), getattr(rule, form)).double()

    dw = low(grad.T, "grads") @ low(x.T, "inputs").T if rule.weight_grad else grad.T.double() @ x.double()
    return {"y": low(x, "inputs") @ low(weight, "weights").T, "x": low(grad, "grads") @ low(weight.T, "weights").T, "weight": dw}


def held_for(rule: LinearRule) -> HeldWeight:
    return HeldWeight(rule.weights, rule.hadamard)


def drawn(*shape: int, seed: int) -> Tensor:
    """Numbers of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10 ** torch.randn(*shape[:-1], 1, generator=generator)


def close(got: Tensor, want: Tensor) -> bool:
    return torch.allclose(got.detach().double(), want.detach(), rtol=1e-5, atol=1e-5 * float(want.detach().abs().amax() if want.numel() else 0))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(RULES)), st.integers(0, 4), st.integers(0, 70), st.integers(1, 140), st.integers(1, 140), st.integers(0, 99))
def test_stacked_groups_are_products_of_their_own(name: str, groups: int, rows: int, inputs: int, outputs: int, seed: int) -> None:
    rule = RULES[name]
    x, weight = drawn(groups, rows, inputs, seed=seed).requires_grad_(), drawn(groups, outputs, inputs, seed=seed + 1).requires_grad_()
    grad = drawn(groups, rows, outputs, seed=seed + 2)
    y = grouped_linear(x, weight, rule, held_for(rule))
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    for g in range(groups):
        want = expected(x[g].detach(), weight[g].detach(), grad[g], rule)
        assert close(y[g], want["y"])
        assert close(x.grad[g], want["x"])
        assert close(weight.grad[g], want["weight"])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(RULES)), st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 100), st.integers(1, 100), st.integers(0, 99)
)
def test_ragged_groups_are_products_of_their_own(name: str, lengths: list[int], inputs: int, outputs: int, seed: int) -> None:
    """Groups without rows as well: their weights get a gradient of zeros."""
    rule = RULES[name]
    ends = torch.tensor(lengths).cumsum(0).int()
    x = drawn(sum(lengths), inputs, seed=seed).requires_grad_()
    weight = drawn(len(lengths), outputs, inputs, seed=seed + 1).requires_grad_()
    grad = drawn(sum(lengths), outputs, seed=seed + 2)
    y = ragged_linear(x, weight, ends, rule, [held_for(rule) for _ in lengths])
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    done = 0
    for g, rows in enumerate(lengths):
        part = slice(done, done + rows)
        want = expected(x[part].detach(), weight[g].detach(), grad[part], rule)
        assert close(y[part], want["y"])
        assert close(x.grad[part], want["x"])
        assert close(weight.grad[g], want["weight"])
        done += rows


def test_the_comparison_sees_blocks_across_groups() -> None:
    """Rows of the next group in a block of the weight gradient."""
    rule = RULES["mxfp8"]
    x, grad = drawn(20, 8, seed=0), drawn(20, 8, seed=1)
    x[10:] *= 1e4
    want = expected(x[:10], torch.ones(8, 8), grad[:10], rule)["weight"]
    across = fake_quantize(grad.T.contiguous(), rule.grads)[:, :10].double() @ fake_quantize(x.T.contiguous(), rule.inputs)[:, :10].T.double()
    assert not close(across.float(), want)


def test_strided_operands_and_the_transform() -> None:
    rule = replace(RULES["mxfp8"], hadamard=1)
    x, weight = drawn(5, 3, 64, seed=0).transpose(0, 1), drawn(3, 64, 32, seed=1).mT
    got = grouped_linear(x, weight, rule, held_for(rule))
    assert torch.equal(got, grouped_linear(x.contiguous(), weight.contiguous(), rule, held_for(rule)))
    assert (got - x @ weight.mT).norm() < 0.08 * (x @ weight.mT).norm()


def test_weights_of_groups_are_held() -> None:
    rule = RULES["fp8_block"]
    held, x, weight = [held_for(rule), held_for(rule)], drawn(7, 8, seed=0), drawn(2, 4, 8, seed=1)
    first = ragged_linear(x, weight, torch.tensor([3, 7]), rule, held)
    kept = [each.rounded(weight[g], transposed=False) for g, each in enumerate(held)]
    assert torch.equal(ragged_linear(x, weight, torch.tensor([3, 7]), rule, held), first)
    assert all(each.rounded(weight[g], transposed=False) is kept[g] for g, each in enumerate(held))
    weight.mul_(2.0)
    assert torch.equal(ragged_linear(x, weight, torch.tensor([3, 7]), rule, held), 2 * first)


@pytest.mark.parametrize(
    ("ends", "rows", "message"),
    [([3], 7, "there are 1 ends"), ([3, 6], 7, r"groups end at \[3, 6\] of 7 rows"), ([5, 3], 3, r"\[5, 3\]"), ([-1, 7], 7, r"\[-1, 7\]")],
)
def test_ends_that_do_not_fit_are_refused(ends: list[int], rows: int, message: str) -> None:
    rule = RULES["mxfp8"]
    with pytest.raises(RequestError, match=message):
        ragged_linear(torch.ones(rows, 8), torch.ones(2, 4, 8), torch.tensor(ends), rule, [held_for(rule), held_for(rule)])


@pytest.mark.parametrize(("x", "weight"), [((2, 3, 8), (3, 4, 8)), ((2, 3, 8), (2, 4, 7)), ((3, 8), (3, 4, 8)), ((2, 3, 8), (4, 8))])
def test_shapes_that_do_not_fit_are_refused(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    rule = RULES["mxfp8"]
    with pytest.raises(RequestError, match="groups, rows, in"):
        grouped_linear(torch.ones(x), torch.ones(weight), rule, held_for(rule))


class Tokens(nn.Module):
    """As the model has it: a matrix for each token."""

    token_linear = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.bias = nn.Parameter(torch.randn(3, 64, 32)), nn.Parameter(torch.randn(3, 32))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bti,tio->bto", x, self.weight) + self.bias


@pytest.mark.parametrize("rows", [0, 1, 33])
def test_a_map_for_each_token_is_a_site(rows: int) -> None:
    plain, model = Tokens(), nn.Sequential(Tokens())
    decided = {d.module: d for d in LowPrecision("fp8_block", small=32).prepare(model, "cpu")}
    assert decided["0"].format == RULES["fp8_block"].label
    x, grad = drawn(rows, 3, 64, seed=1).requires_grad_(), drawn(rows, 3, 32, seed=2)
    y = model(x)
    assert y.shape == plain(x).shape
    y.backward(grad)
    assert x.grad is not None
    for token in range(3):
        want = expected(x[:, token].detach(), plain.weight[token].detach().T, grad[:, token], RULES["fp8_block"])
        assert close(y[:, token], want["y"] + plain.bias[token].double())
        assert close(x.grad[:, token], want["x"])
        assert close(model[0].weight.grad[token], want["weight"].T)
    assert torch.equal(model[0].bias.grad, grad.sum(0))


def test_a_narrow_map_stays_high_and_a_backend_without_groups_is_refused() -> None:
    decided = {d.module: d for d in LowPrecision("fp8_block", small=33).prepare(nn.Sequential(Tokens()), "cpu")}
    assert "a matrix 32 wide" in decided["0"].reason
    with pytest.raises(KernelUnavailable, match="a matrix for each token"):
        LowPrecision("fp8_block", small=0, linear="fp8_block_native").prepare(nn.Sequential(Tokens()), "cpu")


def test_the_models_maps_for_each_token_are_sites() -> None:
    module = load_object("gem_core.model.features:TokenLinear")(4, 16, 8)
    assert [(site.name, site.width) for site in sites(nn.Sequential(module))] == [("0", 8)]
    assert module(torch.ones(2, 4, 16)).shape == (2, 4, 8)
