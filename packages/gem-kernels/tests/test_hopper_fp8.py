"""FP8 attention on Hopper: what the casts write, that scales keep weights within the format, and that the kernel compiles as it is meant to."""

from unittest.mock import patch

import gem_kernels_fp8 as plain
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gem_kernels_offline import offline

from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.gdpa import reference as gdpa
from gem_core.ops.jagged_attention import reference as jagged_attention
from gem_core.spec import KernelUnavailable, RequestError
from gem_core.testing import registry
from gem_kernels.common.hopper.fp8 import forward, launch, weights
from gem_kernels.common.schedule import RECORD
from gem_kernels.ops.gdpa.call import kernel_activation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [
    pytest.param([5, 130, 0, 7], [300, 7, 3, 0], id="odd and empty"),
    pytest.param([1], [1], id="one"),
    pytest.param([128, 256], [256, 128], id="whole tiles"),
    pytest.param([3, 3], [0, 0], id="no keys"),
]


def inputs(q_lengths, k_lengths, heads=2, kv_heads=2):
    sizes = ((sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads))
    return [plain.powers(*size, seed).to(DEVICE) for seed, size in enumerate(sizes)]


def poisoned(call):
    """The cast of a call in memory that was full of NaN."""
    with patch.object(torch, "empty", lambda *size, **how: torch.full(size, 0xFF, dtype=torch.uint8, device=DEVICE).view(how["dtype"])
                      if how.get("dtype") is torch.float8_e4m3fn else torch.full(size, 2**30, **{"dtype": torch.float32, **how})):  # fmt: skip
        return launch.cast(call)


def token_tiles(call, axis, x):
    """Tiles of ``x`` ``[tokens, heads, 128]`` that a cast must hold: ``(number, row, first, count, [heads, 128, 128])``, zeros after the row."""
    found = call.tiles(axis, 128)
    for number, record in enumerate(found.records[: int(found.count)].tolist()):
        record = dict(zip(RECORD, record, strict=True))
        count = max(0, min(128, record[f"{axis}_used"] - record["first"]))
        start = record[f"{axis}_start"] + record["first"]
        wanted = torch.zeros(x.shape[1], 128, 128, dtype=torch.float64, device=x.device)
        wanted[:, :count] = x[start : start + count].double().transpose(0, 1)
        yield number, record["row"], record["first"], count, wanted


@pytest.mark.parametrize(("q_lengths", "k_lengths"), ROWS)
@pytest.mark.parametrize("cut", [False, True])
def test_casts_hold_the_tokens_of_their_row_and_zeros_after_it(q_lengths, k_lengths, cut):
    q, k, v = inputs(q_lengths, k_lengths)
    limits = {"max_q": 129, "max_k": 140} if cut else {}
    call = plain.make_call(q, k, v, q_lengths, k_lengths, **limits)
    tiles = plain.Tiles(call, poisoned(call))
    for number, _, _, _, wanted in token_tiles(call, "q", q):
        assert torch.equal(tiles.q[number] * tiles.q_scales[number, :, None, None], wanted)
    for number, row, first, count, wanted in token_tiles(call, "k", k):
        if count:
            assert tiles.bases[row] == number + first // 128
            assert torch.equal(tiles.k[number] * tiles.k_scales[number, :, None, None], wanted)
    for number, row, _, count, wanted in token_tiles(call, "k", v):
        if count:
            assert torch.equal(tiles.v[number] * tiles.v_scales[number, :, None, None], wanted)
            assert bool((tiles.bounds[row] >= tiles.k_scales[number] * tiles.v_scales[number]).all())


