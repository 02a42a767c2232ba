"""How many functions of Python and C a call of an op enters, once calls like it were made before: what a step pays on the host, whatever the machine.

For a program of its own, as tensors of the CPU pass for a GPU's there and kernels are neither compiled nor run: ``python3 -m gem_kernels_calls``
prints the counts of each op, forward and backward. With ``slow`` behind it every launch is prepared as if it were the first.
"""

import sys
from types import SimpleNamespace

import gem_kernels_driver
import torch
from triton.backends.nvidia import driver as nvidia

from gem_kernels.bench.measure import flat
from gem_kernels.bench.shapes import SHAPES, SHAPES_OF, VARIANTS_OF
from gem_kernels.bench.workloads import build
from gem_kernels.common import compiled, launcher
from gem_kernels.ops.gated_residual.launch import gated_residual
from gem_kernels.ops.gdpa.launch import gluon as gdpa
from gem_kernels.ops.jagged_attention.launch import gluon as jagged_attention
from gem_kernels.ops.norm_linear import hopper_launch
from gem_kernels.ops.norm_linear.launch import norm_linear

OPS = {"jagged_attention": jagged_attention, "gdpa": gdpa, "norm_linear": norm_linear, "gated_residual": gated_residual}
DRIVER = gem_kernels_driver.install()
META = {"swizzle": 0, "elem_size": 2, "elem_type": 10, "block_size": [1], "fp4_padded": False}


class Run:
    """A compiled kernel's launcher that launches nothing."""

    global_scratch_size = profile_scratch_size = launch_cooperative_grid = launch_pdl = 0

    def __init__(self, descriptors):
        if hasattr(nvidia, "annotate_arguments"):
            self.arg_annotations = self.kernel_signature = ()
        self.launch = nvidia.wrap_handle_tensordesc(print, dict.fromkeys(range(descriptors), "tensordesc"), [META] * descriptors)


def by_triton(kernel, grid, arguments):
    blocks = sum(type(value) is compiled.Block for value in arguments.values())
    metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"), tensordesc_meta=[META] * blocks)
    return SimpleNamespace(run=Run(blocks), function=1, packed_metadata=(), metadata=metadata)


class Compiled(compiled.Compiled):
    def _flatten(self, wrapped):
        super()._flatten(wrapped)
        self.send = nothing


def nothing(*given):
    return None


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        return inputs[0].new_empty(1)

    @staticmethod
    def backward(ctx, grad):
        return (None,) * len(ctx.needs_input_grad)


def calls(function):
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def gradients(output, leaves):
    upstream = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, leaves, upstream, retain_graph=True, allow_unused=True)


def counts(op):
    work = build(op, VARIANTS_OF.get(op, ("",))[0], SHAPES[SHAPES_OF[op][0]], [64, 30], torch.bfloat16, "cpu")
    leaves = work.leaves()
    forward = lambda: work.call(OPS[op])  # noqa: E731
    backward, nobody = gradients(flat(forward())[0], leaves), gradients(Nothing.apply(*leaves), leaves)
    for warm in (forward, backward, nobody):
        warm()
    return calls(forward), calls(backward) - calls(nobody)


if __name__ == "__main__":
    torch.Tensor.is_cuda = True
    DRIVER.utils.fill_tma_descriptor = DRIVER.utils.fill_tma_descriptor_tiled = nothing
    launcher._by_triton, launcher.Compiled, hopper_launch.here = by_triton, Compiled, lambda x: True
    if sys.argv[1:] == ["slow"]:
        launcher.Compiled = nothing  # nothing is remembered
    for op in OPS:
        print(op, *counts(op), flush=True)
