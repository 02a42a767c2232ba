"""What stand-ins for fused kernels leave for backward: inputs and outputs, whatever a reference makes on the way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gem_core.batch import lengths_to_offsets
from gem_core.cli import plan_facts
from gem_core.cli.plan_facts import model_facts
from gem_core.cli.plan_fused import bind_fused
from gem_core.cli.plan_shapes import ShapesOnly
from gem_core.config.load import load_config
from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.plugins import host
from gem_core.select.policy import policy_scope

HEADS, DIM, FLOAT = 2, 4, 4


class Holder(nn.Module):
    """One slot; with ``fused`` a stand-in is bound to it."""

    def __init__(self, op: str, *, fused: bool, head_dim: int | None = DIM, features: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.slot = KernelSlot(op, head_dim=head_dim, features=features)
        choices = bind_kernels(self, device="cpu", dtype="fp32", arch=None, backward=True)
        if fused:
            bind_fused(self, choices)


def floats_kept(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and the bytes of floating-point storages that it leaves for backward, each once."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = call()
    return found, sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept if t.is_floating_point()}.values())


def attention(lengths: list[int], *, fused: bool, leaf: Callable[..., Tensor]) -> tuple[Any, int]:
    offsets, longest = lengths_to_offsets(torch.tensor(lengths, dtype=torch.int64)), max(lengths, default=0)
    q, k, v = (leaf(sum(lengths), HEADS, DIM).requires_grad_() for _ in range(3))
    slot = Holder("jagged_attention", fused=fused).slot
    return floats_kept(lambda: slot(q, k, v, offsets, offsets, max_q=longest, max_k=longest))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=5))
def test_attention_leaves_queries_keys_values_and_its_result(lengths: list[int]) -> None:
    """Neither scores nor padding: one long row among short ones costs no more than its events. With no rows and empty rows too."""
    with ShapesOnly("this"):
        out, kept = attention(lengths, fused=True, leaf=torch.empty)
    assert out.shape == (sum(lengths), HEADS, DIM)
    assert kept == 4 * sum(lengths) * HEADS * DIM * FLOAT


def test_a_reference_leaves_more() -> None:
    """The planted fault: without the stand-in, scores of padded rows are counted."""
    lengths = [40, 1, 1]
    with ShapesOnly("this"):
        kept = [attention(lengths, fused=fused, leaf=torch.empty)[1] for fused in (True, False)]
    assert kept[1] > 3 * kept[0]


def test_a_stand_in_gives_the_numbers_of_the_reference() -> None:
    """Of real tensors, and in words by name: nothing is mixed up on the way through autograd."""
    torch.manual_seed(0)
    x, gate, residual = (torch.randn(5, 3) for _ in range(3))
    for words in ({"gate": gate, "residual": residual}, {"residual": residual, "gate": gate}):
        fused, plain = (Holder("gated_residual", fused=which, head_dim=None).slot(x, **words) for which in (True, False))
        assert torch.equal(fused, plain)


def test_a_norm_of_a_sum_leaves_the_sum_for_both_of_its_parts() -> None:
    stream, branch, weight = (torch.randn(rows, 3, requires_grad=True) for rows in (5, 5, 2))
    norm = Holder("norm_linear", fused=True, head_dim=None, features=("before", "rms", "residual", "return_sum")).slot
    words: dict[str, Any] = {"where": "before", "norm": "rms", "return_sum": True}
    assert floats_kept(lambda: norm(stream, weight, residual=branch, **words))[1] == (15 + 6 + 10) * FLOAT  # sum, weight, result
    assert floats_kept(lambda: norm(stream, weight, **words))[1] >= (15 + 6 + 10) * FLOAT


def test_what_moves_rows_leaves_no_floats() -> None:
    one, two = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    offsets = torch.tensor([0, 1, 2])
    concat, gate = (Holder(op, fused=True, head_dim=None).slot for op in ("jagged_concat", "gated_residual"))
    (joined, _), kept = floats_kept(lambda: concat([(one, offsets), (two, offsets)]))
    assert joined.shape == (4, 3)
    assert kept == 0
    assert floats_kept(lambda: gate(one, two, torch.zeros(2, 3)))[1] == 4 * 6 * FLOAT


def test_a_named_backend_is_counted_as_it_is() -> None:
    """Who names padded torch wants to know what that keeps."""
    loaded = load_config("toy", ['kernels.use={jagged_attention = "padded"}'])
    with policy_scope(loaded.kernel_policy()):
        named = Holder("jagged_attention", fused=True).slot
    assert named.backend == "padded"


def saved(device: str, *sets: str) -> int:
    loaded = load_config("toy", sets)
    config = loaded.config
    source = host().build("data_sources", config.data.source, config.data.options)
    model: Any = host().load("models", config.model.name)
    facts = model_facts(loaded, source, model.tables(source.schema(), host().options("models", config.model.name, config.model.options)), device)
    return round(sum(block.saved for block in facts.blocks) * plan_facts.MEASURED_ROWS)


@pytest.mark.parametrize("sets", [(), ("model.name=hstu",)])
def test_a_model_leaves_less_on_a_gpu(sets: tuple[str, ...]) -> None:
    assert 0 < saved("cuda", *sets) < saved("cpu", *sets)
