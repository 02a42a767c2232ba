"""The kernel of all gradients of ``pooled_attention`` on Hopper: emulated against float64 on a CPU, compiled without a GPU, launched."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from gem_kernels_emulated import Blocks, Late, Pointer, emulate
from gem_kernels_offline import offline
from gem_kernels_portable import compare, draw
from torch._subclasses.fake_tensor import FakeTensorMode

from gem_core.ops.pooled_attention import reference
from gem_core.spec import RequestError
from gem_kernels.common.compiled import Block
from gem_kernels.common.hopper import language
from gem_kernels.common.schedule import programs
from gem_kernels.ops.jagged_attention import call as jagged_call
from gem_kernels.ops.pooled_attention import hopper, hopper_grad, hopper_launch, launch

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this looks at launches, on a CPU")
DIM = 64


def memory(x):
    """All elements of the storage of ``x`` from its first one on."""
    return x.as_strided((x.untyped_storage().size() // x.element_size() - x.storage_offset(),), (1,))


class Call:
    """Random operands, what forward leaves of them, and the gradients of the reference, all float64 inside."""

    def __init__(self, lengths, seeds, *, heads=2, dim=DIM, max_k=None, spare=0, low=False):
        draw = torch.Generator().manual_seed(7)
        tokens = sum(lengths) + spare
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.max_k = max(lengths) if max_k is None else max_k
        shapes = {"q": (len(lengths), seeds, heads, dim), "dout": (len(lengths), seeds, heads, dim)}
        shapes |= {"k": (tokens, heads, dim), "v": (tokens, heads, dim)}
        for name, shape in shapes.items():
            setattr(self, name, torch.randn(shape, generator=draw).half())
        if low:  # every score is about -150
            self.q, self.k = self.q.abs() + 2, -self.k.abs() - 2
        leaves = [x.double().requires_grad_() for x in (self.q, self.k, self.v)]
        self.out = reference(*leaves, self.offsets, max_k=self.max_k, scale=0.5)
        self.expected = torch.autograd.grad(self.out, leaves, self.dout.double())
        self.out = self.out.detach()

    def inputs(self):
        return launch.Inputs(self.q, self.k, self.v, self.offsets, self.max_k, 0.5)

    def statistics(self):
        """The output as it is kept, and base-2 logarithms as a view of ``[heads, rows, seeds]``."""
        lse = torch.full((self.q.shape[2], *self.q.shape[:2]), torch.inf)
        for row, (start, end) in enumerate(zip(self.offsets, self.offsets[1:], strict=False)):
            k = self.k[start : min(int(end), int(start) + self.max_k)].double()
            if len(k):
                s = torch.einsum("shd,khd->hsk", self.q[row].double(), k) * 0.5
                lse[:, row] = (s.logsumexp(-1) / torch.tensor(2.0).log()).float()
        return self.out.half(), lse.permute(1, 2, 0)

    def found(self, programs, packed, late, module):
        """Gradients by the emulated kernel; memory that no tile covers would stay NaN."""
        beside = torch.full((len(self.k), 3, *self.k.shape[1:]), torch.nan, dtype=torch.float16)
        dk, dv = (beside[:, part] if packed else torch.full_like(self.k, torch.nan).contiguous() for part in (1, 2))

        def run(kernel, grid, device, arguments):
            arguments = {name: value for name, value in arguments.items() if name not in ("num_warps", "maxnreg")}
            arguments["dq"].fill_(torch.nan)
            given = {name: Pointer(memory(x)) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
            blocks = {name: Blocks(x[0], list(x[1].block)) for name, x in arguments.items() if isinstance(x, Block)}
            emulate(module.grad_kernel, [module, language], programs, Late().names if late else {}, **given | blocks)

        with patch.object(hopper_launch, "launcher", SimpleNamespace(launch=run)):
            return hopper_launch.grad(self.inputs(), self.dout, *self.statistics(), dk, dv), dk, dv

    def check(self, programs=2, packed=False, late=False, module=hopper_grad):
        for name, found, expected in zip(("seeds", "k", "v"), self.found(programs, packed, late, module), self.expected, strict=True):
            error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-3)
            assert error < 5e-3, (name, float(error))


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from gem_kernels_offline import assembler
from gem_kernels.ops.pooled_attention.hopper_grad import grad_kernel as kernel

WORDS = dict(lse="*fp32", records="*i32", count="*i32", scale="fp32", factor="fp32", dq="*bf16", dk="*bf16", dv="*bf16")

def described(rows):
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, 128], gl.bfloat16)
    return f"tensordesc<bf16[1, 1, {rows}, 128],{layout!r}>"

for groups in (1, 2):
    halves = ("k_desc", "v_desc", "dq_desc", "dk_desc", "dv_desc", "o_half", "do_half")
    rows = dict.fromkeys(halves, 64) | dict.fromkeys(("q_desc", "do_desc"), 64 * groups)
    fixed = dict(D=128, GROUPS=groups, STAGES=2)
    words = WORDS | {n: described(size) for n, size in rows.items()} | dict.fromkeys(fixed, "constexpr")
    signature = {n: words.get(n, "i32") for n in kernel.arg_names}
    constants = {(kernel.arg_names.index(n),): value for n, value in fixed.items()}
    options = dict(num_warps=4, **(dict(maxnreg=128) if groups == 1 else {}))
    compiled = triton.compile(GluonASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)
    ptx = compiled.asm["ptx"]
    said = assembler(ptx)
    fits = (3 - groups) * (compiled.metadata.shared + 1024) <= 233472
    print(groups, "wgmma.mma_async" in ptx, "serialized" not in said, fits)
"""


