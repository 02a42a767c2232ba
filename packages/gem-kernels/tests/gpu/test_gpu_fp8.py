"""FP8 attention on Hopper, against what its operands give in float64, and its backends against the references."""

import gem_kernels_fp8 as plain
import pytest
import torch

from gem_core.ops.gdpa import reference as gdpa
from gem_core.ops.jagged_attention import reference as jagged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
]
SUMS = 1.5e-2
"""Of the norm: a tensor core keeps about 14 bits of the largest term, a gate is a little off, a weight between two elements may round to either."""
STATISTIC = 2**-10
"""Of a logarithm of a sum, which is near its largest score: that score's product is summed with about 14 bits of its largest partial sum."""
FORMAT = 0.09
"""Of the norm: queries, keys, values and weights are rounded to four bits, each at most 2^-4 off."""
LENGTHS = [
    pytest.param([128], [128], {}, id="one tile"),
    pytest.param([1], [1], {}, id="one"),
    pytest.param([5, 130, 0, 300], [300, 7, 64, 129], {}, id="odd"),
    pytest.param([1024, 1024], [1024, 1000], {}, id="long"),
    pytest.param([140, 150], [300, 260], {"max_q": 129, "max_k": 150}, id="cut"),
    pytest.param([100, 5], [0, 200], {}, id="no keys"),
    pytest.param([3] * 700, [70] * 700, {}, id="many rows"),
]


def inputs(q_lengths, k_lengths, heads=4, kv_heads=2, sizes=(1, 1, 1)):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads))
    draw = [torch.randn(*shape, 128, device="cuda", generator=generator) * size for shape, size in zip(shapes, sizes, strict=True)]
    return [x.bfloat16() for x in draw]


def near(got, wanted, bound):
    assert not bool(got.isnan().any())
    assert float((got.double() - wanted).norm()) <= bound * float(wanted.norm())


def attend(call):
    """Output and statistics, written over NaN."""
    from gem_kernels.common.hopper.fp8 import launch

    out, lse = torch.full_like(call.q, float("nan")), torch.full(call.q.shape[1::-1], float("nan"), device="cuda")
    low = launch.cast(call)
    launch.attend(call, low, out, lse if call.activation == "softmax" else None)
    return low, out, lse


@pytest.mark.parametrize(("q_lengths", "k_lengths", "limits"), LENGTHS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_case_G11_pointwise_attention_is_that_of_its_operands(q_lengths, k_lengths, limits, activation):
    call = plain.make_call(*inputs(q_lengths, k_lengths), q_lengths, k_lengths, activation=f"{activation}_bf16", **limits)
    low, out, _ = attend(call)
    near(out, plain.pointwise(call, low), SUMS)


@pytest.mark.parametrize(("q_lengths", "k_lengths", "limits"), LENGTHS)
@pytest.mark.parametrize("scale", [128**-0.5, 1.0, -0.1])
def test_case_G11_softmax_attention_is_that_of_its_operands(q_lengths, k_lengths, limits, scale):
    call = plain.make_call(*inputs(q_lengths, k_lengths), q_lengths, k_lengths, activation="softmax", scale=scale, **limits)
    low, out, lse = attend(call)
    wanted, sums = plain.softmax(call, low)
    near(out, wanted, SUMS)
    torch.testing.assert_close(
        lse.t().double() * torch.log(torch.tensor(2.0)).item(), torch.where(sums.isinf(), -sums, sums), rtol=STATISTIC, atol=1e-2
    )


@pytest.mark.parametrize("options", [{"scale": -0.05}, {"scale_after": True, "scale": 0.3}])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1e-3, 300, 1e4), (30, 0.1, 1e-4)])
def test_case_G11_scales_of_tensors_and_of_scores_do_not_matter(options, sizes):
    lengths = ([200, 40], [300, 500])
    q, k, v = inputs(*lengths, sizes=sizes)
    call = plain.make_call(q, k, v, *lengths, activation="gelu_bf16", **options)
    low, out, _ = attend(call)
    near(out, plain.pointwise(call, low), SUMS)


@pytest.mark.parametrize("which", ["k", "v"])
def test_case_G05_a_nan_shows_in_its_row_and_head_alone(which):
    q, k, v = inputs([200, 130, 64], [130, 140, 200], heads=2)
    {"k": k, "v": v}[which][150, 1, 3] = float("nan")
    _, out, _ = attend(plain.make_call(q, k, v, [200, 130, 64], [130, 140, 200], activation="gelu_bf16"))
    bad = out.isnan()
    assert bool(bad[200:330, 1].all())
    bad[200:330, 1] = False
    assert not bool(bad.any())


@pytest.mark.parametrize("op", ["gdpa", "jagged_attention"])
def test_case_G11_backends_are_near_the_references_and_repeat_to_the_bit(op):
    """Output and gradients: those of the gradients are products of bfloat16 kernels, at statistics and outputs of the forward pass."""
    from gem_kernels.ops.gdpa.launch import gluon_fp8 as low_gdpa
    from gem_kernels.ops.jagged_attention.launch import gluon_fp8 as low_jagged_attention

    ours, wanted = (low_gdpa, gdpa) if op == "gdpa" else (low_jagged_attention, jagged_attention)
    q_lengths, k_lengths = [100, 0, 300], [300, 20, 129]
    where = (plain.offsets(q_lengths, "cuda"), plain.offsets(k_lengths, "cuda"))
    limits = {"max_q": 300, "max_k": 300}
    dout = torch.randn(400, 4, 128, device="cuda")

    def run(function, dtype):
        tensors = [x.detach().to(dtype).requires_grad_() for x in inputs(q_lengths, k_lengths)]
        out = function(*tensors, *where, **limits)
        out.backward(dout.to(dtype))
        return [out.detach(), *(x.grad for x in tensors)]

    got, again, exact = run(ours, torch.bfloat16), run(ours, torch.bfloat16), run(wanted, torch.float64)
    for one, other, known in zip(got, again, exact, strict=True):
        assert torch.equal(one, other)
        near(one, known, FORMAT)
