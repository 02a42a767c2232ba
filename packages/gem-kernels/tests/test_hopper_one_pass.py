"""All gradients in one pass on Hopper: the plan of its warpgroups on a CPU, what the assembler says, how it is launched."""

import math

import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_emulated import Blocks, Pointer, emulate

from gem_core.ops.gdpa import reference as gdpa_reference
from gem_core.ops.hstu_attention import reference as hstu_reference
from gem_core.ops.jagged_attention import reference as jagged_reference
from gem_core.testing import assert_close
from gem_kernels.common.hopper import gates, items, language, launch, one_pass
from gem_kernels.common.schedule import Layout, tiles

MODULES = [language, items, gates, one_pass]


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def emulated(
    q, k, v, dout, q_offsets, k_offsets, max_q, max_k, *, scale, activation, after, causal, programs=2, factors=None, lse=None, delta=None, **words
):
    rows, heads = q_offsets.shape[0] - 1, q.shape[1]
    layout = Layout(q_offsets, k_offsets, rows, max_q, max_k, q.shape[0], k.shape[0], q.device)
    keys, queries = tiles(layout, "k", 128), tiles(layout, "q", 128)
    dq, dk, dv = (torch.full_like(x, float("nan")) for x in (q, k, v))
    sums = torch.zeros((q.shape[0] // 64 + rows + 1) * heads * 2, 128, 32)
    k_factor, v_factor = factors or launch.factors(activation, scale, after)
    statistics = {name: None if x is None else Pointer(x) for name, x in (("lse", lse), ("delta", delta))}
    part = [1, 1, 64, 128]
    emulate(
        one_pass.all_grads_kernel, MODULES, programs, q_desc=Blocks(q, part), do_desc=Blocks(dout, part), k_desc=Blocks(k, part),
        v_desc=Blocks(v, part), dk_desc=Blocks(dk, part), dv_desc=Blocks(dv, part), sums_desc=Blocks(sums, [1, 128, 32]), **statistics,
        records=Pointer(keys.records), count=Pointer(keys.count), heads=heads, tokens=q.shape[0], scale=scale, k_factor=k_factor,
        v_factor=v_factor, q_head=128, k_head=128, v_head=128, D=128, STAGES=3, ACTIVATION=activation, AFTER=after, CAUSAL=causal, **words,
    )  # fmt: skip
    emulate(
        one_pass.query_sums_kernel, MODULES, programs, dq_desc=Blocks(dq, [1, 1, 64, 64]), sums=Pointer(sums), records=Pointer(queries.records),
        count=Pointer(queries.count), heads=heads, factor=k_factor, D=128,
    )  # fmt: skip
    return dq, dk, dv


def inputs(q_tokens, k_tokens, heads=1):
    generator = torch.Generator().manual_seed(q_tokens + k_tokens)
    q, k, v, dout = (torch.randn(n, heads, 128, generator=generator).bfloat16() for n in (q_tokens, k_tokens, k_tokens, q_tokens))
    return q, k, v, dout


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turn", [False, True])
def test_case_I03_rows_that_attend_to_themselves(ahead, turn):
    lengths = (200, 0, 64, 1, 129)
    q, k, v, dout = inputs(sum(lengths), sum(lengths), heads=2)
    offsets = offsets_of(lengths)
    got = emulated(
        q, k, v, dout, offsets, offsets, 200, 200, scale=0.1, activation="silu_bf16", after=False, causal=True, AHEAD=ahead, TURN=turn
    )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = hstu_reference(*leaves, offsets, max_length=200, scale=0.1, causal=True, norm_length=1)
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout.double()), strict=True):
        assert_close(a, b, bound=1e-2)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("turn", [False, True])
def test_case_I03_keys_of_other_lengths(ahead, turn):
    q_lengths, k_lengths = (200, 0, 64, 1, 129), (64, 30, 0, 128, 300)
    q, k, v, dout = inputs(sum(q_lengths), sum(k_lengths), heads=2)
    qo, ko = offsets_of(q_lengths), offsets_of(k_lengths)
    got = emulated(q, k, v, dout, qo, ko, 200, 300, scale=0.1, activation="gelu_bf16", after=False, causal=False, AHEAD=ahead, TURN=turn)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = gdpa_reference(*leaves, qo, ko, max_q=200, max_k=300, scale=0.1, activation="gelu")
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout.double()), strict=True):
        assert_close(a, b, bound=1e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_case_I03_softmax(causal):
    lengths = (200, 0, 64, 1, 129)
    k_lengths = lengths if causal else (64, 30, 0, 128, 300)
    q, k, v, dout = inputs(sum(lengths), sum(k_lengths), heads=2)
    qo = offsets_of(lengths)
    ko = qo if causal else offsets_of(k_lengths)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    options = {"max_q": 200, "max_k": max(k_lengths), "scale": 0.1, "causal": causal}
    out, lse = jagged_reference(*leaves, qo, ko, return_lse=True, **options)
    delta = (out * dout).sum(-1).t().float().contiguous()
    lse = torch.where(lse == -torch.inf, torch.inf, lse / math.log(2)).t().float().contiguous()
    got = emulated(
        q, k, v, dout, qo, ko, 200, max(k_lengths), scale=0.1 * math.log2(math.e), activation="softmax", after=False, causal=causal,
        factors=(0.1, 1.0), lse=lse.detach(), delta=delta.detach(), AHEAD=False, TURN=False,
    )  # fmt: skip
    for a, b in zip(got, torch.autograd.grad(out, leaves, dout.double()), strict=True):
        assert_close(a, b, bound=1e-2)
