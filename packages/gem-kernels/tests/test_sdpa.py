"""The sdpa backend beyond the conformance suite: float32 accuracy, empty rows, what it refuses, and that it is faster than the reference."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings

from gem_core.ops import jagged_attention as public
from gem_core.ops import pooled_attention
from gem_core.ops.jagged_attention import check
from gem_core.spec import KernelRequest, KernelUnavailable, load_object
from gem_core.testing import assert_close, choose, jagged_lengths
from gem_core.testing.close import largest_difference
from gem_core.testing.conformance import make_plan
from gem_core.testing.trial import run
from gem_kernels.ops import sdpa

FLOAT32_BOUND = 8e-6
"""Eight times 2^-20, the accuracy of an exponential in torch's fused CPU kernel."""


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def packed(lengths, *, heads=2, dim=8, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(sum(lengths), heads, dim, generator=g).to(dtype).requires_grad_() for _ in range(3))
    return q, k, v, offsets_of(lengths)


def gradients(out, inputs):
    return torch.autograd.grad(out, inputs, torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))


@pytest.mark.parametrize("op", ["jagged_attention", "pooled_attention"])
def test_every_case_of_the_contract_in_float32(op):
    plan = make_plan(op, backend="sdpa", device="cpu", dtypes=("fp32",))
    reference = load_object(plan.op.reference)
    assert len(plan.trials) > 10
    for trial in plan.trials:
        truth = run(reference, trial.make, trial.inputs(exact=True))
        for name, value in run(trial.impl.resolve(), trial.make, trial.inputs()).items():
            assert value.dtype is torch.float32
            scale = float(truth[name].abs().max()) if truth[name].numel() else 0.0
            assert largest_difference(value, truth[name]) <= FLOAT32_BOUND * max(scale, 1.0), f"{trial}: {name}"


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 0}, {"bias": True}], ids=str)
def test_case_B03_rows_without_tokens_give_zeros_and_zero_gradients(options):
    q, k, v, offsets = packed([0, 4, 0, 2, 0])
    no_keys = offsets_of([0, 0, 0, 6, 0])
    if options:
        options = {"bias": torch.zeros(5, 1, 4, 6)} if "bias" in options else options
    out = sdpa.jagged_attention(q, k, v, offsets, no_keys, max_q=4, max_k=6, **options)
    assert torch.isfinite(out).all()
    assert not out[:4].any()
    dq, dk, dv = gradients(out, (q, k, v))
    assert not dq[:4].any()
    for gradient in (dq, dk, dv):
        assert torch.isfinite(gradient).all()
    assert dq[4:].any() or "window" in options or "causal" in options
    assert dv.any()


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_case_B03_batches_without_tokens(lengths):
    q, k, v, offsets = packed(lengths)
    out = sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=0, max_k=0)
    assert out.shape == (0, 2, 8)
    pooled = sdpa.pooled_attention(torch.randn(3, 2, 8), k, v, offsets, max_k=0)
    assert pooled.shape == (len(lengths), 3, 2, 8)
    assert not pooled.any()


def test_a_bias_of_minus_infinity_removes_keys_and_gets_finite_gradients():
    q, k, v, offsets = packed([3, 2])
    bias = torch.randn(1, 2, 3, 3)
    bias[..., 0] = -torch.inf
    bias[:, :, 1] = -torch.inf
    bias.requires_grad_()
    named = {"max_q": 3, "max_k": 3, "bias": bias}
    out = public(q, k, v, offsets, offsets, **named, backend="sdpa")
    expected = public(q, k, v, offsets, offsets, **named, backend="reference")
    assert_close(out, expected, bound=FLOAT32_BOUND)
    for ours, theirs in zip(gradients(out, (q, k, v, bias)), gradients(expected, (q, k, v, bias)), strict=True):
        assert torch.isfinite(ours).all()
        assert_close(ours, theirs, bound=FLOAT32_BOUND)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(lengths=jagged_lengths(max_rows=6, max_length=40))
