"""What other packages bring, offered as backends: the parts of the adapters that run without a GPU."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.ops import jagged_pad, masks
from gem_core.spec import KernelRequest, KernelUnavailable, MachineError
from gem_core.testing import registry
from gem_core.testing.conformance import make_plan
from gem_core.testing.trial import check
from gem_kernels.ops import fa4, fbgemm, flex, limits, packed, varlen


def trials():
    """The contract's cases in float32 on the CPU, without those that ask for a bias."""
    plan = make_plan("jagged_attention", backend="reference", device="cpu", dtypes=("fp32",))
    return [trial for trial in plan.trials if not trial.name.startswith("bias")]


def held(trial, function):
    check(replace(trial, impl=SimpleNamespace(resolve=lambda: function, deterministic=False)), registry().op("jagged_attention"))


def attention_of_rows(q, k, v, q_starts, k_starts, max_q, max_k, scale, causal, window):
    """What FlashAttention does, a row at a time: nothing written outside rows or for rows of one side only, infinity for a query without a key.

    Its gradients outside rows are as unwritten; here they are NaN.
    """
    groups = q.shape[1] // k.shape[1]
    out, lse = torch.full((*q.shape[:2], v.shape[2]), torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)
    edges, k_edges = q_starts.tolist(), k_starts.tolist()
    for a, b, c, d in zip(edges[:-1], edges[1:], k_edges[:-1], k_edges[1:], strict=True):
        assert (b > a) == (d > c), "rows of one side only never reach the kernel"
        assert b - a <= max_q
        distance = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        seen = torch.full_like(distance, not causal, dtype=torch.bool) | (distance >= 0)
        for side, reach in zip((distance, -distance), window, strict=True):
            seen = seen & (side <= reach if reach >= 0 else side == side)
        s = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d].repeat_interleave(groups, 1)) * scale
        s = s.masked_fill(~seen, -torch.inf)
        blind = ~seen.any(-1)
        p = s.masked_fill(blind[:, None], 0.0).softmax(-1).masked_fill(blind[:, None], 0.0)
        out = out.slice_scatter(torch.einsum("hqk,khd->qhd", p, v[c:d].repeat_interleave(groups, 1)), 0, a, b)
        lse[:, a:b] = s.detach().logsumexp(-1).masked_fill(blind, torch.inf)
    for x in (q, k, v):
        starts = q_starts if x is q else k_starts
        inside = torch.arange(x.shape[0])[:, None, None] < starts[-1]
        x.register_hook(lambda grad, inside=inside: torch.where(inside, grad, torch.nan))
    return out, lse


def by_rows(q, k, v, q_offsets, k_offsets, **options):
    return packed.attend(q, k, v, q_offsets, k_offsets, function=attention_of_rows, backend="rows", **options)


@pytest.mark.parametrize("trial", trials(), ids=str)
def test_rows_reach_flash_attention_as_it_wants_them(trial):
    held(trial, by_rows)


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_the_largest_score_before_scaling_is_that_after_it(scale):
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    offsets = torch.tensor([0, 4, 9])
    seen = []

    def function(*arguments):
        seen.append(arguments[7])
        return attention_of_rows(*arguments)

    with patch.object(torch.Tensor, "register_hook", lambda self, hook: None):
        out = packed.attend(q, k, v, offsets, offsets, function=function, backend="rows", max_q=5, max_k=5, scale=scale)
    assert seen[0] > 0
    expected = packed.reference(q, k, v, offsets, offsets, max_q=5, max_k=5, scale=scale)
    torch.testing.assert_close(out, expected)


def test_a_planted_mistake_in_moving_rows_is_noticed():
    trial = next(t for t in trials() if t.name == "cross")
    real = packed._together

    def without_one_sided_rows(*arguments):
        with patch.object(packed.Tensor, "__gt__", lambda self, other: torch.ones_like(self, dtype=torch.bool)):
            return real(*arguments)

    held(trial, by_rows)
    with patch.object(packed, "_together", without_one_sided_rows), pytest.raises((AssertionError, RuntimeError)):
        held(trial, by_rows)


def test_heads_that_are_too_wide_are_refused():
    x, offsets = torch.zeros(2, 1, 264), torch.tensor([0, 2])
    for module, name in ((varlen, "varlen"), (fa4, "fa4")):
        with pytest.raises(KernelUnavailable, match=rf"'{name}'.*head size 264"):
            module.jagged_attention(x, x, x, offsets, offsets, max_q=2, max_k=2)


@pytest.mark.parametrize("module", [varlen, fa4, flex], ids=lambda module: module.__name__)
def test_a_bias_is_refused_and_not_left_out(module):
    x, offsets = torch.zeros(2, 1, 16), torch.tensor([0, 2])
    with pytest.raises(KernelUnavailable, match="takes no bias"):
        module.jagged_attention(x, x, x, offsets, offsets, max_q=2, max_k=2, bias=torch.zeros(1, 1, 2, 2))