def test_views_are_cast_as_their_copies_are():
    q, k, v = inputs([70, 60], [130, 20])
    fused = torch.cat((k, v), 2)
    views = plain.make_call(torch.cat((q, q), 1)[:, 2:], fused[..., :128], fused[..., 128:], [70, 60], [130, 20])
    one, other = launch.cast(views), launch.cast(plain.make_call(q, k, v, [70, 60], [130, 20]))
    for name, tiles in (("q", 2), ("k", 3), ("v", 3)):  # those after them hold nothing
        found = [getattr(low, name)[: tiles * 2 * 128].view(torch.uint8) for low in (one, other)]
        assert torch.equal(*found), name


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.floats(-25, 25), min_size=3, max_size=3),
    spread=st.floats(0, 8),
    activation=st.sampled_from(["gelu_bf16", "softmax"]),
)
def test_scales_are_powers_of_two_that_keep_elements_norms_and_weights_in_range(seed, sizes, spread, activation):
    """Whatever the sizes of tensors and tokens: queries and keys at most 128 long, values at most 128, products of scales at most the bound."""
    generator = torch.Generator().manual_seed(seed)
    wide = [2.0**size * torch.randn(200, 1, 128, generator=generator) * 2 ** (spread * torch.randn(200, 1, 1, generator=generator)) for size in sizes]
    call = plain.make_call(*(x.float().to(DEVICE) for x in wide), [150, 50], [70, 130], activation=activation)
    low = launch.cast(call)
    tiles, slots = plain.Tiles(call, low), [number for number, *_ in token_tiles(call, "k", call.k)]
    longer = 1 + 2**-3 if DEVICE == "cpu" else 1 + 2**-4  # the interpreter rounds a little further
    for kept, scales in ((tiles.q, tiles.q_scales), (tiles.k, tiles.k_scales)):
        norms = kept[: len(slots), 0].norm(dim=-1).amax(-1)
        assert bool((norms <= 128 * longer).all())
        assert bool((norms > 64 / longer).all()), "half of the range is not given away"
        assert bool((torch.frexp(scales[: len(slots)].float()).mantissa == 0.5).all())
    assert float(tiles.v[: len(slots)].abs().max()) <= 128
    for number, row, _, _, _ in token_tiles(call, "k", call.k):
        product = tiles.v_scales[number] * (tiles.k_scales[number] if activation == "gelu_bf16" else 1)
        assert float(product) <= float(tiles.bounds[row])
    assert 2 * (128 * (1 + 2**-4)) ** 2 * plain.HEADROOM <= 448
    assert plain.LIFT <= 448


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("which", ["k", "v"])
def test_case_G05_what_no_scale_fits_shows_in_its_row_and_head_alone(value, which):
    q, k, v = (x.float() for x in inputs([200, 130], [130, 140]))
    {"k": k, "v": v}[which][150, 1, 3] = value
    call = plain.make_call(q, k, v, [200, 130], [130, 140])
    bounds = launch.cast(call).bounds.view(-1, 2)[:2]
    assert bounds.isnan().tolist() == [[False, False], [False, True]]


def test_zeros_and_the_smallest_numbers_have_a_scale():
    call = plain.make_call(*(torch.full((5, 1, 128), size, device=DEVICE) for size in (0.0, 1e-38, 0.0)), [5], [5])
    low = launch.cast(call)
    assert (float(low.q_scales[0]), float(low.k_scales[0]), float(low.v_scales[0])) == (2.0**-56,) * 3
    assert float(low.bounds[0]) == 2.0**-112
    assert not low.q[:128].float().any()


def test_keys_lie_where_a_thread_finds_four_neighbours():
    """In an accumulator a thread of four has the columns 8 j + 2 t and 8 j + 2 t + 1; the next product wants four from 16 a + 4 t on."""
    column = torch.arange(128)
    token = torch.tensor([forward.token_of.fn(int(c)) for c in column])
    assert torch.equal(plain.PLACES[token], column)
    for t in range(4):
        mine = [8 * j + 2 * t + d for j in range(2) for d in range(2)]
        assert token[mine].tolist() == [4 * t, 4 * t + 1, 4 * t + 2, 4 * t + 3]


