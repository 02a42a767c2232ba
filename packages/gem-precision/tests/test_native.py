"""Native linear layers against the emulation; where they fit; that they are used only where they are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gem_core.spec import KernelUnavailable
from gem_precision.backends import Device, LinearShape, backends_of, find_backend, require
from gem_precision.formats import find_format
from gem_precision.linear import lower
from gem_precision.native import NAMES, mx_why_not, native_linear, native_mx_linear, native_square_linear, no_gain, why_not
from gem_precision.presets import PRESETS

HOPPER = Device(type="cuda", name="any", arch=90)
RULE, SQUARE, MX = (PRESETS[recipe].rule() for recipe in ("fp8_block", "fp8_square", "mxfp8"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MX_RUNS = DEVICE == "cpu" or torch.cuda.get_device_capability() == (10, 0)
BF16 = 2**-7  # the interpreter cuts off where hardware rounds
FP32 = 2**-9 if DEVICE == "cuda" else 2e-6  # a tensor core keeps about 14 bits of the largest term while it sums 128 of them


def test_where_it_cannot_run_it_says_every_reason(monkeypatch):
    pytest.importorskip("triton")
    assert why_not(HOPPER, LinearShape(inputs=512, outputs=128)) == []
    reasons = why_not(Device.here("cpu"), LinearShape(inputs=100, outputs=0))
    assert ["this is cpu" in reasons[0], *(reason[:12] for reason in reasons[1:])] == [True, "100 inputs a", "0 outputs ar"]
    assert "this is sm100" in why_not(Device(type="cuda", name="any", arch=100), LinearShape(inputs=128, outputs=128))[0]
    assert mx_why_not(Device(type="cuda", name="any", arch=100), LinearShape(inputs=128, outputs=128)) == []
    assert "need the block-scaled tensor cores of Blackwell (sm100), this is sm90" in mx_why_not(HOPPER, LinearShape(inputs=128, outputs=128))[0]
    monkeypatch.setattr("gem_precision.native.find_spec", lambda name: None)
    assert "triton is not installed" in why_not(HOPPER, LinearShape(inputs=128, outputs=128))[0]


def test_only_shapes_that_were_faster_than_bfloat16_gain():
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "h200-casts.json"
    kinds = ("linear, fp8_block", "linear, fp8_square", "linear without a bias, fp8_block")
    steps = [record for record in json.loads(results.read_text())["timings"] if record["what"] in kinds]
    assert len(steps) == 3 * 9
    for step in steps:
        _, inputs, outputs = map(int, step["shape"].split("x"))
        assert (not no_gain(HOPPER, LinearShape(inputs=inputs, outputs=outputs))) == (step["over_bf16"] > 1), step


@pytest.mark.parametrize(
    ("recipe", "function", "measured"),
    [("fp8_block", native_linear, True), ("fp8_square", native_square_linear, True), ("mxfp8", native_mx_linear, False)],
)
def test_it_is_found_by_name_and_not_chosen_before_it_is_measured(recipe, function, measured):
    backend = find_backend(NAMES[recipe], recipe)
    assert backend.measured is measured
    assert not backend.emulated
    assert [b.name for b in backends_of(recipe) if b.measured] == [f"{recipe}_emulated", *([NAMES[recipe]] if measured else [])]
    with pytest.raises(KernelUnavailable, match="multiple of 128"):
        require(backend, HOPPER, LinearShape(inputs=64, outputs=128))
    assert backend.resolve() is function


def test_the_layer_is_declared_without_its_kernels():
    """Which need triton."""
    code = "import sys, gem_precision.native; sys.exit('gem_precision.kernels.cast' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("change", [{"stochastic": True}, {"hadamard": 1}, {"weight_grad": False}, {"grads": find_format("fp8_e5m2_1x128")}])
def test_other_rules_are_refused_before_any_work(change):
    layer = nn.Linear(128, 128)
    lower(layer, type(RULE)(**{"inputs": RULE.inputs, "weights": RULE.weights, "grads": RULE.grads, **change}), native_linear)
    with pytest.raises(KernelUnavailable, match="fp8_block_emulated"):
        layer(torch.ones(2, 128))


def test_gathered_weights_of_mxfp8_are_refused():
    layer = nn.Linear(128, 128)
    lower(layer, MX, native_mx_linear)
    vars(layer)["forward"].held.split(64, 0, 2)
    with pytest.raises(KernelUnavailable, match="rounded along each axis"):
        layer(torch.ones(2, 128))


@pytest.fixture
def own(monkeypatch):
    """On a CPU the interpreter computes products too."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr("gem_precision.kernels.product.choose", lambda m, n, k, square: "own")


def pair(block_numbers, inputs, outputs, rule=RULE, function=native_linear):
    native, emulated = (nn.Linear(inputs, outputs, device=DEVICE) for _ in range(2))
    with torch.no_grad():
        native.weight.copy_(block_numbers(outputs, inputs, 7))
    emulated.load_state_dict(native.state_dict())
    lower(native, rule, function)
    lower(emulated, rule)
    return native, emulated


