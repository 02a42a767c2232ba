"""pffn where the slope of its activation jumps: normed queries in two halves keep scores on their side."""

from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, results

from gem_core.ops.activations import GELU_FAST_RANGE
from gem_core.spec import KernelUnavailable
from gem_core.testing import assert_close
from gem_kernels.bench.measure import reference_of
from gem_kernels.ops.pffn import launch

pytest.importorskip("triton")

EPS = 1e-5
FP16 = patch.object(launch, "HALVED", (torch.float16,))


def scores(work):
    """Scores by float64, by rounded normed queries, and by both halves, each ``[tokens, heads, keys]``; for one row."""
    q0, k = (work.arguments[name].detach() for name in ("q0", "k"))
    exact = torch.nn.functional.layer_norm(q0.double().flatten(1), (q0[0].numel(),), eps=EPS).view(q0.shape)
    high = exact.float().to(q0.dtype)
    low = (exact.float() - high.float()).to(q0.dtype)
    return [torch.einsum("thd,khd->thk", q, k[0].double()) for q in (exact, high.double(), high.double() + low.double())]


def crossed(found, exact):
    """Scores on the other side of a jump than the exact ones."""
    return (found.abs() < GELU_FAST_RANGE) != (exact.abs() < GELU_FAST_RANGE)


@pytest.mark.parametrize(("dtype", "seeds"), [(torch.bfloat16, 3), (torch.float16, 12)])
def test_rounded_queries_cross_the_jumps_and_halves_do_not(dtype, seeds):
    rounded = halves = 0
    for seed in range(seeds):
        work = draw("pffn", (400,), dtype=dtype, seed=seed)
        work.arguments["k"] = work.arguments["k"].detach() * 3
        exact, once, twice = scores(work)
        rounded, halves = rounded + int(crossed(once, exact).sum()), halves + int(crossed(twice, exact).sum())
    assert rounded > 3
    assert halves == 0


def crossing():
    """A small fp16 call, one of whose scores crosses a jump when the normed queries are rounded."""
    for seed in range(1000):
        work = draw("pffn", (40,), dtype=torch.float16, seed=seed, activation="gelu_fast")
        work.arguments["k"] = (work.arguments["k"].detach() * 3).requires_grad_()
        exact, once, _ = scores(work)
        if crossed(once, exact).any():
            return work
    raise AssertionError("no seed crosses")


def error_of_key_gradient(work):
    """Largest difference of k's gradient from float64's, over its largest value."""
    truth, found = (results(f, w)[2].double() for f, w in ((reference_of("pffn"), work.cast(torch.float64)), (kernel_of("pffn"), work)))
    return float((found - truth).abs().max() / truth.abs().max())


def test_a_score_that_crosses_spoils_a_gradient_and_halves_mend_it():
    work = crossing()
    spoilt = error_of_key_gradient(work)
    with FP16:
        mended = error_of_key_gradient(work)
    assert mended < 1e-3 < 2e-3 < spoilt


@pytest.mark.parametrize("lengths", [(), (0, 0), (5, 0, 34)], ids=str)
@pytest.mark.parametrize("dim", [16, 24])
def test_halves_are_as_accurate_as_plain_torch(lengths, dim):
    with FP16:
        compare(draw("pffn", lengths, dim=dim, dtype=torch.float16, activation="gelu_fast"))


def normed(q0, activation):
    """The normed queries that attention gets, of one row with one key."""
    key = q0.new_zeros(1, 1, *q0.shape[1:])
    return torch.ops.gem_kernels.pffn(q0, key, key, torch.tensor([0, len(q0)]), len(q0), activation, 1.0, False, EPS, "triton")[1]


def test_halves_are_taken_for_that_activation_alone():
    q0 = torch.randn(5, 2, 16)
    with FP16:
        assert normed(q0.half(), "gelu").shape[-1] == 16
        assert normed(q0, "gelu_fast").shape[-1] == 16
        assert normed(q0.half(), "gelu_fast").shape[-1] == 32


def test_halves_add_up_to_the_norm_in_more_bits():
    q0 = torch.randn(9, 2, 24).half()
    with FP16:
        found = normed(q0, "gelu_fast")
    exact = torch.nn.functional.layer_norm(q0.double().flatten(1), (48,), eps=EPS).view(q0.shape)
    assert_close(found[..., :24].double() + found[..., 24:].double(), exact, bound=2.0**-20)


def test_ops_on_halves_are_registered_as_they_compute():
    work = draw("pffn", (5, 0, 9), dtype=torch.float16)
    tensors = [work.arguments[name].detach() for name in ("q0", "k", "v", "q_offsets")]
    settings, ops = (9, "gelu_fast", 1.0, False, EPS, "triton"), torch.ops.gem_kernels
    with FP16:
        kept = ops.pffn(*tensors, *settings)
        for op, given in ((ops.pffn, (*tensors, *settings)), (ops.pffn_grad, (*kept, True, True, *tensors, *settings))):
            torch.library.opcheck(op.default, given, test_utils=("test_schema", "test_faketensor"))


def test_heads_that_are_too_wide_for_two_halves_are_refused():
    with FP16, pytest.raises(KernelUnavailable, match="head size 136 is above 128"):
        draw("pffn", dim=136, dtype=torch.float16, activation="gelu_fast").call(kernel_of("pffn"))
