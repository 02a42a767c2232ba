"""The Hopper kernels of block_attention: run by a model of Gluon against the reference, compiled without a GPU, and when they are chosen."""

from types import SimpleNamespace
from unittest.mock import patch

import hypothesis
import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_gluon import Model, Pointer, Wrong
from gem_kernels_offline import offline
from hypothesis import strategies as st

from gem_core.ops.block_attention import reference
from gem_core.spec import RequestError
from gem_core.testing import assert_as_accurate, plain_precision, poisoned_memory
from gem_kernels.ops.block_attention import hopper_launch, launch

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this runs a model of the kernels, on a CPU")
KERNELS = "gem_kernels.ops.block_attention.hopper"


def modelled(model, programs=3):
    """block_attention as on Hopper, its kernels run by ``model`` as so many programs."""

    def attend(*arguments, **options):
        with (
            patch.object(launch, "copied", lambda *tensors: True),
            patch.multiple(hopper_launch, forward_kernel="forward_kernel", backward_kernel="backward_kernel", programs=lambda *a, **k: programs),
            patch.object(hopper_launch, "launcher", model),
        ):
            return results(launch.block_attention, *arguments, **options)

    return attend


def results(function, *arguments, **options):
    """Output and gradients."""
    out = function(*arguments, **options)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    leaves = [x for x in (*arguments[:3], options.get("q_gain"), options.get("k_gain")) if x is not None]
    return (out.detach(), *torch.autograd.grad(out, leaves, upstream))


