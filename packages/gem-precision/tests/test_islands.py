"""Islands compute in float32 inside autocast."""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.ops.slot import kernel_slots
from gem_precision.islands import is_island, make_island, widen

LOW = torch.ones(2, dtype=torch.bfloat16)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Held:
    values: Tensor
    count: int


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def dtypes(value: Any) -> list[torch.dtype]:
    if isinstance(value, Tensor):
        return [value.dtype]
    items = value.values() if isinstance(value, dict) else value
    return [dtype for item in items for dtype in dtypes(item)]


def test_an_island_gets_float32_and_autocast_is_off(kit: Any) -> None:
    spy = kit.spy(8)
    make_island(spy)
    with autocast():
        out = spy(torch.ones(2, 8, dtype=torch.bfloat16))
        assert torch.is_autocast_enabled("cpu")
    assert spy.seen == [(torch.float32, torch.float32)]
    assert out.dtype == torch.float32


def test_without_an_island_the_same_module_computes_in_bf16(kit: Any) -> None:
    spy = kit.spy(8)
    with autocast():
        spy(torch.ones(2, 8, dtype=torch.bfloat16))
    assert spy.seen == [(torch.bfloat16, torch.bfloat16)]
    assert not is_island(spy)


def test_an_error_inside_leaves_autocast_on(kit: Any) -> None:
    spy = kit.spy(8)
    make_island(spy)
    with autocast():
        with pytest.raises(RuntimeError):
            spy(torch.ones(2, 3))
        assert torch.is_autocast_enabled("cpu")


def test_float64_is_left_alone(kit: Any) -> None:
    spy = kit.spy(8).double()
    make_island(spy)
    assert spy(torch.ones(2, 8, dtype=torch.float64)).dtype == torch.float64


def test_a_part_called_from_outside_its_island_is_in_float32_too(kit: Any) -> None:
    outer = nn.Sequential(kit.spy(8))
    make_island(outer)
    with autocast():
        outer[0](torch.ones(2, 8, dtype=torch.bfloat16))
    assert outer[0].seen == [(torch.float32, torch.float32)]


def test_names_and_class_stay(model: nn.Module) -> None:
    names, kind = list(model.state_dict()), type(model)
    make_island(model)
    assert list(model.state_dict()) == names
    assert type(model) is kind


def test_a_deep_copy_has_forwards_of_its_own(kit: Any) -> None:
    first = nn.Sequential(kit.spy(8), kit.fused(8, 8))
    make_island(first)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second[0].weight.zero_()
    with autocast():
        assert second(torch.ones(2, 8)).abs().max() <= second[1].linear.bias.abs().max() + 1e-6
    assert first[0].seen == []
    assert second[0].seen == [(torch.float32, torch.float32)]
    assert kernel_slots(second)[0].request(device="cpu", dtype="bf16").dtype == "fp32"


def test_gradients_come_back_in_the_inputs_dtype(kit: Any) -> None:
    spy = kit.spy(8)
    make_island(spy)
    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    with autocast():
        spy(x).sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert spy.weight.grad.dtype == torch.float32


def test_kernels_of_an_island_are_chosen_for_float32(kit: Any) -> None:
    model = nn.Sequential(kit.fused(8, 8), kit.fused(8, 8))
    make_island(model[1])
    asked = [slot.request(device="cuda", dtype="bf16", arch=90, backward=True) for slot in kernel_slots(model)]
    assert [request.dtype for request in asked] == ["bf16", "fp32"]
    assert {request.device for request in asked} == {"cuda"}
    with autocast():
        model(torch.ones(2, 8))
    assert [part.seen for part in model] == [[torch.bfloat16], [torch.float32]]


def test_widen_reaches_into_containers() -> None:
    got = widen({"a": [LOW, (LOW, Pair(LOW, LOW))], "b": LOW.half()})
    assert set(dtypes(got)) == {torch.float32}
    assert isinstance(got["a"][1][1], Pair)
    held = widen(Held(LOW, 3))
    assert held.values.dtype == torch.float32
    assert held.count == 3


def test_widen_returns_the_same_object_where_nothing_is_low() -> None:
    for value in ({"a": torch.ones(1)}, [1, "x"], Pair(torch.ones(1), torch.ones(1)), Held(torch.ones(1), 1), None, torch.ones(1, dtype=torch.int64)):
        assert widen(value) is value


_DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool])
_TREES = st.recursive(
    _DTYPES.map(lambda dtype: torch.ones(2).to(dtype)),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(_TREES)
def test_widen_changes_low_precision_and_nothing_else(tree: Any) -> None:
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    assert dtypes(widen(tree)) == [wide.get(dtype, dtype) for dtype in dtypes(tree)]