def test_rows_do_not_see_each_other(lengths):
    """The result of a batch is the results of its rows, one by one."""
    q, k, v, offsets = packed(lengths)
    together = sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=max(lengths, default=0), max_k=max(lengths, default=0), causal=True)
    for row, length in enumerate(lengths):
        part = slice(int(offsets[row]), int(offsets[row + 1]))
        alone = sdpa.jagged_attention(q[part], k[part], v[part], offsets_of([length]), offsets_of([length]), max_q=length, max_k=length, causal=True)
        assert_close(together[part], alone, bound=FLOAT32_BOUND)


def test_poison_beyond_the_rows_does_not_reach_them():
    q, k, v, offsets = packed([3, 1])
    wide = [torch.cat([t.detach(), torch.full((2, 2, 8), float("nan"))]) for t in (q, k, v)]
    assert_close(
        sdpa.jagged_attention(*wide, offsets, offsets, max_q=3, max_k=3)[:4],
        sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=3, max_k=3),
        bound=0.0,
    )


def test_seeds_of_each_row_are_its_own():
    _, k, v, offsets = packed([3, 0, 2])
    seeds = torch.randn(3, 4, 2, 8)
    out = pooled_attention(seeds, k, v, offsets, max_k=3, backend="sdpa")
    for row in (0, 2):
        assert_close(out[row], pooled_attention(seeds[row], k, v, offsets, max_k=3, backend="sdpa")[row], bound=FLOAT32_BOUND)
    assert not out[1].any()


def test_repeats_to_the_bit_on_a_cpu():
    q, k, v, offsets = packed([7, 0, 19])
    runs = [gradients(sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=19, max_k=19, causal=True), (q, k, v)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_surrounding_autocast_does_not_change_the_result():
    q, k, v, offsets = packed([7, 0, 3])
    plain = sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=7, max_k=7)
    seeds = torch.randn(2, 2, 8)
    pooled = sdpa.pooled_attention(seeds, k, v, offsets, max_k=7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=7, max_k=7), plain)
        assert torch.equal(sdpa.pooled_attention(seeds, k, v, offsets, max_k=7), pooled)


def test_the_log_sum_exp_is_not_offered():
    q, k, v, offsets = packed([3])
    with pytest.raises(KernelUnavailable, match="log-sum-exp"):
        sdpa.jagged_attention(q, k, v, offsets, offsets, max_q=3, max_k=3, return_lse=True)
    with pytest.raises(KernelUnavailable, match="lse"):
        public(q, k, v, offsets, offsets, max_q=3, max_k=3, return_lse=True, backend="sdpa")


def test_it_is_not_taken_unless_named():
    q, k, v, offsets = packed([3])
    request = check(q, k, v, offsets, offsets, max_q=3, max_k=3)
    assert choose(request).backend != "sdpa"
    assert choose(request, "sdpa").impl.variant == "cpu"


@pytest.mark.parametrize("op", ["jagged_attention", "pooled_attention"])
def test_determinism_is_declared_honestly(op):
    cpu = KernelRequest(op=op, device="cpu", dtype="fp32", deterministic=True)
    cuda = KernelRequest(op=op, device="cuda", dtype="fp32", arch=90, deterministic=True)
    assert choose(cpu, "sdpa").impl.deterministic
    with pytest.raises(KernelUnavailable, match="not deterministic"):
        choose(cuda, "sdpa")


def test_a_planted_fault_is_noticed():
    """Without the handling of queries that see no key, they get an average of what they must not see."""
    q, k, v, _ = packed([3])
    queries, keys = offsets_of([3, 0]), offsets_of([2, 1])
    named = {"max_q": 3, "max_k": 2, "causal": True}
    good = sdpa.jagged_attention(q, k, v, queries, keys, **named)
    with patch.object(torch.Tensor, "masked_fill", lambda self, *rest: self):
        bad = sdpa.jagged_attention(q, k, v, queries, keys, **named)
    assert not good[0].any()
    with pytest.raises(AssertionError):
        assert_close(bad, good, bound=1e-2)
