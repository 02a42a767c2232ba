"""Gradients of parts of one tensor lie side by side, hold the bits of contiguous ones, and reach the tensor without a copy."""

from unittest.mock import patch

import pytest
import torch
from gem_kernels_places import CASES, FEW, assert_side_by_side, block, both, hstu, jagged, kernel_of, normal, run
from gem_kernels_portable import offsets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gem_core.ops.packed import place_for, unbind_packed

pytest.importorskip("triton")

from gem_kernels.common import launcher
from gem_kernels.ops import places

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter; tests/gpu has the CUDA ones")

ALL = pytest.mark.parametrize("case", CASES)


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_lie_side_by_side_and_hold_the_same_bits(case, dtype):
    assert_side_by_side(case, dtype=dtype)


@ALL
def test_odd_sizes(case):
    assert_side_by_side(case, lengths=(1, 19), heads=3, dim=10)


@ALL
def test_case_B03_no_tokens(case):
    assert_side_by_side(case, lengths=(0, 0))


@ALL
def test_tokens_beyond_the_maximum_and_behind_the_last_row_get_zeros_in_their_places(case):
    seen, whole, grads = both(case, lengths=(20, 3), longest=17, behind=4)
    assert all(map(torch.equal, whole.unbind(1), grads))
    assert not whole[17:20].any()
    assert not whole[23:].any()
    assert whole[:17].any()
    assert seen[-1].data_ptr() == whole[:, -1].data_ptr()


@ALL
def test_a_base_with_strides_of_its_own(case):
    """Parts of a wider record, and records that lie the other way round."""
    count = CASES[case][1]
    for base in (normal(7, count + 2, 1, 16)[:, 1:-1], normal(count, 7, 1, 16).transpose(0, 1)):
        assert_side_by_side(case, lengths=FEW, heads=1, base=base)


def test_the_gradients_of_normed_heads_are_their_own():
    """They go through the norm; that of v has its place."""
    with patch.dict(CASES, {"gains": (block, 3, {"rope": True, "gains": True})}):
        seen, whole, grads = both("gains")
    assert all(map(torch.equal, whole.unbind(1), grads))
    assert [part.data_ptr() == place.data_ptr() for part, place in zip(seen, whole.unbind(1), strict=True)] == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("concat", [False, True])
def test_the_gradient_of_a_gate_behind_a_norm_lies_beside_those_of_hstu(concat, dtype):
    base = normal(7, 4, 2, 16, dtype=dtype)
    beside = normal(7, 32, dtype=dtype, seed=8) if concat else None

    def call(parts):
        gate, *others = parts
        found = hstu((1.0, *others), offsets_of(FEW), 4)
        return kernel_of("add_norm", "triton")(found.flatten(1), gate=gate, concat=beside)

    x, reached = base.clone().requires_grad_(), []
    whole = x.view_as(x)
    whole.register_hook(reached.append)
    out, seen = run(call, unbind_packed(whole, flat=1))
    copies = [part.detach().flatten(1) if i == 0 else part.detach().clone() for i, part in enumerate(base.unbind(1))]
    expected, grads = run(call, [t.clone().requires_grad_() for t in copies])
    assert torch.equal(out, expected)
    assert all(map(torch.equal, seen, grads))
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in reached[0].unbind(1)]


