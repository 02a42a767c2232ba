"""Calls past the dispatcher do what the custom ops do, and only where nobody watches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from gem_kernels.ops import direct
from gem_kernels.ops.direct import unwatched
from gem_kernels.ops.gdpa import launch as gdpa
from gem_kernels.ops.jagged import move
from gem_kernels.ops.jagged_attention import launch as jagged

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter; tests/gpu has the CUDA ones")

OFFSETS = torch.tensor([0, 3, 3, 10])


class Subclass(torch.Tensor):
    pass


def leaves(seed=0, *, bias=False):
    draw = torch.Generator().manual_seed(seed)
    shapes = [(10, 2, 16)] * 3 + ([(3, 2, 7, 7)] if bias else [])
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def outputs(function, inputs, *options):
    """Output and the gradients of its sum of squares, which asks for an upstream gradient that is no constant."""
    out = function(*inputs, *options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [t for t in inputs if t is not None and t.requires_grad])]


GDPA = (OFFSETS, OFFSETS, 7, 7, "gelu", 0.5, False, 2, "triton")
JAGGED = (7, 7, 0.25, True, None, "triton")


def test_gdpa_gives_the_same_bits_on_both_ways():
    direct_way = outputs(gdpa._op, leaves(), *GDPA)
    op = outputs(torch.ops.gem_kernels.gdpa, leaves(), *GDPA)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(direct_way, op, strict=True))


@pytest.mark.parametrize("bias", [False, True])
def test_jagged_attention_gives_the_same_bits_on_both_ways(bias):
    found = []
    for way in (jagged._op, torch.ops.gem_kernels.jagged_attention):
        q, k, v, *rest = leaves(bias=bias)
        inputs = (q, k, v, OFFSETS, OFFSETS, rest[0] if bias else None)
        found.append(outputs(way, inputs, *JAGGED))
    assert len(found[0]) == (5 if bias else 4)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def joined(way, wanted):
    """The outputs of joining two parts, and of parting again, by ``way``, and the gradients of the wanted parts."""
    join, part = way
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(9)).requires_grad_(i in wanted) for i, shape in enumerate(((10, 3), (3, 3)))]
    offsets, total = [OFFSETS, torch.arange(4)], OFFSETS + torch.arange(4)
    whole = join(parts, offsets, total)
    first, second = part(whole * whole, offsets, total, [10, 3])
    loss = first.sum() * second.square().sum() if 1 in wanted else first.square().sum()  # of the second part of the output nobody wants a gradient
    return [whole.detach(), first.detach(), second.detach(), *torch.autograd.grad(loss, [parts[i] for i in wanted])]


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_lists_of_tensors_give_the_same_bits_on_both_ways(wanted):
    ops = torch.ops.gem_kernels
    direct_way, op = joined((move._join_op, move._part_op), wanted), joined((ops.jagged_join, ops.jagged_part), wanted)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(direct_way, op, strict=True))
    with torch.no_grad():
        assert not move._join_op([torch.ones(10, 3), torch.ones(3, 3)], [OFFSETS, torch.arange(4)], OFFSETS + torch.arange(4)).requires_grad


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_gradients_that_nobody_asks_for_are_not_given(wanted):
    inputs = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(leaves())]
    got = torch.autograd.grad(gdpa.gdpa(*inputs, OFFSETS, OFFSETS, max_q=7, max_k=7).sum(), [inputs[i] for i in wanted])
    whole = leaves()
    want = torch.autograd.grad(gdpa.gdpa(*whole, OFFSETS, OFFSETS, max_q=7, max_k=7).sum(), whole)
    assert all(torch.equal(mine, want[i]) for mine, i in zip(got, wanted, strict=True))


def test_a_second_derivative_is_refused():
    q, k, v = leaves()
    (dq,) = torch.autograd.grad(gdpa.gdpa(q, k, v, OFFSETS, OFFSETS, max_q=7, max_k=7).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        torch.autograd.grad(dq.sum(), k)


def test_plain_tensors_go_directly_and_watched_ones_do_not():
    x = torch.ones(2)
    assert unwatched((x, None, torch.nn.Parameter(x), 3))
    assert unwatched(([x, x], (x,), [3]))
    assert not unwatched((x, x.as_subclass(Subclass)))
    assert not unwatched(([x, x.as_subclass(Subclass)], 3))
    with TorchDispatchMode():
        assert not unwatched((x,))
    seen = []
    torch.func.vmap(lambda y: seen.append(unwatched((y,))) or y)(x)
    torch.func.grad(lambda y: seen.append(unwatched((y,))) or y.sum())(x)
    assert seen == [False, False]
    assert torch.compile(lambda y: y + float(unwatched((y,))), backend="eager")(x).tolist() == [1.0, 1.0]
    assert unwatched((x,))


def test_what_a_transform_left_behind_goes_through_the_dispatcher():
    """Its memory cannot be read past it."""
    left = []
    torch.func.grad(lambda y: left.append(y) or y.sum())(leaves()[0].detach())
    assert not unwatched((left[0], None, 3))
    assert not unwatched(([left[0]], 3))
    q, k, v = (t.detach() for t in leaves())
    with pytest.raises(RuntimeError, match="data pointer"):
        left[0].data_ptr()
    assert torch.equal(gdpa.gdpa(left[0], k, v, OFFSETS, OFFSETS, max_q=7, max_k=7), gdpa.gdpa(q, k, v, OFFSETS, OFFSETS, max_q=7, max_k=7))


def test_a_flop_counter_still_sees_both_directions():
    q, k, v = leaves()
    with FlopCounterMode(display=False) as counted:
        gdpa.gdpa(q, k, v, OFFSETS, OFFSETS, max_q=7, max_k=7).sum().backward()
    forward = 4 * 2 * 16 * (3 * 3 + 7 * 7)
    assert counted.get_total_flops() == 3 * forward


def test_planted_blindness_to_a_mode_is_seen(monkeypatch):
    """Without its guard the counter would see nothing."""
    monkeypatch.setattr(direct, "unwatched", lambda inputs: True)
    q, k, v = leaves()
    with FlopCounterMode(display=False) as counted:
        gdpa.gdpa(q, k, v, OFFSETS, OFFSETS, max_q=7, max_k=7)
    assert counted.get_total_flops() == 0
