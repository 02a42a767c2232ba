"""MXFP8 in Triton: casts and products in the interpreter, and what the compiler makes of them for Blackwell."""

import json
import subprocess
import sys

import pytest
import torch

from gem_core.spec import RequestError
from gem_precision.formats import find_format, quantize

pytest.importorskip("triton")

from gem_precision.kernels.cast import cast_both
from gem_precision.kernels.mx import mx_both, mx_product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MX_RUNS = DEVICE == "cpu" or torch.cuda.get_device_capability() == (10, 0)
MX = find_format("mxfp8_e4m3")


def agrees(operand, x):
    wanted = quantize(x, MX)
    codes = torch.where(wanted.scales.isnan(), 255, wanted.scales.log2() + 127).to(torch.uint8)
    got, exact = operand.dequantize(), wanted.dequantize()
    return torch.equal(operand.scales, codes) and bool(((got == exact) | (got.isnan() & exact.isnan())).all())


@pytest.mark.parametrize("rows", [0, 1, 127, 131])
def test_a_matrix_is_cast_along_both_axes_with_rows_of_zeros_behind_it(block_numbers, monkeypatch, rows):
    empty = torch.empty
    poison = {torch.uint8: 77}
    monkeypatch.setattr(torch, "empty", lambda *sizes, **how: empty(*sizes, **how).fill_(poison.get(how.get("dtype"), float("nan"))))
    x = block_numbers(max(rows, 1), 256, rows)[:rows].to(DEVICE)
    if rows > 100:
        x[5], x[6, 40], x[9, 200], x[100, 7] = 0, 0, float("nan"), float("inf")
        x[64:96, 3] = 2.0**-125  # a block whose scale is the smallest
    both = mx_both(x)
    full = torch.zeros(-(-rows // 128) * 128, 256, device=DEVICE)
    full[:rows] = x
    assert agrees(both.along, full)
    assert agrees(both.turned, full.T.contiguous())


@pytest.mark.parametrize("k", [128, 384])
def test_case_G11_products_are_those_of_what_operands_stand_for(block_numbers, k):
    if not MX_RUNS:
        pytest.skip("needs a Blackwell GPU, or the interpreter")
    left, right = mx_both(block_numbers(130, k, 1)).along, mx_both(block_numbers(256, k, 2)).along
    wanted = left.dequantize().double() @ right.dequantize().double().T
    assert (mx_product(left, right, torch.float32).double() - wanted).abs().max() <= 2e-6 * wanted.abs().max()


def test_nothing_to_contract_and_operands_that_do_not_fit():
    none, some = mx_both(torch.zeros(0, 256, device=DEVICE)), mx_both(torch.ones(128, 128, device=DEVICE))
    assert torch.equal(mx_product(none.turned, none.turned), torch.zeros(256, 256, dtype=torch.bfloat16, device=DEVICE))
    with pytest.raises(RequestError, match=r"\[0, 256\]"):
        mx_product(none.along, some.along)
    with pytest.raises(RequestError, match="and Operand"):
        mx_product(some.along, cast_both(torch.ones(128, 128, device=DEVICE)).along)
    with pytest.raises(RequestError, match="multiple of 128"):
        mx_both(torch.ones(2, 64, device=DEVICE))


CODE = """
import json, os
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_precision.kernels import mx

BOX = "tensordesc<fp8e4nv[128, 128]>"
TYPES = dict(x="*bf16", out="*fp8e4nv", out_scale="*u8", turned="*i32", turned_scale="*u8", left=BOX, right=BOX, left_scale="*u8", right_scale="*u8")

def build(fn, **other):
    signature = {name: {**TYPES, **other}.get(name, "i32") for name in fn.arg_names}
    source = ASTSource(fn=fn, signature=signature, constexprs={})
    made = triton.compile(source, target=GPUTarget("cuda", 100, 32), options=dict(num_warps=8, num_stages=4))
    return dict(ptx=made.asm["ptx"], shared=made.metadata.shared, tensor_memory=made.metadata.tmem_size)

print(json.dumps([build(mx.mx_both_kernel), build(mx.mx_product_kernel, out="*bf16")]))
"""


@pytest.mark.slow
def test_kernels_compile_for_blackwell_and_scale_in_its_tensor_cores():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cast, product = json.loads(done.stdout)
    assert "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale" in product["ptx"]
    assert "cp.async.bulk.tensor" in product["ptx"]
    assert product["shared"] <= 227 * 1024
    assert product["tensor_memory"] <= 512  # columns
    assert cast["ptx"].count("st.shared.b8") <= 4  # of scales; elements are exchanged as words
