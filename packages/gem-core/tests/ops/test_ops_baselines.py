"""The baselines ``padded`` and ``bucketed`` mean what the ops mean, whole or in parts, and pad no more than they say."""

import pytest
import torch
from torch import Tensor

import gem_core.ops as ops
from gem_core.builtin.baselines import ATTENTION, BASELINE_OPS
from gem_core.ops import baselines
from gem_core.ops.baselines import RATIO, ROLES, SHORTEST
from gem_core.select.registry import registry
from gem_core.spec import KernelUnavailable, RequestError
from gem_core.testing import conformance_suite
from gem_core.testing.conformance import make_plan
from gem_core.testing.trial import check

TestGdpaPadded = conformance_suite("gdpa", backend="padded", device="cpu", dtypes=["fp32"])
TestGdpaBucketed = conformance_suite("gdpa", backend="bucketed", device="cpu", dtypes=["fp32"])
TestHstuBucketed = conformance_suite("hstu_attention", backend="bucketed", device="cpu", dtypes=["fp32"])
NAMES = [op.name for op in BASELINE_OPS]


@pytest.mark.parametrize("backend", ["padded", "bucketed"])
@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_baselines_conform_in_compute_dtypes(op: str, backend: str, dtype: str) -> None:
    plan = make_plan(op, backend=backend, device="cpu", dtypes=[dtype])
    assert plan.trials
    for trial in plan.trials[:: 4 if len(plan.trials) > 20 else 2]:
        check(trial, plan.op)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["padded", "bucketed"])
@pytest.mark.parametrize("op", NAMES)
def test_baselines_conform_on_a_gpu(op: str, backend: str) -> None:
    plan = make_plan(op, backend=backend, device="cuda", dtypes=["bf16"])
    for trial in plan.trials[::4]:
        check(trial, plan.op)


@pytest.mark.parametrize("backend", ["padded", "bucketed"])
@pytest.mark.parametrize("op", sorted(ROLES))
def test_parts_that_are_computed_again_conform(op: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part is one row, so that each cut and each recomputation is seen."""
    monkeypatch.setattr(baselines, "SCORES", 1)
    plan = make_plan(op, backend=backend, device="cpu", dtypes=["fp32"])
    for trial in plan.trials[::5]:
        check(trial, plan.op)


def call(lengths: list[int], backend: str) -> tuple[Tensor, Tensor]:
    """A causal call, and its gradient of q."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(sum(lengths), 2, 8, generator=torch.Generator().manual_seed(i), requires_grad=True) for i in range(3))
    out = ops.jagged_attention(q, k, v, offsets, offsets, max_q=300, max_k=300, causal=True, backend=backend)
    return out.detach(), torch.autograd.grad(out.square().sum(), q)[0]  # type: ignore[union-attr, arg-type]


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """Lengths and longest row of every part that is computed."""
    seen: list[tuple[list[int], int]] = []
    plain = baselines._plain

    def record(reference, values):
        seen.append((values["q_offsets"].diff().tolist(), values["max_q"]))
        return plain(reference, values)

    monkeypatch.setattr(baselines, "_plain", record)
    return seen


def test_bucketed_pads_within_its_ratio_and_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [300, 1, 0, 90, 65, 200, 64, 290, 3]
    expected = call(lengths, "reference")
    seen = recorded(monkeypatch)
    torch.testing.assert_close(call(lengths, "padded"), expected)
    assert seen == [(lengths, 300)]
    seen.clear()
    torch.testing.assert_close(call(lengths, "bucketed"), expected)
    assert sorted(n for rows, _ in seen for n in rows) == sorted(lengths)
    assert len(seen) >= 3
    for rows, longest in seen:
        assert longest == max(rows)
        assert longest <= max(SHORTEST * RATIO, RATIO * min(rows))


def test_scores_above_the_limit_are_computed_in_parts_and_again_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = call([30, 20, 10], "reference")
    seen = recorded(monkeypatch)
    monkeypatch.setattr(baselines, "SCORES", 2 * 2 * 300 * 300)  # two rows of two heads
    torch.testing.assert_close(call([30, 20, 10], "padded"), expected)
    assert [rows for rows, _ in seen] == [[30, 20], [10], [10], [30, 20]]


def test_offsets_are_read_and_sorted_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets, q = torch.tensor([0, 3, 5]), torch.randn(5, 1, 4)
    k = torch.randn(2, 6, 1, 4)
    reads: list[int] = []
    read = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda self: (reads.append(1), read(self))[1])
    layouts = [baselines._layout("gdpa", ROLES["gdpa"], {"q": q, "k": k, "v": k, "q_offsets": offsets, "k_offsets": None}, True) for _ in range(3)]
    assert len(reads) == 1
    assert layouts[0] is layouts[1] is layouts[2]
    with pytest.raises(RequestError, match="end at 5, there are 6 tokens"):
        baselines._lengths("gdpa", offsets, 6)
    alive = len(baselines._KNOWN)
    del offsets, layouts
    assert len(baselines._KNOWN) == alive - 1


def test_features_that_parts_cannot_share_are_not_declared() -> None:
    q, offsets = torch.randn(4, 1, 8), torch.tensor([0, 4])
    with pytest.raises(KernelUnavailable, match="does not support bias"):
        ops.jagged_attention(q, q, q, offsets, offsets, max_q=4, max_k=4, bias=torch.zeros(1, 1, 4, 4), backend="bucketed")


def test_baselines_are_in_no_default_preference_and_cover_every_attention_op() -> None:
    assert set(ATTENTION) < set(NAMES)
    for op in NAMES:
        assert {"padded", "bucketed"} <= {owned.impl.backend for owned in registry().of(op)}
        assert ops.__dict__[op] is not None
    with pytest.raises(AttributeError):
        _ = baselines.flattened_gdpa
