"""The portable kernels compile for Hopper without a GPU: what the interpreter lets pass and the compiler does not shows here."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import os, sys
os.environ.pop("TRITON_INTERPRET", None)
import triton
from importlib import import_module
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SIZES = dict(GROUP=2, DIM=64, V_DIM=64, BLOCK_M=64, BLOCK_N=64, BLOCK_D=64, BLOCK_V=64, PRECISION="tf32", FAST=True, CAUSAL=True, WINDOW=True,
             CONTEXTUAL=True, TARGETS=True, BIAS=True, BLOCK=64, SPAN=64, ROWS=64, CHUNK=128, ROPE=True, ROPE_V=True, STAGES=2, INNER=128, WIDTH=64,
             STEP=32, LAYER=True, TOKENS=16, SCATTER=True, NORM=True, ENGINE=False, DQ_PARTS=3, DK_PARTS=3, DV_PARTS=3, GATE_PARTS=4, HALVES=True,
             out_desc=None, dq_desc=None, dk_desc=None, dv_desc=None)
WORDS = dict(scale="fp32", norm="fp32", eps="fp32", rope="*fp32", offsets="*i64", contextual="*i64", targets="*i64", base="*i64", skip="*i64",
             lse="*fp32", delta="*fp32", sums="*fp32", dgamma="*fp32", dbeta="*fp32", dsum="*fp32", factors="*fp32", means="*fp32", stats="*fp32")
WORDS |= dict(packed="*i32", other="*i32")
NUMBERS = set("count rows heads kv_heads total tokens max_length max_q max_k tiles steps limit seeds splits rows_per_run window row_group".split())
NUMBERS |= {"head_group", "span"}
DESCRIBED = {"x": "tensordesc<bf16[64, 32]>", "weight": "tensordesc<bf16[64, 32]>", "out": "tensordesc<bf16[64, 64]>"}

def word(name, described):
    if described and name in DESCRIBED:
        return DESCRIBED[name]
    if engine and name in RAGGED:
        return "tensordesc<bf16[1, 1, 64, 64]>"
    if name == "total" and op == "norm_linear.rows":
        return "*bf16"
    if name in NUMBERS or "_" in name and name.rsplit("_", 1)[-1] in ("token", "head", "row", "seed", "stride", "in", "out"):
        return "i32"
    return WORDS.get(name, "*bf16")

op, _, how = sys.argv[1].partition(" ")
engine, ones = how == "engine", how == "ones"
kernels = sys.argv[2:]
RAGGED = ("k v dk_desc dv_desc" if op.startswith("pooled") else "q k v dout out_desc dq_desc dk_desc dv_desc").split()
if engine:
    SIZES = {name: value for name, value in SIZES.items() if name not in RAGGED}
    SIZES |= dict(ENGINE=True, STAGES=3, ROPE=False, NORM=False, ROPE_V=False)
module = import_module(f"gem_kernels.ops.{op}")
for kernel in (getattr(module, name + "_kernel") for name in kernels):
    fixed = {n: v for n, v in SIZES.items() if n in kernel.arg_names}
    if ones:  # a number that is 1 becomes a constant, unless the kernel says that it varies
        fixed |= {p.name: 1 for p in kernel.params if p.name in ("heads", "kv_heads", "seeds") and not p.do_not_specialize}
    signature = {n: "constexpr" if n in fixed else word(n, op == "norm_linear.triton") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2))
    assert compiled.asm["cubin"]
    assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == bool(engine or op == "norm_linear.triton")
    print(kernel.fn.__name__, "wgmma" in compiled.asm["ptx"])
"""
KERNELS = {
    "block_attention.triton": ("forward", "backward"),
    "block_attention.triton engine": ("forward", "backward"),
    "hstu_attention.triton": ("forward", "query_grad", "key_grad", "bias_grad"),
    "pooled_attention.triton": ("forward", "delta", "grad", "query_grad", "key_grad"),
    "pooled_attention.triton engine": ("grad",),
    "pooled_attention.triton ones": ("grad", "key_grad"),
    "norm_linear.triton": ("after", "before"),
    "norm_linear.rows": ("statistics", "forward", "backward"),
    "gated_residual.triton": ("forward", "backward"),
    "pffn.triton": ("norm", "forward", "backward", "query_grad"),
    "jagged.triton": ("move", "product", "matrix_grad"),
}
WITHOUT_PRODUCTS = ("norm_linear.rows", "gated_residual.triton", "pffn.triton")


@pytest.mark.slow
@pytest.mark.parametrize("module", KERNELS)
def test_case_I03_the_kernels_compile_for_hopper_without_a_gpu(module):
    done = subprocess.run([sys.executable, "-c", CODE, module, *KERNELS[module]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    products = [name not in ("move_kernel", "delta_kernel") and module not in WITHOUT_PRODUCTS for name in done.stdout.split()[::2]]
    assert done.stdout.split()[1::2] == [str(wanted) for wanted in products]


WIDE = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.ops.gated_residual import triton as kernels

for kernel in (kernels.forward_kernel, kernels.backward_kernel):
    signature = {n: {"BLOCK": "constexpr", "count": "i32", "tiles": "i32"}.get(n, "*bf16") for n in kernel.arg_names}
    sixteen = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if not p.is_constexpr and not p.do_not_specialize}
    constants = {(kernel.arg_names.index("BLOCK"),): 1024}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=sixteen)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
    print(ptx.count("ld.global.v4.b32"), ptx.count("ld.global.b16"))
"""


@pytest.mark.slow
def test_elements_are_loaded_sixteen_bytes_at_once():
    """Of a count that Triton takes for a multiple of 16, as it finds it to be. Of one that is not told apart, each value is loaded alone."""
    done = subprocess.run([sys.executable, "-c", WIDE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["3", "0", "3", "0"]


EARLY = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.ops.norm_linear import rows

GIVEN = dict(x="*bf16", gamma="*bf16", beta="*bf16", gate="*bf16", concat="*bf16", out="*bf16", dy="*bf16", dbeside="*bf16", dz="*bf16",
             dgate="*bf16", dgamma="*fp32", dbeta="*fp32", rows="i32", tiles="i32", eps="fp32", x_stride="i32", residual_stride="i32",
             gate_stride="i32", concat_stride="i32", dy_stride="i32", dtotal_stride="i32", dbeside_stride="i32")
SIZES = dict(LAYER=True, WIDTH=256, ROWS=8, BLOCK=256, GATE_PARTS=4)
for kernel in (rows.forward_kernel, rows.backward_kernel):
    signature = {n: GIVEN.get(n, "constexpr") for n in kernel.arg_names}
    constants = {(i,): SIZES.get(n) for i, n in enumerate(kernel.arg_names) if n not in GIVEN}
    sixteen = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if GIVEN.get(p.name, "")[:1] == "*" or p.name.endswith("_stride")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=sixteen)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4)).asm["ptx"]
    print("late" if ptx.rindex("ld.global") > ptx.index("shfl.sync") else "early")
"""


@pytest.mark.slow
def test_all_loads_of_a_normed_row_start_before_its_first_sum():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["early", "early"]
