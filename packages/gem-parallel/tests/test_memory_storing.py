"""Activations held in eight bits or in host memory: the error of the format, the same bits, and what must not be touched."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_parallel.memory.storing import SMALLEST, Eighths, Scope, Viewed, bytes_in_eight_bits, is_activation


def saved_by(function: Any, policy: str) -> tuple[Any, list[tuple[Tensor, Any]]]:
    """The result of a function, and what autograd saved with how it is held."""
    scope, pairs = Scope(policy), list[tuple[Tensor, Any]]()

    def pack(tensor: Tensor) -> Any:
        held = scope.pack(tensor)
        pairs.append((tensor, held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, scope.unpack):
        return function(), pairs


def activation(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Something that depends on two leaves."""
    return torch.randn(*shape, dtype=dtype, requires_grad=True) * torch.randn(*shape, dtype=dtype, requires_grad=True)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 70),
    power=st.integers(-44, 30),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_eight_bits_err_by_half_a_unit_in_the_last_place(rows: int, width: int, power: int, dtype: torch.dtype, seed: int) -> None:
    """e4m3 has 3 bits after the leading one, and below 2**-6 steps of 2**-9: relative 2**-4, or 2**-10 / 448 of the row's largest."""
    draw = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, width, generator=draw) * 10.0 ** torch.randint(-3, 4, (rows, width), generator=draw) * 10.0**power).to(dtype)
    got = Eighths(x).unpack()
    assert got.dtype == dtype
    largest = x.double().abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny * 448)
    bound = torch.maximum(x.double().abs() * 2.0**-4, largest * 2.0**-10 / 448)
    bound += 1.1 * x.double().abs() * torch.finfo(dtype).eps + largest * 2.0**-24  # the result's own rounding, and that of the scale
    bound += torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    assert bool(((got.double() - x.double()).abs() <= bound).all())


def test_eight_bits_of_zeros_and_of_what_is_not_finite() -> None:
    """Zeros stay; a row with an infinite value becomes not finite, which stops a run, and its neighbours are untouched."""
    x = torch.zeros(3, 16)
    x[1, 3], x[2] = float("inf"), 7.0
    got = Eighths(x).unpack()
    assert bool((got[0] == 0).all())
    assert not torch.isfinite(got[1]).all()
    assert torch.allclose(got[2], x[2], rtol=1e-6)
    assert Eighths(torch.zeros(0, 16)).unpack().shape == (0, 16)


def test_eight_bits_take_a_quarter() -> None:
    held = Eighths(torch.ones(64, 128))
    assert held._values.nbytes + held._scale.nbytes == 64 * 128 + 4 * 64


def test_rows_that_are_too_short_for_a_scale_each_stay() -> None:
    """Two float32 to a row would take 3 bytes each with the scale, one would take more than before."""
    for width, eighths in ((1, False), (2, True), (64, True)):
        x = activation(4096, width)
        assert isinstance(Scope("fp8").pack(x), Eighths) == eighths
        assert bytes_in_eight_bits(x) == min(x.nbytes, x.numel() + 4 * 4096)
    assert Scope("fp8").pack(line := activation(4096)) is line


@pytest.mark.parametrize("policy", ["offload", "fp8"])
def test_weights_ids_and_statistics_are_not_touched(policy: str) -> None:
    """Also the casts of weights that autocast makes, and what has no gradient."""
    linear, norm, x, ids = nn.Linear(64, 64), nn.LayerNorm(64), activation(64, 64), torch.randint(0, 64, (2048,))

    def block() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear(norm(linear(x)))[ids].softmax(-1)  # type: ignore[no-any-return]

    out, pairs = saved_by(block, policy)
    touched = [tensor for tensor, held in pairs if held is not tensor]
    assert len(touched) >= 3
    parents = {linear.weight.untyped_storage().data_ptr(), norm.weight.untyped_storage().data_ptr(), ids.untyped_storage().data_ptr()}
    for tensor in touched:
        assert tensor.is_floating_point()
        assert tensor.untyped_storage().data_ptr() not in parents
        assert not (tensor.dtype == torch.bfloat16 and torch.equal(tensor, linear.weight.bfloat16().t()))
    assert any(tensor.dtype == torch.bfloat16 and held is tensor for tensor, held in pairs)
    out.float().sum().backward()


def test_what_counts_as_an_activation() -> None:
    weight, x = nn.Parameter(torch.randn(64, 64)), activation(64, 64)
    assert is_activation(x)
    for other in (weight, weight.t(), weight.bfloat16(), weight.expand(3, 64, 64), x.detach(), x.to(torch.complex64), x[:1, :8], torch.ones(64, 64)):
        assert not is_activation(other)
    assert x[:1, :8].nbytes < SMALLEST


def test_offloaded_views_share_one_copy_and_come_back_as_they_were() -> None:
    """Query, key and value are views of one tensor: strides, offsets and bits are kept."""
    scope, qkv = Scope("offload"), activation(40, 3, 16)
    views = [*qkv.unbind(1), qkv.transpose(0, 2), qkv]
    held = [scope.pack(view) for view in views if view.nbytes >= SMALLEST]
    assert len({id(one._whole) for one in held}) == 1
    for view, one in zip([view for view in views if view.nbytes >= SMALLEST], held, strict=True):
        back = scope.unpack(one)
        assert (back.stride(), back.storage_offset(), back.dtype) == (view.stride(), view.storage_offset(), view.dtype)
        assert torch.equal(back, view)
        assert back.data_ptr() != view.data_ptr()


@pytest.mark.parametrize("policy", ["offload", "fp8"])
def test_memory_that_is_given_out_again_is_not_mistaken_for_what_lay_there(policy: str) -> None:
    """Each tensor dies after it was packed, so the next one gets its address, with the same shape and version."""
    scope, held, values = Scope(policy), [], []
    for i in range(8):
        x = activation(64, 64) * 0 + i + 1
        held.append(scope.pack(x))
        values.append(i + 1)
        del x
    for one, value in zip(held, values, strict=True):
        assert torch.allclose(scope.unpack(one), torch.full((64, 64), float(value)), rtol=1e-6)


def test_a_tensor_that_changed_in_between_is_held_twice() -> None:
    scope, x = Scope("offload"), activation(64, 64)
    first = scope.pack(x)
    before = x.detach().clone()
    with torch.no_grad():
        x.mul_(2)
    second = scope.pack(x)
    assert isinstance(first, Viewed)
    assert torch.equal(scope.unpack(first), before)
    assert torch.equal(scope.unpack(second), 2 * before)


@pytest.mark.parametrize("policy", ["offload", "fp8"])
def test_a_second_backward_reads_the_same(policy: str) -> None:
    x = activation(64, 64)
    out, _ = saved_by(lambda: (x * x).sum(), policy)
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, x)[0])
