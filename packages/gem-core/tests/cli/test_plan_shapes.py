"""A forward pass of shapes: floats hold nothing, integers are computed, and what needs a number that is not there is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gem_core import ops
from gem_core.batch import lengths_to_offsets
from gem_core.cli import plan_shapes
from gem_core.cli.plan_shapes import ShapesOnly
from gem_core.spec import RequestError


def test_floats_are_shapes_and_take_no_memory() -> None:
    with ShapesOnly("this"):
        huge = torch.ones(2**20, 2**24) @ torch.randn(2**24, 2**20)
    assert isinstance(huge, FakeTensor)
    assert (huge.shape, huge.dtype) == ((2**20, 2**20), torch.float32)
    assert huge.untyped_storage().nbytes() == 2**42


def test_integers_are_real() -> None:
    lengths = torch.tensor([2, 0, 3])
    with ShapesOnly("this"):
        rows = torch.repeat_interleave(torch.arange(3), lengths)
        mask = rows == 2
        filled = torch.zeros(5, dtype=torch.int64)
        filled[mask] = 7
        found = [rows.tolist(), rows[mask].tolist(), mask.nonzero().flatten().tolist(), filled.tolist(), int(lengths.sum()), bool(mask.any())]
        vectors = torch.randn(3, 4)[rows]
    assert found == [[0, 0, 2, 2, 2], [2, 2, 2], [2, 3, 4], [0, 0, 7, 7, 7], 5, True]
    assert isinstance(vectors, FakeTensor)
    assert vectors.shape == (5, 4)


def test_a_real_mask_chooses_among_shapes() -> None:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    with ShapesOnly("this"):
        x = torch.randn(2, 3, 4)
        chosen, pair = x[mask], x[:, mask[0]]
        x[mask] = torch.randn(3, 4)
        x[mask] = 0.0
    assert (chosen.shape, pair.shape, x.shape) == ((3, 4), (2, 2, 4), (2, 3, 4))


@pytest.mark.parametrize("more", [0, 1])
def test_large_integer_tensors_are_shapes(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    monkeypatch.setattr(plan_shapes, "MOST_REAL", 6)
    i = torch.arange(3)
    with ShapesOnly("this"):
        seen = i[:, None] >= torch.arange(2 + more)
        made = torch.zeros(6 + more, dtype=torch.int64)
    assert isinstance(seen, FakeTensor) == isinstance(made, FakeTensor) == bool(more)
    assert seen.shape == (3, 2 + more)
    assert seen.dtype == torch.bool


def test_large_integer_results_are_not_computed_on_the_way() -> None:
    i = torch.arange(2**20)
    with ShapesOnly("this"):
        distance = i[:, None] - i  # 8 TB
    assert distance.shape == (2**20, 2**20)


def test_what_is_real_before_stays_real_and_unchanged_by_shapes() -> None:
    x = torch.arange(4.0)
    with ShapesOnly("this"):
        doubled = (x * 2).tolist()
        x.add_(1)
        torch.zeros(4).add_(x)
    assert doubled == [0, 2, 4, 6]
    assert x.tolist() == [1, 2, 3, 4]  # written once, although its shape was looked at first


@torch.library.custom_op("gem_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x + 1


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: float(x.sum()), "_local_scalar_dense"),
        (lambda x: x[x > 0], "aten.(index|nonzero)"),
        (lambda x: torch.unique(x), "_unique2"),
        (opaque, "no fake impl registered for .*gem_test::opaque"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x @ torch.randn(5, 5), "same reduction dim"),
    ],
)
def test_what_needs_numbers_is_refused_by_name(call: Callable[[Tensor], Any], named: str) -> None:
    with pytest.raises(RequestError, match=f"this: the forward pass cannot be followed by shapes alone: .*{named}"), ShapesOnly("this"):
        call(torch.randn(3, 3))


def test_other_errors_are_as_they_are() -> None:
    with pytest.raises(KeyError), ShapesOnly("this"):
        {}["missing"]


def test_an_operator_without_shapes_runs_on_integers() -> None:
    with ShapesOnly("this"):
        assert opaque(torch.arange(3)).tolist() == [1, 2, 3]


def attend(op: str, lengths: list[int], *, leaf: Callable[..., Tensor]) -> tuple[Tensor, int, list[tuple[int, ...]]]:
    """An attention's output, the bytes of what it keeps, and the shapes of that."""
    offsets, longest = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)), max(lengths, default=0)
    kept: list[Tensor] = []
    q, k, v = (leaf(sum(lengths), 2, 4).requires_grad_() for _ in range(3))
    more = {"q_offsets": offsets, "k_offsets": offsets, "max_q": longest, "max_k": longest} if op == "jagged_attention" else {"max_length": longest}
    args = (q, k, v) if op == "jagged_attention" else (q, k, v, offsets)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = getattr(ops, op)(*args, **more, backend="reference")
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept}
    return out, sum(storages.values()), [tuple(t.shape) for t in kept]


@settings(max_examples=10, deadline=None)
@given(op=st.sampled_from(["block_attention", "hstu_attention", "jagged_attention"]), lengths=st.lists(st.integers(0, 70), max_size=4))
def test_jagged_attention_keeps_the_same(op: str, lengths: list[int]) -> None:
    """With no rows, empty rows and odd lengths."""
    with ShapesOnly("this"):
        shape, size, kept = attend(op, lengths, leaf=torch.empty)
    real, want, wanted = attend(op, lengths, leaf=torch.zeros)
    assert isinstance(shape, FakeTensor)
    assert (shape.shape, shape.dtype, size, kept) == (real.shape, real.dtype, want, wanted)