# ---- FlexAttention --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trial", trials(), ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_output_of_flex_attention_is_that_of_the_contract(trial):
    """By its uncompiled form, which looks at each pair and has no gradients on a CPU; the list of blocks has a test of its own."""
    from torch.nn.attention.flex_attention import flex_attention

    arguments, options = trial.make(trial.inputs())
    expected = packed.reference(*arguments, **options)
    plain = [t.detach() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in arguments]
    with patch.object(flex, "_compiled", lambda: flex_attention):
        got = flex.jagged_attention(*plain, **options)
    for mine, theirs in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, expected)), strict=True):
        assert mine.dtype is torch.float32
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)


LENGTHS = st.lists(st.integers(0, 400), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(LENGTHS, LENGTHS, st.booleans(), st.sampled_from([None, 0, 3, 130, 1000]))
def test_the_blocks_of_flex_attention_hold_every_pair_and_no_block_twice(queries, keys, causal, window):
    rows = min(len(queries), len(keys))
    q_lengths, k_lengths = torch.tensor(queries[:rows]), torch.tensor(keys[:rows])
    max_q, max_k = max(int(q_lengths.max()), 1), max(int(k_lengths.max()), 1)
    mask = flex.block_mask(q_lengths, k_lengths, max_q, max_k, causal=causal, window=window)
    seen = masks.visible(q_lengths, k_lengths, max_q, max_k, causal=causal, window=window).expand(rows, max_q, max_k)
    seen = seen & (torch.arange(max_q) < q_lengths[:, None])[:, :, None]
    held_by = torch.zeros_like(seen, dtype=torch.int64)
    whole = torch.zeros_like(seen)
    sources = ((mask.kv_num_blocks, mask.kv_indices, False), (mask.full_kv_num_blocks, mask.full_kv_indices, True))
    for counts, indices, is_whole in sources:
        for row in range(rows):
            for block in range(counts.shape[2]):
                for key in indices[row, 0, block, : counts[row, 0, block]].tolist():
                    part = (row, slice(block * flex.BLOCK, (block + 1) * flex.BLOCK), slice(key * flex.BLOCK, (key + 1) * flex.BLOCK))
                    held_by[part] += 1
                    whole[part] |= is_whole
    assert not (seen & (held_by == 0)).any()
    assert held_by.max() <= 1
    in_row = (torch.arange(max_q) < q_lengths[:, None])[:, :, None]
    assert not (whole & in_row & ~seen).any(), "a block that is taken whole holds only pairs that see each other"
    if window == 3 and max_k > 3 * flex.BLOCK and rows == 1:
        assert held_by.sum() < held_by.numel(), "blocks outside the window are skipped"


# ---- fbgemm ---------------------------------------------------------------------------------------------------------------------------


def test_case_B09_float64_is_unfit_where_fbgemm_has_no_kernel_for_it():
    with pytest.raises(KernelUnavailable, match="fp64"):
        jagged_pad(torch.zeros(2, 1).double(), torch.tensor([0, 2]), max_length=2, backend="fbgemm")


@pytest.mark.parametrize("broken", ["missing", "unloaded"])
def test_case_A03_an_fbgemm_that_does_not_load_is_named(broken):
    fbgemm._operators.cache_clear()
    operators = SimpleNamespace(fbgemm=SimpleNamespace())
    modules = {"fbgemm_gpu": None if broken == "missing" else SimpleNamespace()}
    with patch.dict(sys.modules, modules), patch.object(fbgemm, "torch", SimpleNamespace(ops=operators)), pytest.raises(MachineError, match="load"):
        fbgemm._operators()
    fbgemm._operators.cache_clear()


# ---- what is listed -------------------------------------------------------------------------------------------------------------------


def test_fa4_says_which_distribution_is_missing_and_where_heads_end():
    request = KernelRequest(op="jagged_attention", device="cuda", dtype="bf16", arch=100, head_dim=256)
    with patch.object(limits, "version", side_effect=limits.PackageNotFoundError):
        assert "flash-attn-4, which is not installed" in limits.check_fa4(request)[0]
    with patch.object(limits, "version", lambda name: "4.0"):
        assert limits.check_fa4(request) == ["head size 256 is above 128"]
        assert limits.check_fa4(replace(request, arch=90)) == []


def test_flex_takes_no_head_below_16():
    request = KernelRequest(op="jagged_attention", device="cuda", dtype="bf16", arch=90, head_dim=8)
    assert limits.check_flex(request) == ["head size 8 is below 16"]
    assert limits.check_flex(replace(request, head_dim=16)) == []
