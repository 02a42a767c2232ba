"""Fused ops in low precision against the same thing in plain, unfused float64, flag by flag: outputs and every gradient."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as f

import gem_core.ops as ops

ROUNDING = 0.25
"""Relative error of a chain of products with operands of four significant bits, and of slopes that jump; a flag that is ignored is off by more."""
ACTIVATIONS = {
    "gelu": f.gelu,
    "gelu_tanh": lambda x: f.gelu(x, approximate="tanh"),
    "gelu_fast": f.gelu,  # a fit of it
    "silu": f.silu,
    "relu": f.relu,
    "relu2": lambda x: f.relu(x).square(),
    "leaky_relu": f.leaky_relu,
    "hardswish": f.hardswish,
    "identity": lambda x: x,
}
NORM_FLAGS = list(product(("rms", "layer"), ("before", "after"), (False, True), (False, True), (False, True), (False, True)))


def drawn(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean).requires_grad_()


def with_gradients(results: Any, inputs: list[Tensor]) -> list[Tensor]:
    """All outputs and the gradients of a fixed weighting of them, float64."""
    outputs = list(results) if isinstance(results, tuple) else [results]
    total = sum((out.double() * drawn(*out.shape, seed=50 + i).detach()).sum() for i, out in enumerate(outputs))
    gradients = torch.autograd.grad(total, inputs)
    return [out.detach().double() for out in outputs] + [g.double() for g in gradients]


def assert_close(got: list[Tensor], wanted: list[Tensor], where: Any) -> None:
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        error = float((a - b).norm() / b.norm())
        assert error < ROUNDING, (where, i, error)


def plain_norm(x: Tensor, norm: str, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    z = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    z = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    z = z if gamma is None else z * gamma.double()
    return z if beta is None else z + beta.double()


def norm_call(norm: str, where: str, biased: bool, affine: bool, residual: bool) -> tuple[list[Tensor], dict[str, Any]]:
    width = 64 if where == "before" else 48
    tensors = {"x": drawn(40, 64, seed=1, mean=1.0), "weight": drawn(48, 64, seed=2)}
    if biased:
        tensors["bias"] = drawn(48, seed=3, mean=8.0)
    if affine:
        tensors["gamma"] = drawn(width, seed=4)
        if norm == "layer":
            tensors["beta"] = drawn(width, seed=5)
    if residual:
        tensors["residual"] = drawn(40, width, seed=6)
    return list(tensors.values()), tensors


@pytest.mark.parametrize("backend", ["mxfp8_emulated", "fp8_block_emulated"])
def test_case_G11_norm_linear_under_every_flag(backend: str) -> None:
    for norm, where, biased, affine, residual, both in NORM_FLAGS:
        inputs, named = norm_call(norm, where, biased, affine, residual)
        got = with_gradients(ops.norm_linear(**named, norm=norm, where=where, return_sum=both, backend=backend), inputs)
        x, weight = named["x"].double(), named["weight"].double()
        bias, extra = named.get("bias", torch.zeros(1)).double(), named.get("residual", torch.zeros(1)).double()
        summed = x + extra if where == "before" else x @ weight.T + bias + extra
        normed = plain_norm(summed, norm, named.get("gamma"), named.get("beta"))
        out = normed @ weight.T + bias if where == "before" else normed
        wanted = with_gradients((out, summed) if both else out, inputs)
        assert_close(got, wanted, (norm, where, biased, affine, residual, both))


def test_case_G11_planted_fault_a_flag_that_is_ignored_is_seen() -> None:
    inputs, named = norm_call("rms", "before", True, True, True)
    wanted = with_gradients(ops.norm_linear(**named, norm="rms", where="before", backend="mxfp8_emulated"), inputs)
    for changed in ({"norm": "layer"}, {"bias": named["bias"].detach() * 0}, {"residual": None}, {"gamma": None}):
        out = ops.norm_linear(**{**named, "norm": "rms", "where": "before", **changed}, backend="mxfp8_emulated")
        assert isinstance(out, Tensor)
        with pytest.raises(AssertionError):
            assert_close([out.detach().double()], wanted[:1], changed)


@pytest.mark.parametrize("position", ["inside", "after"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_case_G11_gdpa_under_every_activation(activation: str, position: str) -> None:
    """Two rows, one of them without tokens; a formula of one row."""
    inputs = [drawn(37, 2, 32, seed=seed) for seed in (1, 2, 3)]
    offsets = torch.tensor([0, 37, 37])
    options = {"max_q": 37, "max_k": 37, "scale": 0.2, "activation": activation, "scale_position": position}
    got = with_gradients(ops.gdpa(*inputs, offsets, offsets, **options, backend="mxfp8_emulated"), inputs)
    q, k, v = (x.double().transpose(0, 1) for x in inputs)
    scores = q @ k.transpose(1, 2)
    acted = ACTIVATIONS[activation](0.2 * scores if position == "inside" else scores)
    out = (acted @ v * (1.0 if position == "inside" else 0.2)).transpose(0, 1)
    assert_close(got, with_gradients(out, inputs), (activation, position))


@pytest.mark.parametrize("activation", ["silu", "identity"])
def test_case_G11_pffn_with_and_without_its_activation(activation: str) -> None:
    q0, k, v = drawn(37, 2, 32, seed=1), drawn(1, 20, 2, 32, seed=2), drawn(1, 20, 2, 32, seed=3)
    got = with_gradients(ops.pffn(q0, k, v, torch.tensor([0, 37]), max_q=37, activation=activation, scale=0.1, backend="mxfp8_emulated"), [q0, k, v])
    ln = plain_norm(q0.double().flatten(1), "layer", None, None).view(37, 2, 32)
    scores = torch.einsum("thd,khd->htk", ln, k[0].double())
    o = torch.einsum("htk,khd->thd", ACTIVATIONS[activation](0.1 * scores), v[0].double()) + ln
    out = plain_norm(o.flatten(1), "rms", None, None).view(37, 2, 32) + q0.double()
    assert_close(got, with_gradients(out, [q0, k, v]), activation)