@pytest.mark.parametrize("scale", [128**-0.5, -0.05])
def test_what_the_kernels_compute_is_attention(scale):
    """The plain model that a GPU's results are held to, on inputs that the casts keep: it differs by the rounding of weights alone."""
    q_lengths, k_lengths = [5, 130], [300, 7]
    q, k, v = inputs(q_lengths, k_lengths, heads=4)
    where = (*(t.double() for t in (q, k, v)), plain.offsets(q_lengths, DEVICE), plain.offsets(k_lengths, DEVICE))
    limits = {"max_q": 130, "max_k": 300}
    call = plain.make_call(q, k, v, q_lengths, k_lengths, scale=scale)
    wanted = gdpa(*where, **limits, activation="gelu", scale=scale)
    assert float((plain.pointwise(call, launch.cast(call)) - wanted).norm() / wanted.norm()) < 0.03
    call.activation = "softmax"
    out, lse = plain.softmax(call, launch.cast(call))
    wanted, sums = jagged_attention(*where, **limits, scale=scale, return_lse=True)
    assert float((out - wanted).norm() / wanted.norm()) < 0.03
    torch.testing.assert_close(lse, sums)


@pytest.mark.parametrize("sharpness", [2.0**-3, -0.01, 1e-6, 1e6])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_weights_of_four_scores_are_the_activation(activation, sharpness):
    """The assembly that GPUs run, step by step: both gates, for scores of the largest sizes that casts allow, within the rounding to E4M3 and the
    error of a gate, and never a NaN."""
    code = {"gelu": weights.GELU_WORDS, "gelu_tanh": weights.GELU_TANH_WORDS, "silu": weights.SILU_WORDS}[activation].value
    scores = (
        torch.linspace(-(136**2), 136**2, 4001, dtype=torch.float64) if abs(sharpness) < 1e-2 else torch.linspace(-8, 8, 4001).double() / sharpness
    )
    factor = 2.0**-7
    for shift in range(4):  # every score in every place
        four = torch.stack([scores.roll(shift + i) for i in range(4)], 1)
        got = plain.run_words(code, four.float().numpy(), sharpness * (0.5 if activation == "silu" else 1), factor)
        x = four * sharpness
        wanted = 2 * ACTIVATIONS[activation](x) / sharpness * factor
        gate = {"gelu": 6e-3, "gelu_tanh": 6e-3, "silu": 2e-3}[activation] * 2 * factor / abs(sharpness)
        assert not bool(got.isnan().any())
        assert bool(((got - wanted).abs() <= 1.02 * 2**-4 * wanted.abs() + 2.0**-10 + gate).all()), float(((got - wanted).abs() - gate).max())


def test_a_nan_among_the_scores_stays_one():
    for code in (weights.GELU_WORDS, weights.SILU_WORDS):
        four = torch.full((1, 4), float("nan")).numpy()
        assert bool(plain.run_words(code.value, four, 1.0, 2.0**-7).isnan().all())


def test_case_C05_more_items_than_the_copy_engine_addresses_are_refused():
    call = plain.make_call(*inputs([3], [3]), [3], [3])
    with patch.object(launch, "MAX_ITEMS", 1), pytest.raises(RequestError, match="Split the batch"):
        launch.cast(call)


# ---- the kernel, compiled without a GPU ------------------------------------------------------------------------------------------------

COMPILE = """
import re, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels_offline import assembler
from gem_kernels.common.hopper.fp8 import forward

def report(kernel, activation):
    boxes = dict(q=("fp8e4nv", [64, 128]), k=("fp8e4nv", [128, 128]), v=("fp8e4nv", [128, 128]), o=("bf16", [1, 1, 64, 128]))
    words = dict(lse="*fp32", q_scales="*fp32", k_scales="*fp32", v_scales="*fp32", bounds="*fp32", records="*i32", bases="*i32", count="*i32",
                 scale="fp32", after="fp32")
    for name, (kind, shape) in boxes.items():
        layout = gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16 if kind == "bf16" else gl.float8e4nv)
        words[name + "_desc"] = f"tensordesc<{kind}{shape},{layout!r}>"
    fixed = dict(GROUP=1, STAGES=4, ACTIVATION=activation, SIGN=1) | ({} if activation == "softmax" else dict(lse=None))
    signature = {name: "constexpr" if name in fixed else words.get(name, "i32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4))
    ptx = compiled.asm["ptx"]
    said = assembler(ptx)
    products = ptx.count("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3")
    return products, "serialized" in said, int(re.search(r"(\\d+) bytes spill stores", said)[1]), compiled.metadata.shared <= 232448
"""


