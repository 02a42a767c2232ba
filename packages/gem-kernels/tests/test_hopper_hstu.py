"""The Hopper kernels of hstu_attention compile without a GPU and keep their products in flight; how they are launched."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_offline import offline

from gem_core.spec import RequestError
from gem_kernels.common.schedule import programs
from gem_kernels.ops.hstu_attention import hopper, launch

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this looks at launches, on a CPU")
COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels_offline import assembler
from gem_kernels.ops.hstu_attention.hopper_forward import forward_kernel
from gem_kernels.ops.hstu_attention.hopper_key_grad import key_grad_kernel
from gem_kernels.ops.hstu_attention.hopper_query_grad import query_grad_kernel
from gem_kernels.ops.hstu_attention.hopper_slopes import query_product_kernel
from gem_kernels.ops.norm_linear.hopper import norm_linear_kernel
from gem_kernels.ops.norm_linear.hopper_grad import norm_linear_grad_kernel

def ragged(rows):
    return [1, 1, rows, 128]

WORDS = dict(records="*i32", count="*i32", scale="fp32", factor="fp32", norm="fp32", eps="fp32", r="*fp32", factors="*fp32", dweight="*fp32",
             dcolumns="*fp32", sums="*fp32", bias="*bf16", gamma="*bf16", beta="*bf16", slopes="*bf16", dq="*bf16")
ATTENTION = dict(D=128, V=128, ACTIVATION="silu_bf16", WINDOW=False)
MATRIX = dict(WIDTH=256, INNER=256, ROWS=64, BLOCK=256)
CASES = {
    "forward": (forward_kernel, dict(q=ragged(64), k=ragged(128), v=ragged(128), o=ragged(64)),
                ATTENTION | dict(BLOCK_M=128, BLOCK_N=128, STAGES=2), "CAUSAL", 4),
    "query_grad": (query_grad_kernel, {n: ragged(64) for n in ("q", "do", "k", "v", "dq")},
                   ATTENTION | dict(BLOCK_M=128, BLOCK_N=64, STAGES=3, long=None), "CAUSAL", 4),
    "query_grad_short": (query_grad_kernel, {n: ragged(64) for n in ("q", "do", "k", "v", "dq")},
                         ATTENTION | dict(BLOCK_M=128, BLOCK_N=64, STAGES=3), "CAUSAL", 4),
    "key_grad": (key_grad_kernel, {n: ragged(64) for n in ("q", "do", "k", "v", "dk", "dv")},
                 ATTENTION | dict(BLOCK_M=64, BLOCK_N=128, STAGES=3, slopes=None, long=None), "CAUSAL", 4),
    "key_grad_kept": (key_grad_kernel, {n: ragged(64) for n in ("q", "do", "k", "v", "dk", "dv")},
                      ATTENTION | dict(BLOCK_M=64, BLOCK_N=128, STAGES=3), "CAUSAL", 4),
    "query_product": (query_product_kernel, dict(slopes=[1, 1, 64, 64], k=ragged(64)), dict(D=128, BLOCK_M=128, STAGES=6), None, 4),
    "norm_linear": (norm_linear_kernel, dict(x=[64, 256], weight=[256, 256], out=[64, 256]),
                    MATRIX | dict(LAYER=True, WIDE=256, STAGES=3), "BEFORE", 4),
    "norm_linear_grad": (norm_linear_grad_kernel, dict(dout=[64, 256], other=[64, 256], x=[64, 128], weight=[256, 128], dx=[64, 128]),
                         MATRIX | dict(HALF=128, STAGES=2), "BEFORE", 8),
}

def report(name, flag):
    kernel, blocks, fixed, word, warps = CASES[name]
    layouts = {n: gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16) for n, shape in blocks.items()}
    words = {**WORDS, **{n + "_desc": f"tensordesc<bf16{shape},{layouts[n]!r}>" for n, shape in blocks.items()}}
    fixed = fixed | {word: flag} if word else fixed
    signature = {n: "constexpr" if n in fixed else words.get(n, "i32") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
    compiled = triton.compile(GluonASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
    ptx = compiled.asm["ptx"]
    said = assembler(ptx)
    return "wgmma.mma_async" in ptx, "serialized" not in said, compiled.metadata.shared <= 232448

if __name__ == "__main__":
    for flag in (True, False) if sys.argv[1].startswith("norm") else (True,):
        print(sys.argv[1], flag, *report(sys.argv[1], flag))
"""