def draw(lengths, heads=4, dim=64, v_dim=64, *, tail=0, norm=False, packed=False, scale=20.0):
    """Leaves q, k, v and gains in float16, offsets, and angles."""
    g = torch.Generator().manual_seed(sum(lengths) + heads)
    tokens = sum(lengths) + tail
    if packed:
        q, k, v = torch.randn(tokens, 3, heads, dim, generator=g).half().requires_grad_().unbind(1)
    else:
        q, k, v = (torch.randn(tokens, heads, width, generator=g).half().requires_grad_() for width in (dim, dim, v_dim))
    gains = [(torch.rand(dim, generator=g) + 0.5).half().requires_grad_() for _ in range(2)] if norm else [None, None]
    return (q, k, v, torch.tensor([0, *lengths]).cumsum(0)), {
        "rope": torch.rand(tokens, dim // 2, generator=g) * scale,
        "q_gain": gains[0],
        "k_gain": gains[1],
    }


def widened(x):
    if x is None or not x.is_floating_point():
        return x
    return x.detach().double().requires_grad_(x.requires_grad)


def compare(lengths, *, model=None, programs=3, options=None, **drawn):
    arguments, given = draw(lengths, **drawn)
    given |= {"max_length": max(lengths), **(options or {})}
    truth = results(reference, *map(widened, arguments), **{name: widened(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()})
    with plain_precision():
        usual = results(reference, *arguments, **given)
    with poisoned_memory():
        found = modelled(model or Model(KERNELS), programs)(*arguments, **given)
    for name, a, p, t in zip(("output", "dq", "dk", "dv", "dq_gain", "dk_gain"), found, usual, truth, strict=False):
        assert_as_accurate(a, p, t, what=name)


@ON_CPU
@pytest.mark.parametrize("norm", [False, True], ids=["rope", "rope and norm"])
@pytest.mark.parametrize("lengths", [(130, 0, 1, 64), (65,), (0, 0, 3)], ids=str)
def test_rows_of_any_length(lengths, norm):
    compare(lengths, norm=norm)


@ON_CPU
@pytest.mark.parametrize(
    ("drawn", "options"),
    [
        ({"heads": 3}, {}),
        ({"heads": 8, "dim": 128, "v_dim": 64}, {"scale": -0.3}),
        ({"v_dim": 128}, {"block": 20}),
        ({"dim": 128, "v_dim": 128}, {"rope_on_v": True, "block": 16}),
        ({"packed": True}, {"block": 64}),
        ({"norm": True}, {"rope": None, "eps": 0.5}),
        ({"tail": 70}, {"max_length": 90}),
        ({"scale": 1e5}, {}),
    ],
    ids=["heads", "widths", "blocks of 20", "turned values", "packed", "norm alone", "tokens of no row and rows that are cut", "angles to 1e5"],
)
@pytest.mark.parametrize("programs", [1, 5])
def test_everything_that_a_call_can_ask(drawn, options, programs):
    compare((70, 0, 95), programs=programs, options=options, **drawn)


@ON_CPU
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=3).filter(any),
    heads=st.integers(1, 4),
    block=st.integers(1, 64),
    tail=st.sampled_from([0, 1, 65]),
    programs=st.integers(1, 4),
    cut=st.booleans(),
)
def test_drawn_calls(lengths, heads, block, tail, programs, cut):
    options = {"block": block, "max_length": max(1, max(lengths) // (1 + cut))}
    compare(lengths, programs=programs, options=options, heads=heads, tail=tail)


MEET = "        tl.debug_barrier()"
FAULTS = {
    "no fence after the operands are turned": ("        fence_async_shared()\n        s = ", "        s = ", "without a fence"),
    "q is copied before all warps are through with it": (MEET + "  # all warps are through with the product before its operands go\n", "", "through"),
    "v is copied before all warps are through with it": (MEET + "\n        mbarrier.expect(v_full", "        mbarrier.expect(v_full", "through"),
    "the output's memory is written while it leaves": ("        tma.store_wait(0)\n        tl", "        tl", "copied to the device"),
    "dq is written before all warps are through with k": (
        "deps=[dq])\n" + MEET + "\n        dk = warpgroup_mma(",
        "deps=[dq])\n        dk = warpgroup_mma(",
        "through",
    ),
    "dk is written before all warps are through with q": ("deps=[dk])\n" + MEET, "deps=[dk])", "through"),
    "the last copy is missing": ("        _copy(dout_desc, next_start", "        (lambda *a: None)(dout_desc, next_start", "this hangs"),
    "operands come before gradients have left": (
        "        tma.store_wait(0)\n        tl.debug_barrier()\n        _copy(q_desc, next",
        "        _copy(q_desc, next",
        "copied to the device",
    ),
}


@ON_CPU
@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_kernel_must_wait_for_is_noticed(fault):
    """Planted faults: each leaves out one step that a GPU might forgive."""
    old, new, said = FAULTS[fault]

    def change(text):
        assert old in text
        return text.replace(old, new)

    with pytest.raises(Wrong, match=said):
        compare((70, 3), model=Model(KERNELS, change), programs=1, heads=2)


@ON_CPU
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("odd * cos - even * sin)", "odd * cos + even * sin)"),
        ("gl.where(i < count, 1.0 / gl.sum(p, 1), 0.0)", "1.0 / gl.sum(p, 1)"),
        ("(j < count)", "(j <= count)"),
        ("n % GROUP == 0", "n == 0"),
        ("gl.minimum(first + SPAN, length)", "gl.minimum(first + SPAN, used)"),
    ],
    ids=[
        "turned forth instead of back",
        "tokens that are cut get values",
        "a token of the next row is seen",
        "angles of the first tile",
        "cut tokens stay",
    ],
)
def test_what_a_kernel_computes_is_noticed(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new)

    with pytest.raises(AssertionError):
        compare((70, 0, 95), model=Model(KERNELS, change), tail=70, options={"max_length": 90})


@ON_CPU
def test_gradients_are_written_beside_those_of_other_parts():
    """Memory whose tokens hold three gradients, as ``places`` offers it: the same bits, and nothing else is touched."""
    (q, k, v, offsets), given = draw((70, 3), tail=5)
    inputs, settings = (q.detach(), k.detach(), v.detach(), None, None, offsets, given["rope"]), (70, 64, 0.1, False, 1e-6)
    model, dout = Model(KERNELS), torch.randn(q.shape).half()

    with (
        patch.multiple(hopper_launch, forward_kernel="forward_kernel", backward_kernel="backward_kernel", programs=lambda *a, **k: 2),
        patch.object(hopper_launch, "launcher", model),
    ):
        alone = {name: torch.full(q.shape, 7.0).half() for name in ("dq", "dk", "dv")}
        hopper_launch.run("backward", inputs, settings, alone, dout)
        memory = torch.full((q.shape[0], 4, *q.shape[1:]), 7.0).half()
        hopper_launch.run("backward", inputs, settings, dict(zip(alone, memory.unbind(1), strict=False)), dout)
    for i, name in enumerate(alone):
        assert torch.equal(memory[:, i], alone[name])
    assert (memory[:, 3] == 7).all()


