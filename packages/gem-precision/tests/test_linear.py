"""Low-precision linear layers: forward and both gradients against plain products of rounded operands; the Hadamard transform."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gem_core.spec import RequestError
from gem_precision.formats import Quantized, fake_quantize, find_format
from gem_precision.hadamard import WIDTH, rotate
from gem_precision.linear import LinearRule, lower, rule_of

MX = LinearRule(**dict.fromkeys(("inputs", "weights", "grads"), find_format("mxfp8_e4m3")))
BLOCK = LinearRule(inputs=find_format("fp8_e4m3_1x128"), weights=find_format("fp8_e4m3_128x128"), grads=find_format("fp8_e5m2_1x128"))
ROW = LinearRule(inputs=find_format("fp8_e4m3_row"), weights=find_format("fp8_e4m3_row"), grads=find_format("fp8_e5m2_row"))
RULES = {"mx": MX, "block": BLOCK, "row": ROW, "high weight gradient": replace(MX, weight_grad=False)}


def layers(rule: LinearRule, inputs: int = 96, outputs: int = 160) -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(2)
    plain = nn.Linear(inputs, outputs)
    low = copy.deepcopy(plain)
    lower(low, rule)
    return plain, low


def expected(plain: nn.Linear, x: Tensor, grad: Tensor, rule: LinearRule) -> dict[str, Tensor]:
    """The three products in float64, of operands rounded along the axis that each contracts."""
    with torch.no_grad():
        w = plain.weight
        y = fake_quantize(x, rule.inputs).double() @ fake_quantize(w, rule.weights).double().T
        dx = fake_quantize(grad, rule.grads).double() @ fake_quantize(w.T, rule.weights).double().T
        dw = fake_quantize(grad.T, rule.grads).double() @ fake_quantize(x.T, rule.inputs).double().T
        if not rule.weight_grad:
            dw = grad.T.double() @ x.double()
    return {"y": y + plain.bias.double(), "x": dx, "weight": dw, "bias": grad.double().sum(0)}


@pytest.mark.parametrize("rows", [0, 1, 77])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_products_are_those_of_rounded_operands(rule: LinearRule, rows: int) -> None:
    plain, low = layers(rule)
    x, grad = torch.randn(rows, 96, requires_grad=True), torch.randn(rows, 160)
    y = low(x)
    y.backward(grad)
    want = expected(plain, x.detach(), grad, rule)
    assert low.bias.grad is not None
    for name, got in {"y": y, "x": x.grad, "weight": low.weight.grad, "bias": low.bias.grad}.items():
        assert got is not None
        assert torch.allclose(got.double(), want[name], rtol=1e-5, atol=1e-5), name


def test_the_comparison_sees_a_wrong_axis() -> None:
    """Weights rounded along the outputs in the forward product."""
    plain, low = layers(MX)
    with torch.no_grad():  # a few large weights, beside which others fall below the smallest normal element
        plain.weight[::7, ::5] = low.weight[::7, ::5] = 1e3
    x = torch.randn(5, 96)
    wrong = fake_quantize(x, MX.inputs) @ fake_quantize(plain.weight.T.contiguous(), MX.weights)
    assert not torch.allclose(low(x) - plain.bias, wrong, rtol=1e-5, atol=1e-5)


def test_more_axes_no_bias_and_no_gradient_of_the_input() -> None:
    torch.manual_seed(0)
    low = nn.Linear(64, 32, bias=False)
    lower(low, MX)
    x = torch.randn(2, 3, 64)
    assert torch.equal(low(x)[1, 2], low(x[1, 2][None])[0])
    low(x).sum().backward()
    assert low.weight.grad is not None
    assert low(torch.zeros(0, 3, 64)).shape == (0, 3, 32)


def test_strided_inputs() -> None:
    _, low = layers(MX)
    x = torch.randn(10, 192)[:, ::2]
    assert torch.equal(low(x), low(x.contiguous()))


def test_under_autocast_the_output_is_what_autocast_gives() -> None:
    plain, low = layers(MX)
    x = torch.randn(4, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert low(x).dtype == plain(x).dtype == torch.bfloat16
        assert torch.equal(low(x), low(x).bfloat16())
    assert low(x).dtype == torch.float32
    assert low(x.bfloat16()).dtype == torch.bfloat16


def test_state_and_copies_are_those_of_the_layer() -> None:
    plain, low = layers(MX)
    assert set(low.state_dict()) == set(plain.state_dict())
    assert type(low) is nn.Linear
    twin = copy.deepcopy(low)
    assert rule_of(twin) is not None
    with torch.no_grad():
        twin.weight.zero_()
    x = torch.randn(3, 96)
    assert torch.equal(twin(x), plain.bias.expand(3, -1))
    assert not torch.equal(low(x), twin(x))
    assert rule_of(plain) is None


def test_a_watch_sees_every_operand_once() -> None:
    _, low = layers(MX)
    seen: list[tuple[str, tuple[int, ...]]] = []

    def watch(role: str, x: Tensor, quantized: Quantized) -> None:
        seen.append((role, tuple(x.shape)))
        assert quantized.elements.shape == x.shape

    vars(low)["forward"].watch = watch
    low(torch.randn(7, 96, requires_grad=True)).sum().backward()
    assert seen == [("inputs", (7, 96)), ("weights", (160, 96)), ("grads", (7, 160))]


def test_stochastic_gradients_keep_the_mean() -> None:
    plain, low = layers(replace(MX, stochastic=True), 32, 32)
    x, grad = torch.randn(64, 32, requires_grad=True), torch.randn(64, 32)
    total = torch.zeros(64, 32)
    for _ in range(300):
        (dx,) = torch.autograd.grad(low(x), x, grad)
        total += dx
    exact = grad @ fake_quantize(plain.weight.T, MX.weights).T
    (nearest,) = torch.autograd.grad(layers(MX, 32, 32)[1](x), x, grad)
    assert (total / 300 - exact).norm() < 0.3 * (nearest - exact).norm()


def test_case_G05_every_gradient_is_finite_at_the_first_step() -> None:
    for rule in RULES.values():
        _, low = layers(rule)
        x = (torch.randn(50, 96) * torch.logspace(-20, 4, 96)).requires_grad_()
        low(x).square().mean().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in (*low.parameters(), x))


def test_the_transform_is_orthonormal_and_leaves_products_alone() -> None:
    x, w = torch.randn(5, 64, dtype=torch.float64), torch.randn(7, 64, dtype=torch.float64)
    assert torch.allclose(rotate(x, 1) @ rotate(w, 1).T, x @ w.T)
    assert torch.allclose(rotate(x, 1).norm(), x.norm())
    assert not torch.allclose(rotate(x, 1) @ rotate(w, 2).T, x @ w.T)
    with pytest.raises(RequestError, match=f"multiples of {WIDTH}"):
        rotate(torch.ones(2, 33), 1)


def test_the_transform_spreads_outliers() -> None:
    """One huge value in each row: with a scale a row the others would round to nothing."""
    torch.manual_seed(0)
    x = torch.randn(64, 96)
    x[:, 5] = 3e4
    errors = {}
    for name, rule in {"plain": ROW, "turned": replace(ROW, hadamard=1)}.items():
        plain, low = layers(rule)
        with torch.no_grad():
            plain.weight[:, 5] = low.weight[:, 5] = 0.0
            errors[name] = float((low(x) - plain(x)).norm())
    assert errors["turned"] != errors["plain"]
    for rule in (replace(MX, hadamard=1), replace(BLOCK, hadamard=1)):  # every product still is the product, to the format's error
        plain, low = layers(rule)
        y = torch.randn(64, 96, requires_grad=True)
        grad = torch.randn(64, 160)
        got = torch.autograd.grad(low(y), (y, low.weight), grad)
        want = torch.autograd.grad(plain(y), (y, plain.weight), grad)
        for mine, theirs in zip(got, want, strict=True):
            assert (mine - theirs).norm() < 0.08 * theirs.norm()
