"""The native kernels compile for Hopper without a GPU, and come out as meant: FP8 tensor cores, bulk copies, wide accesses, registers that fit."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import json, os, re, subprocess, sys, tempfile
os.environ.pop("TRITON_INTERPRET", None)
from importlib import import_module
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = dict(x="*bf16", branch="*bf16", total="*bf16", dy="*bf16", more="*bf16", dx="*bf16", out="*fp8e4nv", turned="*i32", ready="*i32",
             eps="fp32", left="tensordesc<fp8e4nv[128, 128]>", right="tensordesc<fp8e4nv[128, 128]>")
NUMBERS = "rows columns padded stride branch_stride x_stride dy_stride chunks blocks share ahead".split()

def build(module, kernel, constants, types, limit):
    fn = getattr(import_module("gem_precision.kernels." + module), kernel)
    known = {**TYPES, **{name: "i32" for name in NUMBERS}, **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "*fp32") for name in fn.arg_names}
    fixed = {(fn.arg_names.index(name),): value for name, value in constants.items()}
    # what a launch finds out: pointers and widths are multiples of 16, the number of rows need not be
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names)
            if name in signature and signature[name].startswith(("*", "i32")) and name != "rows"}
    options = dict(num_warps=8, num_stages=4, **({"maxnreg": limit} if limit else {}))
    made = triton.compile(ASTSource(fn=fn, signature=signature, constexprs=fixed, attrs=even), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = made.asm["ptx"]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        told = subprocess.run([tools / "ptxas", "-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "cubin")], capture_output=True, text=True)
    word = told.stderr
    return dict(
        shared=made.metadata.shared, ptx=ptx, warnings=re.findall(r"warning.*|.*C75\\d\\d.*", word),
        registers=int(re.search(r"Used (\\d+) registers", word)[1]), spilled=int(re.search(r"(\\d+) bytes spill stores", word)[1]))

print(json.dumps([build(*request) for request in json.loads(sys.argv[1])]))
"""