def compiled(code):
    done = offline(COMPILE + code)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_case_I03_both_products_are_fp8_and_nothing_waits_between_them():
    """Four products of two warpgroups, at the start, in the loop (two) and at the end, of four steps each. That weights stay in their threads, the
    kernel itself asserts."""
    said = compiled('print([report(forward.fp8_forward_kernel, name) for name in ("gelu_bf16", "silu_bf16", "softmax")])')
    assert said == str([(32, False, 0, True)] * 3)


@pytest.mark.slow
def test_weights_that_are_ready_for_the_product_make_products_wait():
    """The planted fault: without their exchanged halves, new weights take the registers that a product still reads."""
    fault = """
import pathlib
from gem_kernels.common.hopper.fp8 import weights
text = pathlib.Path(weights.__file__).read_text()
for old, new in (("{high, low}", "{low, high}"), ("prmt.b32 $0, $1, 0, 0x1032;", "mov.b32 $0, $1;")):
    assert old in text
    text = text.replace(old, new)
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "ready_weights.py").write_text(text)
    source = pathlib.Path(forward.__file__).read_text()
    pathlib.Path(folder, "ready_forward.py").write_text(source.replace("gem_kernels.common.hopper.fp8.weights", "ready_weights"))
    sys.path.insert(0, folder)
    from ready_forward import fp8_forward_kernel
    print(report(fp8_forward_kernel, "gelu_bf16")[1])
"""
    assert compiled(fault) == "True"


# ---- what is taken ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"window": 5}, "a window"),
        ({"causal": True}, "a mask"),
        ({"bias": torch.zeros(1)}, "a bias"),
        ({"q_offsets": None}, "a query that rows share"),
        ({"activation": "relu"}, "no activation 'relu'"),
        ({"q": torch.zeros(3, 2, 64)}, "heads are 64 wide"),
        ({"v": torch.zeros(3, 2, 64)}, "heads are 64 wide"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_the_kernel_does_not_take_is_refused_before_any_work(change, reason):
    x = torch.zeros(3, 2, 128, device=DEVICE)
    call = plain.make_call(x, x, x, [3], [3])
    for name, value in change.items():
        setattr(call, name, value)
    with patch.object(launch, "cast", side_effect=AssertionError), pytest.raises(KernelUnavailable, match=reason):
        launch.forward(call, torch.empty_like(x))


def test_a_call_that_fits_has_no_reason_against_it():
    x = torch.zeros(3, 2, 128)
    call = plain.make_call(x, x, x, [3], [3])
    assert launch.why_not(call) == ["its gradients are of bfloat16, this is torch.float32"]
    call.q = x.bfloat16()
    assert launch.why_not(call) == []


@pytest.mark.parametrize("op", ["gdpa", "jagged_attention"])
def test_what_is_declared_is_what_the_kernel_takes(op):
    (found,) = [o.impl for o in registry().of(op) if o.impl.backend == "gluon_fp8"]
    assert (found.min_arch, found.max_arch, found.dtypes, found.head_dims) == (90, 90, ("bf16",), (launch.DIM,))
    assert not {"window", "causal", "bias", "broadcast_q"} & set(found.features)
    known = [word for word in registry().op(op).features if word.startswith("act_")]
    taken = [word for word in known if kernel_activation(word.removeprefix("act_"), torch.bfloat16) in launch.ACTIVATIONS]
    assert [word for word in found.features if word.startswith("act_")] == taken
