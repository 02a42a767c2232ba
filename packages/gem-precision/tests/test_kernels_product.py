"""Products of ``fp8_block`` operands, against float64 products of what the operands stand for."""

import pytest
import torch

from gem_core.spec import RequestError

pytest.importorskip("triton")

from gem_precision.kernels import product as module
from gem_precision.kernels.cast import cast_both, cast_weight
from gem_precision.kernels.mx import mx_both
from gem_precision.kernels.product import choose, library_reasons, product, shares

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16 = 2**-7  # the interpreter cuts off where hardware rounds
FP32 = 2**-9 if DEVICE == "cuda" else 2e-6  # a tensor core keeps about 14 bits of the largest term while it sums 128 of them


def reference(left, right):
    return left.dequantize().double() @ right.dequantize().double().T


def close(got, wanted, error):
    """Against the sum of magnitudes would be laxer; an output is a few hundred terms of either sign here."""
    return got.shape == wanted.shape and bool(((got.double() - wanted).abs() <= error * wanted.abs().amax()).all())


@pytest.mark.parametrize("rows", [1, 128, 200])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (384, 256)])
def test_case_G11_activations_times_weights(block_numbers, rows, inputs, outputs):
    left, right = cast_both(block_numbers(rows, inputs, 1).to(DEVICE)).along, cast_weight(block_numbers(outputs, inputs, 2).to(DEVICE)).along
    wanted = reference(left, right)
    assert close(product(left, right, torch.float32, "own"), wanted, FP32)
    assert close(product(left, right, torch.bfloat16, "own"), wanted, BF16)
    if outputs == 256:
        assert close(product(left, right, torch.float32, "wide"), wanted, FP32)


@pytest.mark.parametrize(("way", "blocks"), [("own", 1), ("own", 5), ("wide", 3)])
def test_case_G11_gradients_times_activations(block_numbers, way, blocks):
    left, right = cast_both(block_numbers(128 * blocks, 128, 3).to(DEVICE)).turned, cast_both(block_numbers(128 * blocks, 512, 4).to(DEVICE)).turned
    assert close(product(left, right, torch.float32, way), reference(left, right), FP32)


@pytest.mark.parametrize("parts", [2, 3, 4, 9])
def test_a_split_contraction_has_every_block_once(block_numbers, monkeypatch, parts):
    """Five blocks: parts of 3 and 2, of 2, 2 and 1, and never an empty one."""
    monkeypatch.setattr(module, "shares", lambda tiles, k: parts)
    left, right = cast_both(block_numbers(640, 128, 5).to(DEVICE)).turned, cast_both(block_numbers(640, 128, 6).to(DEVICE)).turned
    assert close(product(left, right, torch.float32, "own"), reference(left, right), FP32)


def test_the_comparison_sees_a_scale_in_the_wrong_place(block_numbers):
    left, right = cast_both(block_numbers(128, 256, 1).to(DEVICE)).along, cast_weight(block_numbers(256, 256, 2).to(DEVICE)).along
    wrong = type(right)(right.elements, right.scales.T.contiguous(), square=True)
    assert not close(product(left, wrong, torch.float32, "own"), reference(left, right), FP32)


def test_nothing_to_contract_gives_zeros_and_nothing_to_compute_an_empty_matrix():
    none, some = cast_both(torch.zeros(0, 256, device=DEVICE)), cast_both(torch.zeros(0, 128, device=DEVICE))
    assert torch.equal(product(none.turned, some.turned, torch.float32), torch.zeros(256, 128, device=DEVICE))
    assert product(none.along, cast_weight(torch.ones(128, 256, device=DEVICE)).along).shape == (0, 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_to_every_row_and_keeps_the_result_as_it_is(block_numbers, dtype):
    x, bias = cast_both(block_numbers(128, 256).to(DEVICE)).along, torch.arange(128.0, device=DEVICE) * 100
    plain, added = (product(x, cast_weight(torch.ones(128, 256, device=DEVICE)).along, dtype, "own", bias=b) for b in (None, bias))
    assert added.dtype == dtype
    assert close(added, plain.float() + bias, BF16)
    none = cast_both(torch.zeros(0, 128, device=DEVICE)).turned
    assert torch.equal(product(none, none, torch.float32, bias=bias), bias.expand(128, 128))


def test_a_bias_goes_to_the_library_only_where_it_adds_one(block_numbers, monkeypatch):
    given = []

    def scaled(left, right, by_left, by_right, *, bias=None, out_dtype):
        given.append(bias is not None)
        out = torch.zeros(left.shape[0], right.shape[1], dtype=out_dtype, device=DEVICE)
        return out if bias is None else out + bias

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    left, right = cast_both(torch.ones(128, 512, device=DEVICE)).along, cast_weight(torch.ones(128, 512, device=DEVICE)).along
    bias = torch.arange(128.0, device=DEVICE)
    for adds in (True, False):
        monkeypatch.setattr(module, "library_adds_bias", lambda device, adds=adds: adds)
        assert torch.equal(product(left, right, way="library", bias=bias), bias.bfloat16().expand(128, 128))
    assert given == [True, False]


def test_a_library_that_refuses_a_bias_or_forgets_it_adds_none(monkeypatch):
    asks, device = module.library_adds_bias.__wrapped__, torch.device(DEVICE)
    for error in (RuntimeError, ValueError):
        monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, error=error, **how: (_ for _ in ()).throw(error("no")))
        assert not asks(device)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, bias, out_dtype: torch.zeros(128, 128, dtype=out_dtype, device=DEVICE))
    assert not asks(device)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *operands, bias, out_dtype: bias.expand(128, 128))
    assert asks(device)