def build(*requests):
    done = subprocess.run([sys.executable, "-c", CODE, json.dumps(requests)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    built = json.loads(done.stdout)
    assert all(not kernel["warnings"] for kernel in built), [kernel["warnings"] for kernel in built]
    return built


def accesses(kernel, kind):
    """The widths of a kernel's accesses, such as ``v4.b32``."""
    found = [line.split(kind, 1)[1].split()[0] for line in kernel["ptx"].splitlines() if kind in line]
    return {word.removeprefix(".") for word in found}


@pytest.mark.slow
def test_casts_read_and_write_wide_and_exchange_no_single_bytes():
    both, weight = build(
        ("cast", "cast_both_kernel", {"SUM": False}, {}, 128), ("cast", "cast_squares_kernel", {"EACH": False}, {"x": "*fp32"}, None)
    )
    assert accesses(both, "ld.global") == {"v4.b32"}
    assert accesses(both, "st.global") == {"v4.b32", "b32"}  # elements, and scales
    for kernel in (both, weight):
        assert not {word for kind in ("st.shared", "ld.shared", "st.global") for word in accesses(kernel, kind) if word.endswith("b8")}
    assert both["ptx"].count("cvt.rn.satfinite.e4m3x2") == 2 * 64 // 2  # 64 elements a thread, twice, two at a time
    assert (both["registers"] <= 128, both["spilled"]) == (True, 0)
    assert weight["spilled"] == 0


@pytest.mark.slow
def test_a_cast_on_words_compares_two_at_a_time_and_with_sums_has_the_next_tile_on_its_way():
    from gem_precision.kernels.cast import SUMMED, TILE_BY_TILE

    types, how = {"x": "*i32", "out": "*i16"}, {False: TILE_BY_TILE, True: SUMMED}
    plain, summed = build(
        *(("words", "cast_words_kernel", {"SUM": kind, "STAGES": way["STAGES"]}, types, way["maxnreg"]) for kind, way in how.items())
    )
    for kernel, way in ((plain, TILE_BY_TILE), (summed, SUMMED)):
        assert "max.u16x2" in kernel["ptx"]
        assert accesses(kernel, "st.global") == {"v4.b32", "b32"}
        assert not {word for kind in ("st.shared", "ld.shared") for word in accesses(kernel, kind) if word.endswith("b8")}
        assert kernel["registers"] <= way["maxnreg"]
        assert kernel["spilled"] == 0
        programs = 65536 // (256 * way["maxnreg"])  # that a multiprocessor has registers for
        assert kernel["shared"] <= 227 * 1024 // programs
    assert accesses(plain, "ld.global") == {"v4.b32"}
    assert "cp.async.cg.shared.global" in summed["ptx"]


@pytest.mark.slow
def test_products_use_fp8_tensor_cores_and_bulk_copies():
    kinds = [
        {"SQUARE": True, "WIDE": False, "STAGES": 4},
        {"SQUARE": False, "WIDE": False, "STAGES": 4},
        {"SQUARE": False, "WIDE": True, "STAGES": 3},
    ]
    square, rows, wide = build(*(("product", "product_kernel", kind, {"out": "*fp32"}, None) for kind in kinds))
    for kernel in (square, rows, wide):
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in kernel["ptx"]
        assert "cp.async.bulk.tensor" in kernel["ptx"]
        assert kernel["shared"] <= 227 * 1024
    assert square["spilled"] == rows["spilled"] == 0
    assert wide["spilled"] <= 64
    # scales come ahead of their use as well, not by loads that the loop waits for
    assert "cp.async.ca.shared.global" in rows["ptx"]


@pytest.mark.slow
def test_fused_kernels_leave_room_for_two_programs_a_multiprocessor():
    plain = {"gamma": None, "beta": None, "LAYER": True, "STAGES": 3}
    kernels = build(
        ("norm", "norm_kernel", {**plain, "branch": None, "total": None, "SQUARE": False, "WIDE": 512}, {}, 128),
        ("norm", "norm_kernel", {**plain, "SQUARE": False, "WIDE": 256}, {}, 128),
        ("norm", "norm_kernel", {**plain, "SQUARE": True, "WIDE": 256}, {}, 128),
        ("activation", "activation_kernel", {"NAME": "gelu", "GRAD": True}, {}, 128),
        ("activation", "activation_kernel", {"NAME": "gelu", "GRAD": False}, {}, 128),
    )
    for kernel in kernels:
        assert accesses(kernel, "ld.global") <= {"v4.b32", "b32", "gpu.acquire.b32"}
        assert not {word for word in accesses(kernel, "st.shared") if word.endswith("b8")}
        assert kernel["registers"] <= 128
        assert kernel["spilled"] <= 64
        assert kernel["shared"] <= 227 * 1024 // 2
    for norm in kernels[:3]:
        assert norm["spilled"] == 0
        assert "cp.async.cg.shared.global" in norm["ptx"]  # statistics are computed while the next tiles come
        assert "atom.global.gpu.release" in norm["ptx"]


@pytest.mark.slow
def test_the_gradient_of_a_norm_fits_at_every_width():
    gained = [{"LAYER": True, "ROWS": 8192 // width, "WIDTH": width} for width in (128, 4096)]
    plain = [{"gamma": None, "sums": None, "LAYER": True, "ROWS": 4096 // width, "WIDTH": width} for width in (128, 4096)]
    for kernel in build(*(("norm", "norm_grad_kernel", fixed, {}, None) for fixed in gained + plain)):
        assert kernel["spilled"] == 0


@pytest.mark.slow
def test_attention_uses_fp8_tensor_cores_for_both_products():
    box, words = "tensordesc<fp8e4nv[128, 128]>", ("heads", "q_padded", "k_padded", "max_q", "max_k")
    types = {**dict.fromkeys("qkv", box), **dict.fromkeys(words, "i32"), "q_offsets": "*i64", "k_offsets": "*i64", "factor": "fp32", "out": "*bf16"}
    (kernel,) = build(("gdpa", "gdpa_kernel", {"NAME": "gelu", "STAGES": 2}, types, None))
    assert kernel["ptx"].count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3") == 2 * 4  # 128 elements are four steps of 32
    assert "cp.async.bulk.tensor" in kernel["ptx"]
    assert kernel["spilled"] == 0


@pytest.mark.slow
def test_the_norm_of_one_row_is_not_compiled_for_one_row():
    """ptxas packs pairs of E4M3 wrongly where the compiler knows that they are the same."""
    code = "from gem_precision.kernels.norm import one_row_kernel as k; print([p.name for p in k.params if p.do_not_specialize])"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "['rows']"