HSTU = ["forward", "query_grad", "query_grad_short", "key_grad", "key_grad_kept", "query_product"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*HSTU, "norm_linear", "norm_linear_grad"])
def test_case_I03_the_kernels_compile_for_hopper_and_nothing_waits_between_products(name):
    """The assembler says where it makes products wait for each other, as it does when a kernel writes registers of one too late, or stores those of
    an operand."""
    done = offline(COMPILE, name)
    flags = (True, False) if name.startswith("norm") else (True,)
    assert done.stdout.split("\n")[:-1] == [f"{name} {flag} True True True" for flag in flags], done.stderr[-2000:]


FAULT = """
source = COMPILE.replace('if __name__ == "__main__":', "if False:")
import pathlib, tempfile
from gem_kernels.ops.hstu_attention import hopper_forward
text = pathlib.Path(hopper_forward.__file__).read_text()
late = "s = gl.where(columns[None, :] <= (lanes + M)[:, None], s, 0.0)\\n                p = activate_scaled(s, scale, ACTIVATION)"
assert late in text
hidden = "gl.where(columns[None, :] <= (lanes + M)[:, None], activate_scaled(s, scale, ACTIVATION), 0.0)"
text = text.replace(late, "s = s + 0.0\\n                p = " + hidden)
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "late_forward.py").write_text(text)
    sys.path.insert(0, folder)
    exec(source)
    from late_forward import forward_kernel
    CASES["forward"] = (forward_kernel, *CASES["forward"][1:])
    print(report("forward", True))
"""


@pytest.mark.slow
def test_a_selection_among_the_products_is_noticed():
    """The planted fault: weights are hidden instead of scores."""
    done = offline(f"import sys\nCOMPILE = {COMPILE!r}\n{FAULT}")
    assert done.stdout.strip() == "(True, False, True)", done.stderr[-2000:]


# ---- launches -------------------------------------------------------------------------------------------------------------------------


class Recorded:
    """A kernel that remembers how it was launched."""

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda **arguments: self.calls.append((grid, arguments))


@pytest.fixture
def recorded():
    names = ("forward_kernel", "query_grad_kernel", "key_grad_kernel", "query_product_kernel")
    kernels = {name: Recorded() for name in names}
    with patch.multiple(hopper, **kernels), patch.object(torch.cuda, "current_device", lambda: None):
        yield SimpleNamespace(**{name.removesuffix("_kernel"): kernel.calls for name, kernel in kernels.items()})


def memory(call):
    return [torch.empty_like(t) for t in (call.q, call.k, call.v)]


def inputs(lengths=(300, 0, 65), heads=2, dim=64, v_dim=64, **options):
    offsets = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    q, k, v = (torch.zeros(sum(lengths), heads, width, dtype=torch.bfloat16) for width in (dim, dim, v_dim))
    given = {"scale": 0.5, "norm": 0.25, "causal": True, "window": None, **options}
    call = launch._Inputs(q, k, v, offsets, None, None, None, max(lengths), hopper=True, **given)
    return call, torch.empty(sum(lengths), heads, v_dim, dtype=torch.bfloat16)


@ON_CPU
def test_one_list_of_tiles_serves_all_passes(recorded):
    call, out = inputs()
    hopper.forward(call, out)
    hopper.grad(call, out, *memory(call))
    launches = [calls[0] for calls in (recorded.forward, recorded.query_grad, recorded.key_grad)]
    assert len({arguments["records"].data_ptr() for _, arguments in launches}) == 1
    for grid, arguments in launches:
        assert int(arguments["count"]) == 3 + 1, "tiles of 128 tokens of the two rows that have some"
        assert grid == (programs(arguments["records"].shape[0] * 2, 1, out.device, persistent=True),)


@ON_CPU
def test_factors_go_where_they_belong(recorded):
    call, out = inputs(window=7)
    hopper.forward(call, out)
    hopper.grad(call, out, *memory(call))
    (_, forward), (_, query_grad), (_, key_grad) = (calls[0] for calls in (recorded.forward, recorded.query_grad, recorded.key_grad))
    assert (forward["scale"], forward["norm"]) == (0.5, 0.25)
    assert (query_grad["scale"], query_grad["factor"]) == (0.5, 0.125)
    assert (key_grad["factor"], key_grad["norm"]) == (0.125, 0.25)
    assert (key_grad["WINDOW"], key_grad["window"], key_grad["CAUSAL"]) == (True, 7, True)
    assert {arguments["ACTIVATION"] for arguments in (forward, query_grad, key_grad)} == {"silu_bf16"}


