"""The passes of pffn around its attention: which tokens count, what is kept for the gradients, which gradients are made, and by which launches."""

from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, offsets_of, results
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from gem_core.spec import KernelRequest, KernelUnavailable
from gem_core.testing import assert_close, choose, jagged_lengths, poisoned_memory
from gem_kernels.common import launcher
from gem_kernels.ops import limits
from gem_kernels.ops.gdpa.call import Call
from gem_kernels.ops.pffn import launch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter; tests/gpu has the CUDA ones")

EPS = 1e-5


def statistics(q0, offsets, max_q):
    """What the first pass keeps of each token, ``[2, tokens]``."""
    with poisoned_memory():
        return launch._Inputs(q0, q0, q0, offsets, max_q, "relu", 1.0, False, EPS, "triton").norm()[1]


def used(offsets, max_q, total):
    """Row by row, which tokens are among the first ``max_q`` of a row."""
    found = torch.zeros(total, dtype=torch.bool)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        found[start : min(end, start + max_q)] = True
    return found


@settings(max_examples=25, deadline=None)
@given(lengths=jagged_lengths(max_rows=9, max_length=30), before=st.integers(0, 3), after=st.integers(0, 20), max_q=st.integers(0, 31))
def test_case_B08_each_token_is_found_in_its_row_or_in_none(lengths, before, after, max_q):
    offsets = offsets_of(lengths) + before
    q0 = torch.randn(before + sum(lengths) + after, 1, 2)
    assert torch.equal(statistics(q0, offsets, max_q)[0] != -1, used(offsets, max_q, len(q0)))


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 255, 256, 257])
def test_the_search_counts_in_steps_that_reach_every_row(rows):
    offsets = torch.arange(rows + 1)
    assert torch.equal(statistics(torch.randn(rows + 2, 1, 2), offsets, 1)[0] != -1, used(offsets, 1, rows + 2))


def test_offsets_that_fall_read_nothing_outside_and_end():
    offsets = torch.tensor([0, 9, 4, -3, 70, 2])
    key = torch.ones(5, 1, 1, 16)
    out = kernel_of("pffn")(torch.randn(20, 1, 16), key, key, offsets, max_q=9)
    assert torch.isfinite(out).all()


def test_what_is_kept_is_the_factor_and_the_mean_of_each_token():
    q0 = torch.randn(20, 3, 8) * 2 + 5
    stats = statistics(q0, offsets_of([7, 13]), 13)
    flat = q0.double().flatten(1)
    assert_close(stats[1], flat.mean(1), bound=1e-6)
    assert_close(stats[0], (flat.var(1, correction=0) + EPS).rsqrt(), bound=1e-6)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_values_that_are_no_numbers_show_where_they_are_used_and_nowhere_else(bad):
    """A token whose variance leaves float32 has factor 0 or none: it is not taken for an unused one, which gives zeros."""
    work = draw("pffn", (5, 4), dim=8, q_offsets=offsets_of([2, 3]), max_q=2, k=torch.zeros(2, 7, 2, 8, requires_grad=True))
    clean = results(kernel_of("pffn"), work)
    spoilt = work.arguments["q0"].detach().clone()
    spoilt[[1, 4, 8], 0, 3] = bad  # the last two are past the maximum, and in no row
    found = results(kernel_of("pffn"), type(work)(work.op, {**work.arguments, "q0": spoilt.requires_grad_()}, 0, 0.0))
    rest = [0, 2, 3, 4, 5, 6, 7, 8]
    for mine, wanted in zip(found[:2], clean[:2], strict=True):
        assert torch.equal(mine[rest], wanted[rest])
    assert not torch.isfinite(found[0][1]).all() or bool(found[0][1].abs().max() > 1e30)


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (3, 5), (2, 72), (5, 256)])
def test_tokens_of_any_width_are_normed_whole(heads, dim):
    compare(draw("pffn", (5, 0, 3), heads=heads, dim=dim, activation="silu"))


