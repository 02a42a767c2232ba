"""Native FP8 linear layers: where they fit, and on a GPU their numbers against the emulation."""

import pytest
import torch
from torch import nn

from gem_core.spec import RequestError
from gem_precision.formats import fake_quantize, find_format
from gem_precision.linear import lower
from gem_precision.native import NativeForward, lower_natively, unfit
from gem_precision.presets import PRESETS
from gem_precision.recipes.low_precision import LowPrecision

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_layer_that_cannot_run_natively_says_every_reason_and_stays_high() -> None:
    layer = nn.Linear(100, 128)
    reasons = unfit(layer, "cpu")
    assert reasons[:2] == ["the run is on cpu, the products need a CUDA device", "100 inputs are no multiple of 128"]
    model = nn.Sequential(nn.Linear(128, 256))
    (decision,) = LowPrecision("fp8_block", native=True).prepare(model, "cpu")
    assert decision.format == "fp32"
    assert "no native kernel fits: the run is on cpu" in decision.reason
    assert "forward" not in vars(model[0])


def test_only_what_has_kernels_is_native() -> None:
    for preset, options in (("mxfp8", {}), ("fp8_block", {"stochastic": True}), ("fp8_block", {"weight_grad": "high"})):
        with pytest.raises(RequestError, match="only fp8_block has kernels"):
            LowPrecision(preset, native=True, **options)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 1000])
@pytest.mark.parametrize("widths", [(128, 128), (512, 256), (384, 640)])
def test_native_layers_equal_the_emulation_up_to_sums_and_bf16_results(rows: int, widths: tuple[int, int]) -> None:
    torch.manual_seed(0)
    native, emulated = (nn.Linear(*widths, device="cuda") for _ in range(2))
    emulated.load_state_dict(native.state_dict())
    lower_natively(native)
    lower(emulated, PRESETS["fp8_block"].rule())
    # values that differ by block, so that a scale in the wrong place shows
    base = torch.randn(rows, widths[0], device="cuda") * torch.logspace(-3, 3, widths[0] // 128, device="cuda").repeat_interleave(128)
    results = []
    for layer in (native, emulated):
        x = base.bfloat16().requires_grad_()
        out = layer(x)
        out.backward(torch.randn(rows, widths[1], device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype))
        results.append((out, x.grad, layer.weight.grad, layer.bias.grad))
    for got, wanted in zip(*results, strict=True):
        assert got.isfinite().all()
        scale = wanted.float().abs().max() if wanted.numel() else 0
        assert not wanted.numel() or (got.float() - wanted.float()).abs().max() <= 2**-7 * scale


@pytest.mark.gpu
@gpu
def test_casts_round_as_the_formats_do() -> None:
    from gem_precision.kernels.cast import cast_both, cast_square

    torch.manual_seed(0)
    x = torch.randn(300, 512, device="cuda") * torch.logspace(-30, 30, 300, device="cuda")[:, None]
    x[5], x[9, 100], x[40, 300] = 0, float("nan"), float("inf")
    full = torch.zeros(384, 512, device="cuda")
    full[:300] = x
    low, scales, turned, turned_scales = cast_both(x)
    for elements, scale, wanted in ((low, scales, full), (turned, turned_scales, full.T.contiguous())):
        exact = fake_quantize(wanted, find_format("fp8_e4m3_1x128"))
        got = elements.float() * scale.repeat_interleave(128, 1)
        assert bool(((got == exact) | (got.isnan() & exact.isnan())).all())
    w = torch.randn(256, 384, device="cuda")
    elements, scale, *_ = cast_square(w)
    exact = fake_quantize(w, find_format("fp8_e4m3_128x128"))
    assert torch.equal(elements.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1), exact)


@pytest.mark.gpu
@gpu
def test_the_weight_is_cast_once_for_each_version_of_it() -> None:
    layer = nn.Linear(128, 128, device="cuda")
    lower_natively(layer)
    forward = vars(layer)["forward"]
    assert isinstance(forward, NativeForward)
    x = torch.randn(128, 128, device="cuda", dtype=torch.bfloat16)
    first, again = layer(x), layer(x)
    kept = forward._cast
    assert torch.equal(first, again)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert not torch.equal(layer(x), first)
    assert forward._cast is not kept