@pytest.mark.slow
def test_case_I03_the_kernel_compiles_for_hopper_and_nothing_waits_between_products():
    """Two programs of one warpgroup share an SM's memory."""
    done = offline(COMPILE)
    assert done.stdout.split("\n")[:-1] == ["1 True True True", "2 True True True"], done.stderr[-2000:]


@ON_CPU
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seeds", [33, 64, 65, 128])
def test_gradients_of_short_long_and_empty_rows(seeds, late):
    Call([70, 0, 1, 300, 64, 0, 128], seeds).check(late=late)


FAULTS = {
    "not hidden": ('gl.where((keys < used)[:, None], s, float("-inf"))', "s"),
    "overwritten": ("    tma.store_wait(0)\n    buffer.reshape([HALF, D]).store(dk_acc", "    buffer.reshape([HALF, D]).store(dk_acc"),
}


@ON_CPU
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault, tmp_path):
    """Weights past the end of a row, and a gradient in the memory of one that has not left yet."""
    text, (right, wrong) = Path(hopper_grad.__file__).read_text(), FAULTS[fault]
    assert right in text
    tmp_path.joinpath("planted.py").write_text(text.replace(right, wrong))
    spec = spec_from_file_location("planted", tmp_path / "planted.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError, match=r"seeds|'k'|'v'"):
        Call([70, 0, 130], 64, low=fault == "not hidden").check(late=True, module=module)


@ON_CPU
@pytest.mark.parametrize("seeds", [64, 128])
def test_keys_past_the_maximum_and_after_the_last_row_get_zeros(seeds):
    call = Call([140, 0, 9, 0], seeds, max_k=100, spare=30)
    assert not call.expected[1][100:140].any()
    call.check()


@ON_CPU
@pytest.mark.parametrize("seeds", [64, 128])
def test_scores_far_below_zero_leave_nothing_of_what_lies_past_the_end_of_a_row(seeds):
    """There a score is zero, whose weight would overflow."""
    call = Call([70, 150], seeds, low=True)
    assert call.statistics()[1].max() < -130
    call.check()


@ON_CPU
def test_the_gradients_of_memory_beside_that_of_others_and_of_parts_of_one_tensor():
    call = Call([70, 0, 130], 64)
    together = torch.stack((call.k, call.v), 1)
    call.k, call.v = together[:, 0], together[:, 1]
    call.check(packed=True)


@ON_CPU
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("seeds", [64, 128])
def test_programs_fill_an_sm_and_no_more(seeds, dim):
    call, calls = Call([70, 0, 130], seeds, dim=dim), []
    with patch.object(hopper_launch, "launcher", SimpleNamespace(launch=lambda *given: calls.append(given))):
        hopper_launch.grad(call.inputs(), call.dout, *call.statistics(), torch.empty_like(call.k), torch.empty_like(call.v))
    ((kernel, grid, device, arguments),) = calls
    resident = 2 if seeds == 64 else 1
    assert kernel is hopper_grad.grad_kernel
    assert grid == programs(3 * 2, resident, device, persistent=True)
    assert int(arguments["count"]) == 3, "rows, the empty one too: its seeds get a gradient"
    assert (arguments["GROUPS"], arguments.get("maxnreg")) == ((1, 128) if seeds == 64 else (2, None))
    size = 64 * arguments["GROUPS"]
    held = 2 * size * dim + arguments["STAGES"] * 2 * size * dim + size * size
    assert resident * (2 * held + 3 * 4 * size + 1024) <= 227 * 1024


@ON_CPU
def test_case_C05_more_items_than_the_kernel_counts_are_refused():
    call = Call([3], 64)
    with patch.object(hopper_launch, "MAX_ITEMS", 1), pytest.raises(RequestError, match="Split the batch"):
        hopper_launch.grad(call.inputs(), call.dout, *call.statistics(), torch.empty_like(call.k), torch.empty_like(call.v))


@pytest.mark.parametrize(
    ("seeds", "heads", "dims", "per_row", "taken"),
    [
        (33, (2, 2), (64, 64), True, True),
        (128, (2, 2), (128, 128), True, True),
        (32, (2, 2), (64, 64), True, False),
        (129, (2, 2), (64, 64), True, False),
        (64, (2, 2), (64, 64), False, False),
        (64, (2, 1), (64, 64), True, False),
        (64, (2, 2), (64, 128), True, False),
        (64, (2, 2), (32, 32), True, False),
    ],
)
def test_which_calls_have_one_kernel_for_all_gradients(seeds, heads, dims, per_row, taken):
    q = torch.empty(*((3,) if per_row else ()), seeds, heads[0], dims[0])
    k, v = (torch.empty(5, heads[1], dim) for dim in dims)
    assert hopper.one_pass(q, k, v) is taken


@ON_CPU
@pytest.mark.parametrize("compiled", [False, True])
def test_calls_reach_the_kernel_with_what_forward_left(compiled, monkeypatch):
    """The portable kernels stand in the place of those for Hopper, forward and backward."""
    seen = []

    def grad(inputs, dout, out, lse, dk, dv):
        seen.append((tuple(lse.shape), lse.stride()))
        return launch._gradients(dout, out, lse, inputs, False, dk, dv)[0]

    monkeypatch.setattr(hopper, "Call", lambda **given: jagged_call.Call(**given | {"backend": "triton"}))
    monkeypatch.setattr(hopper_launch, "grad", grad)
    seeds = torch.randn(3, 33, 2, 64, requires_grad=True)
    work = draw("pooled_attention", (3, 0, 5), dim=64, seeds=seeds)
    compare(work, torch.compile(hopper.gluon, backend="aot_eager", fullgraph=True) if compiled else hopper.gluon)
    assert seen == [((3, 33, 2), (33, 1, 99))]


@ON_CPU
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("longest", [0, 5])
def test_a_compiler_is_told_the_layout_of_the_logarithms(wanted, longest, monkeypatch):
    monkeypatch.setattr(hopper, "Call", lambda **given: jagged_call.Call(**given | {"backend": "triton"}))
    q, kv, offsets = torch.randn(3, 33, 2, 64), torch.randn(8, 2, 64), torch.tensor([0, 3, 3, 8])
    real = launch._forward(q, kv, kv, offsets, longest, 0.5, wanted)
    with FakeTensorMode() as mode:
        fake = launch._forward(*(mode.from_tensor(x) for x in (q, kv, kv, offsets)), longest, 0.5, wanted)
    assert [(x.shape, x.stride()) for x in fake] == [(x.shape, x.stride()) for x in real]
