"""Hopper kernels where everything is read as late as it may be: the memory of a tile goes back when it has been read, not before."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_emulated import Blocks, Late, Pointer, emulate
from torch.nn.functional import silu

from gem_core.ops import gdpa, hstu_attention
from gem_kernels.common.hopper import forward, items, key_grad, language, launch, query_grad
from gem_kernels.ops.gdpa.call import Call
from gem_kernels.ops.hstu_attention import hopper, hopper_query_grad
from gem_kernels.ops.hstu_attention import launch as hstu_launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this emulates, on a CPU")
PAUSE = 0.01
LENGTHS = (70, 3, 128, 1, 60, 130, 0, 64)
KEYS, HEADS, DIM, SCALE = 100, 2, 64, 0.2


def silu_slope(s, scale, *_):
    x = s * scale
    return torch.sigmoid(x) * (1 + x * (1 - torch.sigmoid(x)))


def numbers(*bounds):
    """``range``, of numbers as a kernel has them."""
    return map(torch.as_tensor, range(*map(int, bounds)))


REPLACED = {
    "range": numbers,
    "weights_of": lambda s, scale, activation: silu(s * scale),
    "finish": lambda x, *_: x,
    "slopes_of": silu_slope,
    "slope_scaled": silu_slope,
    "finish_slopes": lambda x, factor, activation: x * factor,
}


def drawn(*shapes):
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw).half() for shape in shapes]


def emulating(kernel, module, extra):
    """A launcher that emulates ``kernel`` as ``module`` has it, and launches nothing else."""

    def launched(called, grid, device, arguments):
        if called is not kernel:
            return
        mine = getattr(module, kernel.fn.__name__)
        arguments = {name: value for name, value in arguments.items() if name in mine.arg_names}
        blocks = {name: Blocks(x[0], list(x[1].block)) for name, x in arguments.items() if name.endswith("_desc")}
        given = {name: Pointer(x) if isinstance(x, torch.Tensor) else x for name, x in arguments.items() if name not in blocks}
        emulate(mine, [module, *extra], 1, REPLACED | Late(PAUSE).names, **given, **blocks)

    return SimpleNamespace(launch=launched)


def of_gdpa(what, module):
    """What a pass of it gives, and what the reference gives in float64."""
    tokens, rows = sum(LENGTHS), len(LENGTHS)
    q, k, v, dout = drawn((tokens, HEADS, DIM), (rows, KEYS, HEADS, DIM), (rows, KEYS, HEADS, DIM), (tokens, HEADS, DIM))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    options = {"max_q": max(LENGTHS), "max_k": KEYS, "activation": "silu", "scale": SCALE}
    call = Call(op="gdpa", q=q, k=k, v=v, q_offsets=offsets, k_offsets=None, window=None, backend="gluon", **options)
    with patch.object(launch, "launcher", emulating(getattr(launch, f"{what}_kernel"), module, [language])):
        found = call.forward() if what == "forward" else getattr(call, what)(dout)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = gdpa(*leaves, offsets, None, backend="reference", **options)
    of_q, *of_keys = torch.autograd.grad(out, leaves, dout.double())
    return found, {"forward": out.detach(), "query_grad": of_q, "key_grad": tuple(of_keys)}[what]


def of_hstu(what, module):
    """The gradient of its queries, which see all keys, and that of the reference in float64."""
    q, k, v, dout = drawn(*[(sum(LENGTHS), HEADS, DIM)] * 4)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    call = hstu_launch._Inputs(q, k, v, offsets, None, None, None, max(LENGTHS), SCALE, 1.0, False, None, True)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    with patch.object(hopper, "launcher", emulating(hopper.query_grad_kernel, module, [language, items])):
        hopper.grad(call, dout, *grads)
    leaf = q.double().requires_grad_()
    options = {"max_length": max(LENGTHS), "scale": SCALE, "causal": False, "norm_length": 1}
    out = hstu_attention(leaf, k.double(), v.double(), offsets, backend="reference", **options)
    return grads[0], torch.autograd.grad(out, leaf, dout.double())[0]


PASSES = {
    "gdpa forward": (of_gdpa, "forward", forward),
    "gdpa query_grad": (of_gdpa, "query_grad", query_grad),
    "gdpa key_grad": (of_gdpa, "key_grad", key_grad),
    "hstu query_grad": (of_hstu, "query_grad", hopper_query_grad),
}


def off(found, expected):
    """The largest error, as a share of the largest value."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    return max(float((mine.double() - right).abs().max() / right.abs().max()) for mine, right in pairs)


@pytest.mark.parametrize("name", PASSES)
def test_case_I03_tiles_keep_their_memory_until_it_is_read(name):
    of, what, module = PASSES[name]
    assert off(*of(what, module)) < 5e-3


@pytest.mark.parametrize("name", ["gdpa query_grad", "hstu query_grad"])
def test_memory_that_goes_back_before_its_loads_are_done_is_noticed(name, tmp_path):
    """The planted fault, which was one: the loads into registers are under way, and the rows of the next tile come."""
    of, what, module = PASSES[name]
    text = Path(module.__file__).read_text()
    loaded = "do_operand = do_tile.load(gl.DotOperandLayout(0, SCORES, 2))\n"
    arrival = "mbarrier.arrive(q_free.index(W), count=1)"
    before, after = text.split(loaded)
    tmp_path.joinpath("early.py").write_text(f"{before}{loaded[:-1]}; {arrival}\n{after.replace(arrival, 'pass', 1)}")
    spec = spec_from_file_location("early", tmp_path / "early.py")
    early = module_from_spec(spec)
    spec.loader.exec_module(early)
    assert off(*of(what, early)) > 0.1
