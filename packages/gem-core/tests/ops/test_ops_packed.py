"""``unbind_packed`` is ``unbind``, whatever becomes of the gradients; memory that was given comes back without a copy."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gem_core.ops.packed import Room, place_for, unbind_packed


def plain(x):
    return x.unbind(1)


class Scaled(torch.autograd.Function):
    """A stand-in for a kernel: ``sum_i (i + 2) part_i``, gradients in the places of some inputs. ``seen`` keeps those gradients."""

    @staticmethod
    def forward(ctx, takes, seen, *parts):
        ctx.takes, ctx.seen = takes, seen
        return sum((i + 2) * part for i, part in enumerate(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        grads = []
        for i, edge in enumerate(ctx.next_functions):
            place = place_for(edge) if i in ctx.takes else None
            grads.append((i + 2) * dout if place is None else place.copy_((i + 2) * dout))
        if ctx.seen is not None:
            ctx.seen[:] = grads
        return None, None, *grads


def scaled(*parts, takes=range(4), seen=None):
    return Scaled.apply(set(takes), seen, *parts)


def made(tokens=5, parts=3, rest=(2, 4), seed=0):
    return torch.randn(tokens, parts, *rest, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gradient(unbind, use, x):
    """Of the weighted sum of ``use(*parts)``, upstream of it a gradient that differs everywhere; and what reached the unbinding."""
    y = x * 1.0
    reached = []
    y.register_hook(reached.append)
    out = use(*unbind(y))
    (grad,) = torch.autograd.grad((out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum(), x)
    return grad, reached[0]


def same(use, x):
    want, _ = gradient(plain, use, x)
    got, reached = gradient(unbind_packed, use, x)
    assert torch.equal(got, want)
    assert reached.is_contiguous()
    return reached


def lies_at(part, whole, index):
    place = whole.select(1, index)
    return part.data_ptr() == place.data_ptr() and part.stride() == place.stride()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_all_gradients_in_their_places_are_one_tensor_without_a_copy(tokens, parts):
    seen = []
    reached = same(lambda *p: scaled(*p, seen=seen), made(tokens, parts))
    assert all(lies_at(part, reached, i) for i, part in enumerate(seen))


@pytest.mark.parametrize("takes", [(1, 2, 3), (0,), (0, 2), ()])
def test_parts_that_come_from_elsewhere_are_copied_beside_the_others(takes):
    seen = []
    reached = same(lambda *p: scaled(*p, takes=takes, seen=seen), made(parts=4))
    assert [lies_at(part, reached, i) for i, part in enumerate(seen)] == [i in takes for i in range(4)]


def test_a_part_that_nobody_uses_gets_zeros():
    def use(*parts):
        return scaled(parts[0], parts[2])

    whole = same(use, made())
    assert not whole[:, 1].any()
    same(lambda *p: p[1] * 2, made())  # nobody takes a place


def test_a_part_used_twice_gets_the_sum_and_no_gradient_is_written_over():
    seen = []

    def use(*parts):
        return scaled(*parts, seen=seen) + parts[0] * 3

    reached = same(use, made())
    assert not lies_at(seen[1], reached, 1)
    weight = torch.linspace(1, 2, seen[0].numel(), dtype=torch.float64).view(seen[0].shape)
    assert torch.equal(seen[0], 2 * weight)


def test_two_kernels_on_the_same_parts_do_not_share_places():
    first, second = [], []

    def use(*parts):
        return scaled(*parts, seen=first) * scaled(*parts, seen=second)

    same(use, made())
    assert len({grad.data_ptr() for grad in (*first, *second)}) == 6


def test_two_kernels_on_different_parts_fill_one_tensor():
    first, second = [], []

    def use(*parts):
        return scaled(*parts[:2], seen=first) * scaled(*parts[2:], seen=second)

    reached = same(use, made(parts=4))
    assert all(lies_at(part, reached, i) for i, part in enumerate((*first, *second)))


@pytest.mark.parametrize(("takes", "copies"), [((0, 1, 2), []), ((0, 2), ["aten.copy_.default"]), ((), ["aten.stack.default"])])
def test_what_joining_copies(takes, copies):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    room, called = Room(made()), []
    grads = tuple(room.give(i) if i in takes else torch.ones(5, 2, 4, dtype=torch.float64) for i in range(3))
    with Seen():
        room.joined(grads)
    assert [name for name in called if "select" not in name and "view" not in name] == copies


def test_gradients_that_swap_places_are_put_right():
    """Views of the memory that was given, each in the place of another: filling in place would read what it has written."""
    x = made()
    a, b, c = unbind_packed(x * 1.0)
    grads = []
    out = scaled(a, b, c, seen=grads)
    a.register_hook(lambda grad: grads[1])
    b.register_hook(lambda grad: grads[0])
    (got,) = torch.autograd.grad(out.sum(), x)
    want = torch.tensor([3.0, 2.0, 4.0], dtype=torch.float64)[None, :, None, None].expand_as(x)
    assert torch.equal(got, want)


def test_a_hook_may_keep_and_replace_a_gradient():
    kept = []

    def use(a, b, c):
        a.register_hook(lambda grad: kept.append(grad) or grad * 10)
        return scaled(a, b, c)

    same(use, made())
    want = torch.linspace(1, 2, kept[1].numel(), dtype=torch.float64).view(kept[1].shape) * 2
    assert torch.equal(kept[1], want), "the gradient that the hook kept was written to"


def test_a_hook_may_change_a_gradient_in_place():
    def use(a, b, c):
        a.register_hook(lambda grad: grad.mul_(10))
        return scaled(a, b, c)

    same(use, made())


def test_a_tensor_that_somebody_else_reads_is_not_written_to():
    """The gradients of parts 1 to 3 are views of one tensor with room for part 0, as those of ``torch.stack`` are; but that room is not ours."""
    x = made(parts=4)
    parts = unbind_packed(x * 1.0)
    stacked = torch.stack([parts[0].sin(), *parts[1:]], 1)
    kept = []
    stacked.register_hook(kept.append)
    weight = torch.randn(stacked.shape, dtype=torch.float64)
    (got,) = torch.autograd.grad((stacked * weight).sum(), x)
    assert torch.equal(kept[0], weight)
    assert torch.equal(got[:, 1:], weight[:, 1:])
    assert torch.equal(got[:, 0], weight[:, 0] * x[:, 0].detach().cos())


def test_the_graph_may_be_walked_again():
    x = made()
    y = x * 1.0
    out = scaled(*unbind_packed(y)).square().sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert first.data_ptr() != second.data_ptr()


def test_nothing_is_kept_after_a_walk():
    x = made()
    y = x * 1.0
    reached = []
    y.register_hook(lambda grad: reached.append(weakref.ref(grad)))
    out = scaled(*unbind_packed(y)).sum()
    torch.autograd.grad(out, x, retain_graph=True)
    assert reached[0]() is None


def test_a_walk_that_ends_before_the_unbinding_leaves_nothing_behind():
    """Its gradients belong to whoever asked for them."""
    x = made(parts=4)
    parts = unbind_packed(x * 1.0)
    out = scaled(*parts[1:]) * parts[0]
    early = torch.autograd.grad(out.sum(), parts[1:], retain_graph=True)
    before = [grad.clone() for grad in early]
    (got,) = torch.autograd.grad(out.sum(), x)
    assert all(map(torch.equal, early, before))
    again = scaled(*plain(x)[1:]) * plain(x)[0]
    assert torch.equal(got, torch.autograd.grad(again.sum(), x)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    seen = []

    def block(x):
        return scaled(*unbind_packed(x * 2.0), seen=seen)

    x = made()
    (got,) = torch.autograd.grad(block(x * 1.0).square().sum(), x)
    checkpoint(block, x * 1.0, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(got, x.grad)
    assert seen[1].data_ptr() - seen[0].data_ptr() == 8 * x.element_size(), "checkpointing lost the places"


def test_autocast_and_a_gradient_of_another_dtype():
    x = made(rest=(8,)).detach().float().requires_grad_()
    weight = torch.eye(8)

    def use(a, b, c):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.linear(a, weight).float() + scaled(b, c).double().float()

    assert same(use, x).dtype is torch.float32


def test_gradients_and_second_derivatives_are_those_of_unbind():
    x = made(2, 3, (2,))

    def polynomial(x):
        a, b, c = unbind_packed(x)
        return a * b * b + c.sin()

    assert torch.autograd.gradcheck(polynomial, x)
    assert torch.autograd.gradgradcheck(polynomial, x)


def test_a_second_derivative_is_not_lost_in_the_places():
    """A kernel without second derivatives says so; its gradient beside one that has some does not lose either."""
    x = made(parts=2)
    a, b = unbind_packed(x * 1.0)
    for of_a in (scaled(a).sum(), scaled(a).square().sum()):
        (first,) = torch.autograd.grad(of_a + b.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 1].sum(), x, retain_graph=True)
        torch.testing.assert_close(second[:, 1], 6 * x[:, 1].detach())
        assert not second[:, 0].any()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first[:, 0].sum().backward()


def test_no_gradient_is_wanted():
    x = made().detach()
    assert all(map(torch.equal, unbind_packed(x), plain(x)))
    with torch.no_grad():
        assert unbind_packed(made())[0].grad_fn is None
    with torch.inference_mode():
        assert all(map(torch.equal, unbind_packed(x), plain(x)))


def test_transforms_and_compilers_get_plain_unbind():
    x = made().detach()

    def f(x):
        a, b, c = unbind_packed(x)
        return (a * b + c).sum()

    assert torch.equal(torch.func.grad(f)(x), torch.func.grad(lambda x: (x[:, 0] * x[:, 1] + x[:, 2]).sum())(x))
    assert torch.func.vmap(lambda t: unbind_packed(t)[1])(x[None]).shape == (1, 5, 2, 4)
    graphs = []

    def keep(module, inputs):
        graphs.append(module)
        return module.forward

    y = x.clone().requires_grad_()
    torch.compile(f, backend=keep, fullgraph=True)(y).backward()
    assert len(graphs) == 1
    assert not any("autograd" in str(node.target) for node in graphs[0].graph.nodes)
    assert torch.equal(y.grad, torch.func.grad(f)(x))


def test_other_edges_have_no_place():
    x = made()
    a, *_ = plain(x * 1.0)
    assert place_for((a.grad_fn, 0)) is None
    assert place_for((None, 0)) is None
    assert place_for((a.clone().grad_fn, 0)) is None


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_whatever_takes_places_and_uses_parts(data):
    parts = data.draw(st.integers(1, 4))
    x = made(data.draw(st.integers(0, 3)), parts, data.draw(st.sampled_from([(), (1,), (2, 3)])), seed=parts)
    used = data.draw(st.lists(st.lists(st.integers(0, parts - 1), min_size=1, max_size=4), min_size=1, max_size=3))
    takes = [data.draw(st.sets(st.integers(0, 3))) for _ in used]

    def use(*parts):
        return sum(scaled(*(parts[i] for i in one), takes=t).square() for one, t in zip(used, takes, strict=True))

    torch.testing.assert_close(gradient(unbind_packed, use, x)[0], gradient(plain, use, x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("takes", [(0, 1), (1,), (0,)])
def test_a_part_with_its_last_dimensions_as_one_has_its_place_too(takes):
    x, seen = made(parts=3), []
    y = x * 1.0
    first, second, third = unbind_packed(y, flat=2)
    assert [first.shape, second.shape, third.shape] == [(5, 8), (5, 8), (5, 2, 4)]
    assert third.data_ptr() == y[:, 2].data_ptr()
    reached = []
    y.register_hook(reached.append)
    out = scaled(first, second, takes=takes, seen=seen)
    weight = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    (grad,) = torch.autograd.grad((out * weight).sum() + (third * 3).sum(), x)
    want = torch.stack([(2 * weight).view(5, 2, 4), (3 * weight).view(5, 2, 4), torch.full((5, 2, 4), 3.0, dtype=out.dtype)], 1)
    assert torch.equal(grad, want)
    assert [part.data_ptr() == reached[0][:, i].data_ptr() for i, part in enumerate(seen)] == [i in takes for i in range(2)]


def test_flat_parts_used_twice_or_where_code_is_watched_are_as_ever():
    x = made()

    def use(first, second, third):
        return (scaled(first, takes=[0]) * first + second.flatten(1) + third.flatten(1)).flatten()

    want = torch.autograd.grad(use(*(part.flatten(1) for part in x.unbind(1))).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(use(*unbind_packed(x, flat=1)).sum(), x)[0], want)
    assert torch.equal(torch.func.grad(lambda y: unbind_packed(y, flat=1)[0].square().sum())(x.detach())[:, 0], 2 * x.detach()[:, 0])