def test_a_part_that_is_turned_on_the_way_is_copied():
    """q and k are parts of one tensor, v of another."""
    x = normal(7, 3, 1, 16).requires_grad_()
    q, k = unbind_packed(x[:, :2] * 2)
    out = jagged((q, k, x[:, 2]), offsets_of(FEW), 4)
    (got,) = torch.autograd.grad(out.square().sum(), x)
    copies = [t.detach().clone().requires_grad_() for t in x.unbind(1)]
    out = jagged((copies[0] * 2, copies[1] * 2, copies[2]), offsets_of(FEW), 4)
    want = torch.stack(torch.autograd.grad(out.square().sum(), copies), 1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("case", ["block", "hstu", "jagged", "pooled"])
def test_parts_used_by_two_kernels(case):
    function, count, options = CASES[case]
    offsets, base = offsets_of(FEW), normal(7, count, 1, 16)

    def gradient(unbind):
        x = base.clone().requires_grad_()
        parts = unbind(x.view_as(x))
        twice = [function(parts, offsets, longest, **options) for longest in (4, 3)]
        return torch.autograd.grad((twice[0] * twice[1].cos()).sum(), x)[0]

    assert torch.equal(gradient(unbind_packed), gradient(lambda x: x.unbind(1)))


@pytest.mark.parametrize("case", ["block", "hstu", "jagged", "pooled"])
def test_an_op_that_somebody_watches_shares_no_memory(case):
    """Through the dispatcher results may not be views of one tensor; torch refuses those of a custom op."""
    function, count, options = CASES[case]
    x = normal(7, count, 1, 16).requires_grad_()
    parts, seen = unbind_packed(x.view_as(x)), []
    for part in parts:
        part.register_hook(seen.append)
    with FlopCounterMode(display=False):
        function(parts, offsets_of(FEW), 4, **options).square().sum().backward()
    assert len({grad.untyped_storage().data_ptr() for grad in seen}) == count
    packed = x.grad
    x.grad = None
    function(unbind_packed(x.view_as(x)), offsets_of(FEW), 4, **options).square().sum().backward()
    assert torch.equal(x.grad, packed)


@pytest.mark.parametrize("case", ["block", "hstu", "jagged", "pooled"])
def test_compiled_code_gets_the_same_gradients(case):
    function, count, options = CASES[case]
    base, offsets = normal(7, count, 1, 16), offsets_of(FEW)

    def whole(x):
        return function(unbind_packed(x * 2), offsets, 4, **options)

    gradients = []
    for way in (whole, torch.compile(whole, backend="aot_eager")):
        x = base.clone().requires_grad_()
        gradients.append(torch.autograd.grad(way(x).square().sum(), x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("case", ["block", "hstu", "jagged", "pooled"])
def test_checkpointed_layers_have_places_too(case):
    function, count, options = CASES[case]
    base, offsets, given = normal(7, count, 1, 16), offsets_of(FEW), []

    def layer(x):
        return function(unbind_packed(x * 2), offsets, 4, **options)

    def remember(edge):
        given.append(place_for(edge))
        return given[-1]

    gradients = []
    for way in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x = base.clone().requires_grad_()
        with patch.object(places, "place_for", remember):
            gradients.append(torch.autograd.grad(way(x).square().sum(), x)[0])
    assert torch.equal(*gradients)
    assert sum(place is not None for place in given) == 2 * min(count, 3)


def test_records_that_kernels_cannot_step_over_get_memory_of_their_own():
    with patch.object(places, "MAX_TOKEN_STRIDE", 95):
        seen, whole, grads = both("block")
    assert all(map(torch.equal, whole.unbind(1), grads))
    assert all(part.is_contiguous() for part in seen)


@pytest.mark.parametrize("case", ["block", "hstu", "jagged", "pooled", "pooled many seeds"])
def test_a_kernel_that_took_its_gradients_for_contiguous_would_be_noticed(case):
    """The planted fault: the stride of tokens in a contiguous gradient."""
    launch = launcher.launch

    def wrong(kernel, grid, device, arguments):
        launch(kernel, grid, device, arguments | {name: 1 for name in arguments if name in ("DK_PARTS", "DV_PARTS")})

    with patch.object(launcher, "launch", wrong), pytest.raises(AssertionError):
        assert_side_by_side(case)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_drawn_calls(data):
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=2))
    sizes = {"heads": data.draw(st.integers(1, 3)), "dim": 2 * data.draw(st.integers(1, 12))}
    assert_side_by_side(
        data.draw(st.sampled_from(sorted(CASES))), lengths=lengths, dtype=data.draw(st.sampled_from([torch.float32, torch.float16])), **sizes
    )
