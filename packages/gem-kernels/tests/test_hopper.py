"""The Hopper kernels compile without a GPU, keep their products asynchronous, and are launched with what they can address."""

import types
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_offline import offline

from gem_core.ops.activations import ACTIVATIONS
from gem_kernels.common.hopper import gates, launch

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels.common.hopper.forward import forward_kernel
from gem_kernels.common.hopper.key_grad import key_grad_kernel
from gem_kernels.common.hopper.query_grad import query_grad_kernel

ROWS = {
    forward_kernel: dict(q_desc=64, k_desc=128, v_desc=128, o_desc=64),
    query_grad_kernel: dict(q_desc=64, do_desc=64, o_desc=64, k_desc=64, v_desc=64, dq_desc=64),
    key_grad_kernel: dict(q_desc=64, do_desc=64, k_desc=64, v_desc=64, dk_desc=64, dv_desc=64),
}
BLOCKS = {forward_kernel: (128, 128, 2), query_grad_kernel: (128, 64, 3), key_grad_kernel: (64, 128, 3)}
WORDS = dict(lse="*fp32", delta="*fp32", records="*i32", count="*i32", scale="fp32", factor="fp32")

def descriptor(rows):
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 128], gl.bfloat16)
    return f"tensordesc<bf16[1, 1, {rows}, 128],{layout!r}>"

for kernel, rows in ROWS.items():
    m, n, stages = BLOCKS[kernel]
    fixed = dict(GROUP=1, D=128, V=128, BLOCK_M=m, BLOCK_N=n, STAGES=stages, ACTIVATION=sys.argv[1], SCALE_AFTER=False, SIGN=1, CAUSAL=False,
                 WINDOW=False, SHARED=False)
    if sys.argv[1] != "softmax":
        fixed |= dict(lse=None, delta=None)
    fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
    words = {**WORDS, **{name: descriptor(size) for name, size in rows.items()}, **dict.fromkeys(fixed, "constexpr")}
    signature = {name: words.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    ptx = compiled.asm["ptx"]
    print(kernel.fn.__name__, "wgmma" in ptx, "setmaxnreg" in ptx, "cp.async.bulk.tensor.4d" in ptx, compiled.metadata.shared <= 232448)
"""


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["softmax", "gelu_bf16"])
def test_case_I03_the_kernels_compile_for_hopper_without_a_gpu(activation):
    done = offline(COMPILE, activation)
    assert done.stdout.split("\n")[:-1] == [f"{name}_kernel True True True True" for name in ("forward", "query_grad", "key_grad")], done.stderr[
        -2000:
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this looks at layouts, on a CPU")
def test_what_the_copy_engine_cannot_address_is_copied():
    good = torch.zeros(9, 2, 64, dtype=torch.bfloat16)
    assert launch._aligned(good) is good
    fused = torch.zeros(9, 2, 192, dtype=torch.bfloat16)[..., 64:128]
    assert launch._aligned(fused) is fused
    for bad in (torch.zeros(9 * 128 + 1, dtype=torch.bfloat16)[1:].view(9, 2, 64), torch.zeros(9, 132, dtype=torch.bfloat16)[:, :128].view(9, 2, 64)):
        copy = launch._aligned(bad)
        assert copy.data_ptr() != bad.data_ptr()
        assert copy.is_contiguous()
        assert copy.data_ptr() % 16 == 0


def test_a_ragged_descriptor_ends_every_row_and_reaches_every_token():
    """The four coordinates of ``language.load`` add up to the address of the token, modulo 2^64 bytes; the third ends where the row does."""
    x = torch.zeros(100, 3, 64, dtype=torch.bfloat16)[:, :2]
    _, descriptor = launch._ragged(x, 64)
    start, length, i, column = 30, 20, 7, 64
    coordinates = (2**30, start + length, 2**30 - length + i, column)
    offset = sum(c * s for c, s in zip(coordinates, descriptor.strides, strict=True))
    assert offset * x.element_size() % 2**64 == ((start + i) * x.stride(0) + column) * x.element_size()
    assert descriptor.shape[2] == 2**30, "token number 'length' of a row has this third coordinate"
    assert all(c < s for c, s in zip(coordinates, descriptor.shape, strict=True))
    assert all(stride * x.element_size() < 2**40 for stride in descriptor.strides)


def test_blocks_are_listed_for_both_widths():
    for blocks in launch.BLOCKS.values():
        assert set(blocks) == {64, 128}
        for size, stages in blocks.values():
            assert size in (64, 128)
            assert stages >= 2


def test_case_C05_more_items_than_the_kernels_count_are_refused():
    from gem_core.spec import RequestError
    from gem_kernels.ops.attention import AttentionCall

    x = torch.zeros(3, 2, 64, dtype=torch.float16)
    offsets = torch.tensor([0, 3])
    call = AttentionCall(op="gdpa", q=x, k=x, v=x, q_offsets=offsets, k_offsets=offsets, max_q=3, max_k=3, scale=1.0, window=None, activation="silu")
    with patch.object(launch, "MAX_ITEMS", 1), pytest.raises(RequestError, match="Split the batch"):
        launch.forward(call, torch.empty_like(x), None)


class Plain:
    """The helpers of ``gates`` as ordinary Python over float64 tensors, with an exact tanh."""

    def __init__(self):
        self.names = {"fast_tanh": torch.tanh, "is_gate": gates.is_gate.fn}
        self.names |= {name: getattr(gates, name).value for name in ("U1", "U3", "TANH_U1", "TANH_U3")}
        for name in ("_tanh", "weights_of", "slopes_of", "finish", "finish_slopes"):
            self.names[name] = types.FunctionType(getattr(gates, name).fn.__code__, self.names, name)

    def __getattr__(self, name):
        return self.names[name]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.25, 3.0])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_gates_give_weights_and_slopes_up_to_the_factor_that_the_sums_get(activation, scale, after):
    """What the kernels multiply and add, for one query, one key and a value and upstream gradient of one; bounds as in ``activations``."""
    plain, kind = Plain(), f"{activation}_bf16"
    inner, outer = (1.0, scale) if after else (scale, 1.0)
    s = (torch.linspace(-7, 7, 1001, dtype=torch.float64) / inner).requires_grad_()
    value = outer * ACTIVATIONS[activation](inner * s)
    (slope,) = torch.autograd.grad(value.sum(), [s])
    with torch.no_grad():
        out = plain.finish(plain.weights_of(s, inner, kind), scale, kind, after)
        ds = plain.finish_slopes(plain.slopes_of(s, inner, kind), scale, kind)
    bound, slope_bound = (2.8e-4, 8.8e-4) if activation == "gelu" else (1e-12, 1e-12)
    assert float((out - value.detach()).abs().max()) <= abs(outer) * bound
    assert float((ds - slope).abs().max()) <= abs(scale) * slope_bound