@pytest.mark.parametrize(("width", "rows", "warps"), [(2, 16, 1), (64, 16, 1), (72, 8, 1), (512, 2, 1), (1024, 1, 1), (1025, 1, 2), (8192, 1, 8)])
def test_a_warp_holds_as_many_values_of_each_tensor_whatever_the_width(width, rows, warps, monkeypatch):
    seen = {}
    monkeypatch.setattr(launcher, "launch", lambda kernel, grid, device, given: seen.update(given))
    q0 = torch.empty(33, 1, width)
    launch._Inputs(q0, q0, q0, offsets_of([33]), 33, "gelu", 1.0, False, EPS, "triton").run("forward", torch.empty(2, 33))
    assert (seen["ROWS"], seen["num_warps"], seen["tiles"]) == (rows, warps, -(-33 // rows))


@pytest.mark.parametrize(("width", "resident"), [(64, 32), (1500, 16), (8192, 4)])
def test_with_reserved_multiprocessors_the_others_are_still_full_and_nothing_changes(width, resident, monkeypatch):
    asked = []

    def few(tiles, programs, device):
        asked.append(programs)
        return 1

    q0 = torch.randn(35, 1, width)
    call = launch._Inputs(q0, q0, q0, offsets_of([30]), 29, "gelu", 1.0, False, EPS, "triton")
    wanted = call.norm()
    monkeypatch.setattr(launch, "programs", few)
    assert all(torch.equal(a, b) for a, b in zip(call.norm(), wanted, strict=True))
    assert asked == [resident]


def test_gradients_of_a_strided_result_are_right():
    work = draw("pffn", (5, 0, 9), activation="silu")
    plain = results(kernel_of("pffn"), work)
    upstream = torch.linspace(-1, 1, 14 * 32, dtype=torch.float64).view(14, 2, 16).cos().float()
    strided = torch.stack((upstream, upstream.flip(0)), -1)[..., 0]
    assert not strided.is_contiguous()
    grads = torch.autograd.grad(work.call(kernel_of("pffn")), work.leaves(), strided)
    assert all(torch.equal(a, b) for a, b in zip(grads, plain[1:], strict=True))


def launches(call):
    """Names of the kernels that a call launches, in order."""
    found, run = [], launcher.launch

    def seen(kernel, *rest):
        found.append(kernel.fn.__name__)
        return run(kernel, *rest)

    with patch.object(launcher, "launch", seen):
        result = call()
    return found, result


WANTED = {
    (0, 1, 2): ["backward_kernel", "key_grad_kernel", "query_grad_kernel", "query_grad_kernel"],
    (0,): ["backward_kernel", "query_grad_kernel", "query_grad_kernel"],
    (1,): ["backward_kernel", "key_grad_kernel"],
    (2,): ["backward_kernel", "key_grad_kernel"],
}


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_each_pass_is_one_launch_and_only_wanted_gradients_are_made(wanted):
    work = draw("pffn", (5, 0, 9))
    whole = results(kernel_of("pffn"), work)
    names = ("q0", "k", "v")
    chosen = {name: work.arguments[name].detach().requires_grad_(i in wanted) for i, name in enumerate(names)}
    call = type(work)(work.op, {**work.arguments, **chosen}, 0, 0.0)
    there, out = launches(lambda: call.call(kernel_of("pffn")))
    assert there == ["norm_kernel", "forward_kernel", "forward_kernel"], "tile lists were made before, for the offsets are the same"
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).cos().float()
    back, grads = launches(lambda: torch.autograd.grad(out, call.leaves(), upstream))
    assert back == WANTED[wanted]
    assert all(torch.equal(grad, whole[1 + i]) for i, grad in zip(wanted, grads, strict=True))


def test_past_the_dispatcher_or_through_it_the_bits_are_the_same():
    work = draw("pffn", (5, 0, 9), activation="silu")
    ways = []
    for op in (launch._op, torch.ops.gem_kernels.pffn):
        with patch.object(launch, "_op", op):
            ways.append(results(kernel_of("pffn"), work))
    assert all(torch.equal(a, b) for a, b in zip(*ways, strict=True))


class Ends(torch.autograd.Function):
    """A step behind the block that hands back no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_without_a_gradient_of_the_result_nothing_is_launched():
    work = draw("pffn", (5, 0, 9))
    out = Ends.apply(work.call(kernel_of("pffn")))
    found, grads = launches(lambda: torch.autograd.grad(out.sum(), work.leaves(), allow_unused=True))
    assert found == []
    assert grads == (None,) * 3


@pytest.mark.parametrize(("wanted", "times"), [((0, 1, 2), 2), ((0,), 1), ((1,), 1)])
def test_flops_are_those_of_real_lengths_and_of_wanted_gradients(wanted, times):
    work = draw("pffn", (3, 0, 9, 2))
    leaves = [work.arguments[name].detach().requires_grad_(i in wanted) for i, name in enumerate(("q0", "k", "v"))]
    call = type(work)(work.op, {**work.arguments, **dict(zip(("q0", "k", "v"), leaves, strict=True))}, 0, 0.0)
    with FlopCounterMode(display=False) as counter:
        out = call.call(kernel_of("pffn"))
    assert counter.get_total_flops() == 4 * 2 * 16 * 7 * 14
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == times * 4 * 2 * 16 * 7 * 14


# ---- gluon ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "gelu_fast"])
def test_on_hopper_the_same_passes_stand_around_its_attention(activation, monkeypatch):
    """Its attention needs a GPU: the portable kernels stand in its place."""
    backends = []

    def portable(**given):
        backends.append(given["backend"])
        return Call(**given | {"backend": "triton"})

    monkeypatch.setattr(launch, "Call", portable)
    monkeypatch.setattr(launch, "HALVED", (torch.float16,))
    compare(draw("pffn", (5, 0, 34), dtype=torch.float16, activation=activation), launch.gluon)
    assert backends == ["gluon"] * 2


def request(**given):
    given = {"op": "pffn", "device": "cuda", "dtype": "bf16", "arch": 90, "head_dim": 128, "features": frozenset({"act_gelu"}), **given}
    return KernelRequest(**given)


FAST = frozenset({"act_gelu_fast"})
CHOICES = [
    ({}, "gluon"),
    ({"head_dim": 64, "features": FAST}, "gluon"),
    ({"head_dim": 128, "dtype": "fp16", "features": FAST}, "gluon"),
    ({"head_dim": 128, "features": FAST}, "triton"),
    ({"head_dim": 32}, "triton"),
    ({"dtype": "fp32"}, "triton"),
    ({"arch": 80}, "triton"),
    ({"arch": 100}, "triton"),
]


@pytest.mark.parametrize(("given", "backend"), CHOICES, ids=[str(given) for given, _ in CHOICES])
def test_gluon_is_taken_where_it_fits(given, backend):
    assert choose(request(**given)).impl.backend == backend


def test_gluon_by_name_is_refused_where_it_does_not_fit():
    with pytest.raises(KernelUnavailable, match="head size 128 is above 64"):
        choose(request(features=FAST), "gluon")
    with pytest.raises(KernelUnavailable, match=r"head.* 32"):
        choose(request(head_dim=32), "gluon")
    assert limits.check_pffn_hopper(request(features=FAST)) == ["head size 128 is above 64"]


def test_halves_that_hopper_does_not_take_are_refused_past_the_choice_too():
    with patch.object(launch, "HALVED", (torch.float16,)), pytest.raises(KernelUnavailable, match=r"'gluon'.*head size 72 is above 64"):
        draw("pffn", dim=72, dtype=torch.float16, activation="gelu_fast").call(launch.gluon)
