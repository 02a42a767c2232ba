"""What the plugin declares, and what importing this package needs."""

import ast
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import gem_kernels
from gem_core.spec import KernelImpl, load_object
from gem_core.testing import registry
from gem_kernels.plugin import gem_kernel_impls

DECLARED = [pytest.param(impl, id=f"{impl.op}-{impl.backend}{impl.variant and '-'}{impl.variant}") for impl in gem_kernel_impls()]


def top_imports(name):
    """Modules that a module imports as it is imported itself, with the ones that a ``from`` may name."""
    tree = ast.parse(Path(find_spec(name).origin).read_text())
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def kernel_modules():
    """Modules that hold kernels: they import triton through ``common.language`` or another of them, are loaded on first use, and may ask for it."""
    names = {m.name for m in pkgutil.walk_packages(gem_kernels.__path__, "gem_kernels.")}
    imports = {name: set(top_imports(name)) & names for name in names}
    found = {"gem_kernels.common.language"}
    while more := {name for name in names - found if imports[name] & found}:
        found |= more
    return found


KERNEL_MODULES = kernel_modules()


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("impl", DECLARED)
def test_declarations_name_things_that_exist(impl: KernelImpl):
    spec = registry().op(impl.op)
    assert impl.contract == spec.contract
    assert set(impl.features) <= set(spec.features)
    assert callable(impl.resolve())
    if impl.check:
        assert callable(load_object(impl.check))


def test_the_installed_plugin_is_this_one():
    mine = {(o.impl.op, o.impl.backend, o.impl.variant) for o in registry().impls if o.owner_name == "gem-kernels"}
    assert mine == {(impl.op, impl.backend, impl.variant) for impl in gem_kernel_impls()}


def test_declarations_and_their_checks_import_no_torch():
    code = (
        "import sys, gem_kernels.plugin as p\n"
        "from gem_core.spec import load_object, KernelRequest\n"
        "for impl in p.gem_kernel_impls():\n"
        "    impl.check and load_object(impl.check)(KernelRequest(op=impl.op, device='cuda', dtype='bf16'))\n"
        "print(sorted({'torch', 'triton', 'pydantic'} & set(sys.modules)))"
    )
    assert python(code).stdout.strip() == "[]", python(code).stderr


def test_case_A06_everything_imports_without_triton_and_kernels_say_what_is_missing():
    names = [m.name for m in pkgutil.walk_packages(gem_kernels.__path__, "gem_kernels.")]
    assert {"gem_kernels.ops.gdpa.triton", "gem_kernels.common.hopper.launch"} <= KERNEL_MODULES
    assert not {"gem_kernels.ops.gdpa.launch", "gem_kernels.ops.gdpa.configs", "gem_kernels.nn"} & KERNEL_MODULES
    code = (
        "import sys, importlib\n"
        "for name in ('triton', 'triton.language', 'fbgemm_gpu', 'torchrec'): sys.modules[name] = None\n"
        "from gem_core.spec import MachineError\n"
        f"kernels = {KERNEL_MODULES!r}\n"
        f"for name in {names!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "        assert name not in kernels, name\n"
        "    except MachineError as error:\n"
        "        assert name in kernels and 'triton' in str(error) and 'pip install' in str(error), (name, str(error))\n"
        "import torch\n"
        "from gem_kernels.ops.gdpa.launch import gdpa\n"
        "from gem_kernels.nn import GdpaAttention\n"
        "x, offsets = torch.zeros(2, 1, 16), torch.tensor([0, 2])\n"
        "try:\n"
        "    gdpa(x, x, x, offsets, offsets, max_q=2, max_k=2)\n"
        "except MachineError as error:\n"
        "    print('raises', error)\n"
        "print(GdpaAttention(8, 2)(torch.ones(2, 8), offsets, 2).shape)\n"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "raises" in done.stdout
    assert "triton>=3.6" in done.stdout
    assert "torch.Size([2, 8])" in done.stdout, "the automatic choice takes the reference"


def test_case_A04_each_module_imports_alone():
    """Custom ops are registered by the module that launches them, in whatever order modules are imported."""
    code = "import gem_kernels.ops.gdpa.launch, torch; print(torch.ops.gem_kernels.gdpa.default)"
    assert python(code).stdout.strip() == "gem_kernels.gdpa.default"


@pytest.mark.slow
def test_case_I03_the_kernels_compile_for_hopper_without_a_gpu():
    """Triton and its assembler come with the wheel: what the interpreter lets pass and the compiler does not shows here."""
    pytest.importorskip("triton")
    code = """
import os
os.environ.pop("TRITON_INTERPRET", None)
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.ops.gdpa import triton as gdpa
from gem_kernels.ops.jagged_attention import triton as jagged
names = ("forward_kernel", "query_grad_kernel", "key_grad_kernel")
for kernel in (*(getattr(gdpa, n) for n in names), *(getattr(jagged, n) for n in names), jagged.bias_grad_kernel):
    fixed = dict(GROUP=2, DIM=24, V_DIM=32, BLOCK_M=64, BLOCK_N=64, BLOCK_D=32, BLOCK_V=32, ACTIVATION="gelu_bf16", SCALE_AFTER=True, WINDOW=True,
                 CAUSAL=True, BIAS=True, SHARED=True, PRECISION="tf32", PER_ROW=False, PER_HEAD=True, q_offsets=None,
                 DQ_PARTS=3, DK_PARTS=3, DV_PARTS=3)
    fixed = {n: v for n, v in fixed.items() if n in kernel.arg_names}
    words = {"scale": "fp32", "k_offsets": "*i64", "records": "*i32", "count": "*i32", "lse": "*fp32", "delta": "*fp32"}
    pointers = ("q", "k", "v", "bias", "out", "dout", "dq", "dk", "dv", "dbias")
    signature = {n: "constexpr" if n in fixed else words.get(n, "*bf16" if n in pointers else "i32") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2))
    print(len(compiled.asm["cubin"]) > 0, "wgmma" in compiled.asm["ptx"])
"""
    done = python(code)
    assert done.stdout.split() == ["True"] * 14, done.stderr[-2000:]
