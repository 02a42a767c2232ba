"""What CUDA asks of the ops, seen on the CPU: where offsets count as unreadable, neither checks nor references read a value on the host."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gem_core.builtin.kernels import OPS
from gem_core.ops import checks as checks_module
from gem_core.ops import gdpa, hstu_attention, jagged, padded
from gem_core.ops.slot import check_of
from gem_core.spec import load_object
from gem_core.testing.inputs import Inputs
from gem_core.testing.other_cases import OP_CASES
from gem_core.testing.trial import run

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal", "aten::_unique2"}


class HostReads(TorchDispatchMode):
    """Collects the operators that would make a GPU wait for the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().split(".")[0]
        sized = name == "aten::repeat_interleave" and (kwargs or {}).get("output_size") is not None
        if name in READS or (name == "aten::repeat_interleave" and not sized):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def unreadable(monkeypatch):
    """Every tensor counts as one on a GPU."""
    for name in [name for name in sys.modules if name.startswith("gem_core.ops.")]:
        if "contents_readable" in vars(sys.modules[name]):
            monkeypatch.setattr(sys.modules[name], "contents_readable", lambda tensor: False)


def inputs():
    return Inputs(seed=1, head_dim=8, rounded=torch.float32, dtype=torch.float32, device="cpu")


def cases_of(op):
    """Cases without those whose sizes can only be read from offsets, which is documented."""
    cases = OP_CASES[op]().cases
    named = {"jagged_split": ("totals",), "jagged_unpad": ("total",)}.get(op)
    return [case for case in cases if named is None or case.name in named]


@pytest.mark.parametrize("op", [op.name for op in OPS])
def test_checks_and_references_never_wait_for_the_device(unreadable, op):
    spec = next(spec for spec in OPS if spec.name == op)
    reference = load_object(spec.reference)
    cases = cases_of(op)
    assert cases
    for case in cases:
        arguments, options = case.make(inputs())
        with HostReads() as reads:
            check_of(op)(*arguments, **options)
            reference(*arguments, **options)
        assert reads.seen == [], case.name


@pytest.mark.parametrize("op", ["gdpa", "jagged_attention", "block_attention", "hstu_attention", "pooled_attention", "pffn", "jagged_pad"])
def test_nor_does_backward(unreadable, op):
    spec = next(spec for spec in OPS if spec.name == op)
    case = next(case for case in OP_CASES[op]().cases if case.name == "empty_rows")
    fresh = inputs()
    arguments, options = case.make(fresh)
    out = load_object(spec.reference)(*arguments, **options)
    upstream = torch.ones_like(out)
    with HostReads() as reads:
        torch.autograd.grad(out, fresh.leaves, upstream)
    assert reads.seen == []


@pytest.mark.parametrize("op", [op.name for op in OPS])
def test_results_do_not_depend_on_whether_offsets_are_readable(monkeypatch, op):
    """The path for unreadable offsets assumes that tokens may be cut; where none is, nothing changes."""
    spec = next(spec for spec in OPS if spec.name == op)
    for case in cases_of(op)[:3]:
        readable = run(load_object(spec.reference), case.make, inputs())
        with monkeypatch.context() as patch:
            patch.setattr(padded, "contents_readable", lambda tensor: False)
            blind = run(load_object(spec.reference), case.make, inputs())
        assert all(torch.equal(value, blind[name]) for name, value in readable.items()), case.name


def test_a_planted_read_is_seen(unreadable):
    offsets = torch.tensor([0, 2, 5])
    with HostReads() as reads:
        int(offsets[-1])
        offsets.nonzero()
        bool((offsets > 0).any())
    assert reads.seen == ["aten::_local_scalar_dense", "aten::nonzero", "aten::_local_scalar_dense"]


def test_reading_is_what_the_checks_do_on_the_cpu():
    q, offsets = torch.randn(5, 1, 4), torch.tensor([0, 2, 5])
    with HostReads() as reads:
        gdpa(q, q, q, offsets, offsets, max_q=3, max_k=3)
    assert "aten::_local_scalar_dense" in reads.seen
    with HostReads() as reads:
        hstu_attention(q, q, q, offsets, max_length=3, targets=torch.tensor([1, 0]))
    assert "aten::nonzero" in reads.seen


def test_unreadable_offsets_are_not_checked_and_cut_rows_give_zeros(unreadable):
    """The public call, as on CUDA: no error, zeros beyond the maximum, zero gradients."""
    q = torch.randn(5, 1, 4, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    out = gdpa(q, q, q, offsets, offsets, max_q=2, max_k=2)
    assert torch.equal(out[4], torch.zeros(1, 4))
    (gradient,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(gradient[4], torch.zeros(1, 4))
    assert torch.isfinite(out).all()
    assert checks_module.contents_readable(q) is False
    assert jagged.contents_readable(q) is False