@ON_CPU
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (128, 128), (64, 128)])
def test_blocks_line_up_with_tiles_and_fit_into_shared_memory(recorded, dim, v_dim):
    """Masks are the same for every tile because blocks end where tiles, or their halves, do."""
    call, out = inputs(dim=dim, v_dim=v_dim)
    hopper.forward(call, out)
    hopper.grad(call, out, *memory(call))
    (_, forward), (_, query_grad), (_, key_grad) = (calls[0] for calls in (recorded.forward, recorded.query_grad, recorded.key_grad))
    assert forward["BLOCK_M"] == forward["BLOCK_N"] == 128
    assert query_grad["BLOCK_M"] == 2 * query_grad["BLOCK_N"] == 128
    assert key_grad["BLOCK_N"] == 2 * key_grad["BLOCK_M"] == 128
    for arguments, block in ((forward, "BLOCK_N"), (query_grad, "BLOCK_N"), (key_grad, "BLOCK_M")):
        streamed = arguments["STAGES"] * arguments[block] * (dim + v_dim)
        kept = 256 * dim + (256 * v_dim if arguments is key_grad or v_dim != dim else 0)
        assert 2 * (streamed + kept) <= 227 * 1024
        assert arguments["q_desc"].block_shape[2] == 64


@ON_CPU
def test_kept_slopes_take_the_place_of_the_pass_over_queries_for_long_rows(recorded):
    call, out = inputs(lengths=(300, 0, 65), heads=2, dim=64)
    dq, dk, dv = memory(call)
    with patch.object(hopper, "LONG", 300):
        hopper.grad(call, out, dq, dk, dv)
    ((_, query_grad),), ((_, key_grad),), ((_, product),) = recorded.query_grad, recorded.key_grad, recorded.query_product
    assert query_grad["long"] == key_grad["long"] == product["long"] == 300
    assert query_grad["dq_desc"].base is dq
    assert (key_grad["longest"], key_grad["squares"]) == (5, (5 + 3) * 6 // 2)
    assert key_grad["slopes"].shape == (24 * 2 * 64, 1, 64)
    assert product["slopes_desc"].base is key_grad["slopes"]
    assert (product["dq"].data_ptr(), product["dq_token"], product["k_head"]) == (dq.data_ptr(), 128, 64)
    assert 2 * product["STAGES"] * 64 * (128 + 128) <= 227 * 1024


@ON_CPU
@pytest.mark.parametrize("why", ["short", "window", "full", "too many"])
def test_slopes_are_kept_of_long_plain_causal_rows_up_to_a_size(why, recorded):
    call, out = inputs(**{"window": {"window": 7}, "full": {"causal": False}}.get(why, {}))
    sizes = {"LONG": 300 + (why == "short"), "MAX_KEPT": 24 * 2 * 8192 - (why == "too many")}
    with patch.multiple(hopper, **sizes):
        hopper.grad(call, out, *memory(call))
    assert not recorded.query_product
    assert len(recorded.query_grad) == len(recorded.key_grad) == 1
    assert recorded.key_grad[0][1]["slopes"] is None
    assert recorded.query_grad[0][1]["long"] is None


@ON_CPU
def test_case_C05_more_items_than_the_kernels_count_are_refused(recorded):
    call, out = inputs()
    with patch.object(hopper, "MAX_ITEMS", 1), pytest.raises(RequestError, match="Split the batch"):
        hopper.forward(call, out)
    assert not recorded.forward


@ON_CPU
def test_a_value_width_that_no_kernel_has_is_padded():
    seen = []

    def attend(q, k, v, offsets, **options):
        seen.append((v.shape[-1], options["hopper"]))
        return v * 2

    q, v = torch.randn(3, 2, 64), torch.randn(3, 2, 20)
    with patch.object(launch, "hstu_attention", attend):
        out = launch.gluon(q, q, v, torch.tensor([0, 3]), max_length=3)
        launch.gluon(q, q, q, torch.tensor([0, 3]), max_length=3)
    assert torch.equal(out, v * 2)
    assert out.is_contiguous()
    assert seen == [(32, True), (64, True)]