@ON_CPU
@pytest.mark.parametrize("top", [1.0, 1e3, 1e5])
def test_cosines_and_sines_of_angles_up_to_100_000(top):
    """Of the reduction, with torch's functions behind it; those of the special function unit add 5e-7."""
    model = Model(KERNELS)
    angles = ((torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1) * top).float()
    factors = model.module._factors(Pointer(angles.flatten()), 64, 0, 0, 64, 128).view(64, 64, 2)
    exact = torch.stack((angles.double().cos(), angles.double().sin()), -1)
    assert (factors - exact).abs().max() < 1.5e-6


# ---- compilation and choice -----------------------------------------------------------------------------------------------------------

COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels_offline import assembler
from gem_kernels.ops.block_attention import hopper

def word(name, widths):
    if name.endswith("_desc"):
        block = [1, 1, 64, widths[name[:-5] in ("v", "dout", "dv", "out")]]
        return f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"
    words = dict(scale="fp32", eps="fp32", rope="*fp32", records="*i32", count="*i32", q_gain="*bf16", k_gain="*bf16")
    return words.get(name, "i32")

def report(name, D, V, NORM, ROPE_V, **options):
    kernel = getattr(hopper, name + "_kernel")
    fixed = dict(D=D, V=V, BLOCK=64, SPAN=64, GROUP=4, ROPE=True, ROPE_V=ROPE_V, NORM=NORM)
    signature = {n: "constexpr" if n in fixed else word(n, (D, V)) for n in kernel.arg_names}
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(n),): value for n, value in fixed.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, **options))
    said = assembler(compiled.asm["ptx"])
    return "serialized" in said, int(re.search(r"(\\d+) bytes spill stores", said)[1]), 2 * (compiled.metadata.shared + 1024) <= 228 * 1024

for name in ("forward", "backward"):
    for case in ((128, 128, False, False), (128, 128, True, True), (64, 128, False, False)):
        print(*report(name, *case))
print(report("backward", 128, 128, False, False, maxnreg=128)[1] > 0)
"""


@pytest.mark.slow
def test_case_I03_the_kernels_compile_for_hopper_without_spills_and_two_programs_share_an_sm():
    done = offline(COMPILE)
    assert done.stdout.split("\n")[:-1] == [*["False 0 True"] * 6, "True"], done.stderr[-2000:]  # the last one has too few registers


def launched(drawn=None, **options):
    """Names of the kernels that a call launches where the copy engine can address its tensors."""
    found = []
    (q, k, v, offsets), given = draw((70, 3), **(drawn or {}))

    def note(kernel, *arguments):
        found.append(f"hopper {kernel}")

    with (
        patch.object(launch, "copied", lambda *tensors: True),
        patch.object(launch, "_hopper", lambda: SimpleNamespace(run=note)),
        patch.object(launch, "ragged", lambda x, rows: x),
        patch.object(launch.host, "launch", lambda kernel, *arguments, **given: found.append(f"portable {kernel.__name__.removesuffix('_kernel')}")),
    ):
        launch.block_attention(q, k, v, offsets, max_length=70, **given | options).sum().backward()
    return found[:2]


@ON_CPU
def test_turned_heads_go_to_the_kernels_for_hopper():
    assert launched() == ["hopper forward", "hopper backward"]


@ON_CPU
@pytest.mark.parametrize(
    ("drawn", "options"),
    [({"dim": 32}, {}), ({"v_dim": 16}, {}), ({}, {"block": 65}), ({}, {"rope": None})],
    ids=["dim 32", "v_dim 16", "blocks of 65", "neither turned nor normed"],
)
def test_other_shapes_stay_with_the_portable_kernels(drawn, options):
    assert launched(drawn, **options) == ["portable forward", "portable backward"]


@ON_CPU
def test_case_C05_more_tiles_than_the_kernels_count_are_refused():
    with patch.object(hopper_launch, "MAX_ITEMS", 1), pytest.raises(RequestError, match="Split the batch"):
        compare((70, 3))
