"""Core's precision recipes."""

import pytest
import torch
from gem_train_fakes import FakeSource, Probe, ProbeOptions
from torch import nn

from gem_core.builtin.precision import Bf16, Fp32
from gem_core.spec.kernels import DTYPES


@pytest.fixture
def model() -> Probe:
    return Probe(FakeSource().schema(), ProbeOptions())


@pytest.mark.parametrize("recipe", [Fp32(), Bf16()])
def test_every_leaf_has_one_decision_and_nothing_is_changed(model: Probe, recipe: Fp32 | Bf16) -> None:
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    decisions = recipe.prepare(model, "cpu")
    assert [d.module for d in decisions] == ["first", "norm", "drop", "last"]
    assert all(d.reason for d in decisions)
    assert all(p.dtype == torch.float32 and torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert recipe.compute_dtype() in DTYPES


def test_bf16_says_what_computes_in_what(model: Probe) -> None:
    assert {d.module: d.format for d in Bf16().prepare(model, "cpu")} == {"first": "bf16", "norm": "fp32", "drop": "input", "last": "bf16"}


def test_a_model_that_is_one_leaf_has_a_name() -> None:
    assert [d.module for d in Fp32().prepare(nn.Linear(1, 1), "cpu")] == ["model"]


@pytest.mark.parametrize(("recipe", "expected"), [(Fp32(), torch.float32), (Bf16(), torch.bfloat16)])
def test_the_context_sets_the_dtype_of_matmuls(recipe: Fp32 | Bf16, expected: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with recipe.forward_context("cpu"):
        assert layer(torch.ones(2, 4)).dtype == expected
    assert layer(torch.ones(2, 4)).dtype == torch.float32


def test_case_G09_weights_and_gradients_stay_in_float32_under_bf16(model: Probe) -> None:
    batch = FakeSource().batch(torch.arange(8))
    with Bf16().forward_context("cpu"):
        loss = sum(x.float().sum() for x in model(batch, {"item": torch.ones(8, 4)}).values())
    loss.backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}


def test_a_norm_of_large_bf16_values_keeps_its_statistics() -> None:
    """Values around 1000 that differ by 8: statistics in bfloat16 would round the differences away."""
    x = (1000 + 8 * torch.arange(16.0)).bfloat16()[None]
    with Bf16().forward_context("cpu"):
        got = nn.LayerNorm(16)(x)
    assert torch.allclose(got.float(), nn.LayerNorm(16)(x.float()), atol=0.02)