@pytest.mark.parametrize("rows", [0, 1, 131])
@pytest.mark.parametrize(
    ("widths", "rule", "function"),
    [
        ((128, 128), RULE, native_linear),
        ((256, 384), RULE, native_linear),
        ((256, 384), SQUARE, native_square_linear),
        ((256, 128), MX, native_mx_linear),
    ],
    ids=["one block", "blocks", "square", "mx"],
)
def test_case_G11_native_layers_are_the_emulated_ones(block_numbers, own, rows, widths, rule, function):
    if function is native_mx_linear and not MX_RUNS:
        pytest.skip("needs a Blackwell GPU, or the interpreter")
    layers = pair(block_numbers, *widths, rule, function)
    results = []
    for layer in layers:
        x = block_numbers(rows, widths[0], 8).to(DEVICE).requires_grad_()
        out = layer(x)
        out.backward(block_numbers(rows, widths[1], 9).to(DEVICE))
        results.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for name, got, wanted in zip(("out", "x", "weight", "bias"), *results, strict=True):
        error = BF16 if name in ("out", "x") else FP32
        assert got.dtype == wanted.dtype == torch.float32
        assert got.shape == wanted.shape
        assert not wanted.numel() or (got - wanted).abs().max() <= error * wanted.abs().max(), name


def test_case_G05_no_gradient_of_the_input_more_axes_and_bfloat16_under_autocast(block_numbers, own):
    native, _ = pair(block_numbers, 128, 128)
    x = block_numbers(6, 128, 1).to(DEVICE).reshape(2, 3, 128)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = native(x)
    assert (out.shape, out.dtype) == ((2, 3, 128), torch.bfloat16)
    out.sum().backward()
    assert native.weight.grad.isfinite().all()
    assert native.weight.grad.dtype == torch.float32


def test_what_is_kept_for_backward_is_half_of_the_activations(block_numbers, own):
    native, _ = pair(block_numbers, 256, 128)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        native(block_numbers(128, 256, 1).to(DEVICE))
    assert sum(t.numel() * t.element_size() for t in kept if t is not native.weight) == 128 * 256 + 4 * 256


def test_the_weight_is_cast_once_for_each_value_of_it(block_numbers, own, monkeypatch):
    """Forward and backward share it; micro-batches do where somebody says when the weight changes."""
    from gem_precision.kernels import cast

    made = []
    original = cast.cast_weight
    monkeypatch.setattr(cast, "cast_weight", lambda w: made.append(1) or original(w))
    native, _ = pair(block_numbers, 128, 128)
    nn.init.zeros_(native.bias)
    held = vars(native)["forward"].held
    x = block_numbers(128, 128, 1).to(DEVICE).requires_grad_()

    def step():
        out = native(x)
        out.sum().backward()
        return out

    step()
    assert len(made) == 1
    held.changed()
    first, again = step(), step()
    assert torch.equal(first, again)
    assert len(made) == 2
    with torch.no_grad():
        native.weight.mul_(2)
    held.changed()
    assert torch.equal(step(), 2 * first)
    assert len(made) == 3


def test_who_watches_sees_the_operands_that_the_emulation_shows(block_numbers, own):
    seen = []
    for layer in pair(block_numbers, 128, 128):
        told = {}
        vars(layer)["forward"].watch = lambda role, x, low, told=told: told.update({role: low.dequantize()})
        layer(block_numbers(5, 128, 1).to(DEVICE).requires_grad_()).backward(block_numbers(5, 128, 2).to(DEVICE))
        seen.append(told)
    assert set(seen[0]) == set(seen[1]) == {"inputs", "weights", "grads"}
    assert all(torch.equal(seen[0][role], seen[1][role]) for role in seen[0])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("widths", [(128, 128), (512, 256), (384, 640), (1024, 4096)])
@pytest.mark.parametrize(("rule", "function"), [(RULE, native_linear), (SQUARE, native_square_linear)], ids=["block", "square"])
def test_native_layers_are_the_emulated_ones_at_any_value(rows, widths, rule, function):
    torch.manual_seed(0)
    native, emulated = (nn.Linear(*widths, device="cuda") for _ in range(2))
    emulated.load_state_dict(native.state_dict())
    lower(native, rule, function)
    lower(emulated, rule)
    base = torch.randn(rows, widths[0], device="cuda") * torch.logspace(-3, 3, widths[0] // 128, device="cuda").repeat_interleave(128)
    grad = torch.randn(rows, widths[1], device="cuda").bfloat16().float()  # as the native layer, whose output is bfloat16, gets it anyway
    results = []
    for layer in (native, emulated):
        x = base.clone().requires_grad_()
        out = layer(x)
        out.backward(grad)
        results.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for got, wanted in zip(*results, strict=True):
        assert (got - wanted).abs().max() <= BF16 * wanted.abs().max()