def test_a_block_with_a_nan_or_an_infinity_shows(block_numbers):
    x = block_numbers(128, 256).to(DEVICE)
    x[3, 200], x[70, 1] = float("nan"), float("inf")
    out = product(cast_both(x).along, cast_weight(torch.ones(128, 256, device=DEVICE)).along, way="own")
    assert out.isnan().all(1).nonzero().flatten().tolist() == [3, 70]
    assert out.isnan().any(1).sum() == 2


def test_operands_that_do_not_fit_are_refused():
    rows, square = cast_both(torch.ones(128, 256, device=DEVICE)).along, cast_weight(torch.ones(128, 128, device=DEVICE)).along
    with pytest.raises(RequestError, match="last axes differ"):
        product(rows, square)
    with pytest.raises(RequestError, match="left one has 128 x 128"):
        product(square, square)
    with pytest.raises(RequestError, match="no multiple of 512"):
        product(rows, cast_weight(torch.ones(128, 256, device=DEVICE)).along, way="library")
    with pytest.raises(RequestError, match=r"scales are \[128, 8\] where fp8_block has \[128, 2\]"):
        product(mx_both(torch.ones(128, 256, device=DEVICE)).along, rows)
    with pytest.raises(RequestError, match="128 is no multiple of 256"):
        product(rows, cast_weight(torch.ones(128, 256, device=DEVICE)).along, way="wide")


@pytest.mark.parametrize(
    ("m", "n", "k", "square", "why"),
    [
        (128, 128, 128, True, "one block"),
        (4096, 4096, 128, False, "one block"),
        (4096, 4096, 384, True, "no multiple of 512"),
        (4096, 4096, 384, False, None),
        (128, 128, 512, True, None),
    ],
)
def test_shapes_whose_scales_the_library_could_take_for_others_are_not_given_to_it(m, n, k, square, why):
    reasons = library_reasons(m, n, k, square)
    assert not reasons if why is None else why in reasons[0]
    if why:
        assert choose(m, n, k, square) == "own"


def test_few_tiles_and_a_long_contraction_are_split():
    assert choose(1 << 19, 4096, 1024, True) == choose(4096, 1024, 1 << 19, False) == "library"
    assert choose(1024, 1024, 1 << 19, False) == "library"  # 64 tiles: measured
    assert choose(512, 512, 1 << 20, False) == "wide"
    assert choose(512, 384, 1 << 20, False) == "own"
    assert shares(16, 1 << 20) == 8
    assert shares(16, 128 * 40) == 2  # at least 16 blocks a part
    assert shares(16, 128) == shares(1024, 1 << 20) == shares(0, 512) == 1


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["own", "wide", "library"])
@pytest.mark.parametrize(("m", "n", "k"), [(128, 128, 512), (1280, 512, 1024), (4096, 1024, 512), (512, 640, 12800)])
def test_both_ways_compute_the_same(way, m, n, k):
    torch.manual_seed(0)
    spread = torch.logspace(-3, 3, k // 128, device="cuda").repeat_interleave(128)
    x, w = torch.randn(m, k, device="cuda") * spread, torch.randn(n, k, device="cuda") / spread
    for left, right in ((cast_both(x).along, cast_weight(w).along), (cast_both(x.T.contiguous()).turned, cast_both(w.T.contiguous()).turned)):
        if not (way == "library" and library_reasons(m, n, k, right.square)) and not (way == "wide" and n % 256):
            assert close(product(left, right, torch.float32, way), reference(left, right), FP32)
            assert close(product(left, right, torch.bfloat16, way), reference(left, right), BF16)
