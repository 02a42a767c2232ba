"""Attention and norm-linear ops with low-precision products: against the formula written out, on every op, and as backends chosen by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

import gem_core.ops as ops
from gem_core.ops.slot import KernelSlot, bind_kernels
from gem_core.spec import load_object
from gem_precision.formats import fake_quantize, find_format
from gem_precision.plugin import LOW_OPS, emulated, gem_kernel_impls
from gem_precision.presets import PRESETS
from gem_precision.products import LowProducts

KERNELS = {(impl.op, impl.backend): impl for impl in gem_kernel_impls() if impl.backend.endswith("_emulated")}
ATTENTION = [op for op in LOW_OPS if op != "norm_linear"]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def arguments(op: str, dtype: torch.dtype = torch.float32) -> tuple[list[Any], dict[str, Any]]:
    """A call of each op on rows of 3, 0 and 37 tokens."""
    offsets, heads, dim = torch.tensor([0, 3, 3, 40]), 2, 32
    q, k, v = (drawn(40, heads, dim, seed=seed, dtype=dtype) for seed in range(3))
    if op == "norm_linear":
        return [drawn(5, 64, dtype=dtype), drawn(48, 64, seed=1, dtype=dtype), drawn(48, seed=2, dtype=dtype)], {"where": "before"}
    if op == "pffn":
        made = [drawn(3, 40, heads, dim, seed=seed, dtype=dtype) for seed in (3, 4)]
        return [q, *made, offsets], {"max_q": 37, "scale": 0.1}
    if op == "pooled_attention":
        return [drawn(4, heads, dim, seed=5, dtype=dtype), k, v, offsets], {"max_k": 37}
    if op in ("block_attention", "hstu_attention"):
        return [q, k, v, offsets], {"max_length": 37}
    return [q, k, v, offsets, offsets], {"max_q": 37, "max_k": 37}


def run(op: str, dtype: torch.dtype = torch.float32, backend: str = "reference") -> list[Tensor]:
    """The output and the gradients of a call, float64."""
    given, options = arguments(op, dtype)
    out = getattr(ops, op)(*given, **options, backend=backend)
    out.backward(drawn(*out.shape, seed=9).detach().to(out.dtype))
    return [out.detach().double(), *(x.grad.double() for x in given if x.requires_grad)]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", KERNELS.values(), ids=lambda impl: f"{impl.op}-{impl.backend}")
def test_every_op_is_within_the_error_of_the_format_and_not_without_it(impl: Any, dtype: torch.dtype) -> None:
    """A product of rounded operands is off by about the rounding error of one; without rounding it would be off by far less."""
    half_step = 2.0**-2 if impl.backend.startswith("mxfp4") else 2.0**-4
    for i, (got, wanted) in enumerate(zip(run(impl.op, dtype, impl.backend), run(impl.op), strict=True)):
        assert got.isfinite().all()
        # E5M2 of the row-wise gradients has one bit less
        assert relative(got, wanted) < 4 * half_step * (2 if "rowwise" in impl.backend else 1)
        recipe = impl.backend.removesuffix("_emulated")
        exact = impl.op == "norm_linear" and (i == 3 or (i == 2 and not PRESETS[recipe].weight_grad))  # a bias; a weight gradient kept high
        assert exact or relative(got, wanted) > 2e-3


def low(x: Tensor, form: str) -> Tensor:
    """Rounded along the last axis, in float64."""
    return fake_quantize(x.float().contiguous(), find_format(form)).double()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_rowwise"])
def test_softmax_attention_is_the_formula_with_each_operand_rounded_along_what_its_product_contracts(recipe: str) -> None:
    """One head, one row of 37: blocks of 32 with a rest; queries and keys by head dim, probabilities and values by key, and so backward."""
    q, k, v = (drawn(37, 1, 32, seed=seed) for seed in range(3))
    offsets = torch.tensor([0, 37])
    out = ops.jagged_attention(q, k, v, offsets, offsets, max_q=37, max_k=37, scale=0.25, backend=emulated(recipe))
    given = drawn(37, 1, 32, seed=9).detach()
    out.backward(given)
    inputs, grads = PRESETS[recipe].inputs, PRESETS[recipe].grads
    wq, wk, wv, do = (x.detach()[:, 0].double() for x in (q, k, v, given))
    p = torch.softmax(low(0.25 * wq, inputs) @ low(wk, inputs).T, -1)
    dp = low(do, grads) @ low(wv, inputs).T
    ds = p * (dp - (dp * p).sum(-1, keepdim=True))
    wanted = [
        low(p, inputs) @ low(wv.T, inputs).T,
        0.25 * low(ds, grads) @ low(wk.T, inputs).T,
        low(ds.T, grads) @ low(0.25 * wq.T, inputs).T,
        low(p.T, inputs) @ low(do.T, grads).T,
    ]
    for got, exact in zip((out, q.grad, k.grad, v.grad), wanted, strict=True):
        assert relative(got.detach()[:, 0].double(), exact) < 5e-3  # a value on the edge between two elements may fall to either side


def test_norms_see_float32_and_the_matmul_the_format() -> None:
    given, _ = arguments("norm_linear")
    x, weight, bias = (g.detach() for g in given)
    out = ops.norm_linear(x, weight, bias, where="before", backend="mxfp8_emulated")
    normed = torch.nn.functional.rms_norm(x, (64,), eps=1e-5)
    wanted = low(normed, "mxfp8_e4m3") @ low(weight, "mxfp8_e4m3").T + bias
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)


def test_a_bias_counts_by_place_and_by_name() -> None:
    x, weight, bias = drawn(5, 64).detach(), drawn(48, 64, seed=1).detach(), drawn(48, seed=2).detach()
    with LowProducts(PRESETS["mxfp8"].rule()):
        plain = torch.nn.functional.linear(x, weight)
        both = [torch.nn.functional.linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias=bias)]
    assert all(torch.equal(out, plain + bias) for out in both)


@pytest.mark.parametrize("op", ATTENTION)
def test_case_G05_rows_without_tokens_give_finite_gradients(op: str) -> None:
    given, options = arguments(op)
    empty = [x.detach()[:0].requires_grad_() if x.shape[0] == 40 else torch.zeros_like(x) if x.dtype == torch.int64 else x for x in given]
    if op in ("jagged_attention", "gdpa"):
        empty[4] = empty[3]  # self-attention by the same offsets
    options |= {key: 0 for key in options if key.startswith("max")}
    out = getattr(ops, op)(*empty, **options, backend="mxfp8_emulated")
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in empty if x.requires_grad)


def test_a_slot_that_asks_is_bound_to_the_emulation() -> None:
    module = torch.nn.Module()
    module.slot = KernelSlot("gdpa", head_dim=32, features=("act_gelu",))
    module.slot.asked = emulated("mxfp8")
    (choice,) = bind_kernels(module, device="cpu", dtype="fp32", arch=None, backward=True)
    assert choice.backend == module.slot.backend == "mxfp8_emulated"
    given, options = arguments("gdpa")
    assert torch.equal(module.slot(*given, **options), ops.gdpa(*given, **options, backend="mxfp8_emulated"))


def test_what_is_no_kernel_is_no_attribute() -> None:
    for name in ("gdpa", "gdpa__bf16", "__path__"):
        with pytest.raises((AttributeError, ModuleNotFoundError)):
            load_object(f"gem_precision.emulated:{name}")
