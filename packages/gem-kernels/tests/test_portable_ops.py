"""The portable kernels beside gdpa and jagged_attention, beyond the conformance suite: half precision, limits, registration, FLOPs, refusals."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import OPS, compare, draw, kernel_of, offsets_of, results
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

from gem_core import ops as public
from gem_core.ops.jagged_attention import reference as attend
from gem_core.ops.pooled_attention import reference as pool
from gem_core.spec import KernelRequest, KernelUnavailable, MachineError, load_object
from gem_core.testing import assert_close, poisoned_memory

pytest.importorskip("triton")

from gem_kernels.ops import host, limits
from gem_kernels.ops.pooled_attention import hopper
from gem_kernels.plugin import gem_kernel_impls

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter; tests/gpu has the CUDA ones")
COMPUTING = [op for op in OPS if op not in ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad")]
ROWED = ("block_attention", "hstu_attention", "pooled_attention", "pffn", "jagged_dense_bmm_add")
"""Ops with a longest row."""


@pytest.mark.parametrize("op", OPS)
def test_float16(op):
    compare(draw(op, dtype=torch.float16))


@pytest.mark.parametrize("op", OPS)
def test_only_the_gradients_that_are_wanted_are_asked_for(op):
    work = draw(op)
    leaf = work.leaves()[0]
    others = {id(t): t.detach() for t in work.leaves()[1:]}
    arguments = {name: others.get(id(value), value) for name, value in work.arguments.items()}
    out = type(work)(op, arguments, 0, 0.0).call(kernel_of(op))
    (gradient,) = torch.autograd.grad(next(t for t in ([out] if isinstance(out, torch.Tensor) else out) if t.requires_grad).sum(), [leaf])
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("norm_linear", "add_norm")])  # whose columns' gradients are added by program
def test_case_C09_I11_tiles_beyond_the_grid_limit_are_strided_over(op):
    work = draw(op, (70, 0, 3), heads=1)
    full = results(kernel_of(op), work)
    with patch.object(host, "MAX_GRID", 3):
        capped = results(kernel_of(op), work)
    assert all(torch.equal(a, b) for a, b in zip(full, capped, strict=True))


@pytest.mark.parametrize("op", ROWED)
def test_case_B08_rows_beyond_the_maximum_are_zero_not_garbage(op):
    """Only reachable past the public check, which refuses it on a CPU; on a GPU it is how such rows are cut."""
    name = {"pooled_attention": "max_k", "pffn": "max_q"}.get(op, "max_length")
    work = draw(op, (3, 70, 2), heads=1, **{name: 40})
    with poisoned_memory():
        cut = results(kernel_of(op), work)
    assert all(torch.isfinite(t).all() for t in cut)
    packed = [t for t in cut if t.shape[0] == 75]
    assert len(packed) >= 2
    assert not any(t[43:73].any() for t in packed)
    compare(work)


@pytest.mark.parametrize("op", ROWED)
def test_tokens_outside_every_row_are_zero(op):
    work = draw(op, (3, 6), heads=1)
    name = {"pooled_attention": "k_offsets", "pffn": "q_offsets"}.get(op, "offsets")
    short = type(work)(op, {**work.arguments, name: offsets_of([3, 2])}, 0, 0.0)
    with poisoned_memory():
        found = [t for t in results(kernel_of(op), short) if t.shape[0] == 9]
    assert found
    assert not any(t[5:].any() for t in found)


@pytest.mark.parametrize("op", ["block_attention", "hstu_attention"])
def test_views_of_a_fused_buffer_are_read_in_place(op):
    offsets = offsets_of([4, 0, 35])
    q, k, v = torch.randn(39, 2, 48, requires_grad=True).split(16, dim=-1)
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("a view was copied")):
        out = kernel_of(op)(q, k, v, offsets, max_length=35)
    assert_close(out, getattr(public, op)(q, k, v, offsets, max_length=35, backend="reference"), bound=1e-6)


@pytest.mark.parametrize("op", ["block_attention", "hstu_attention"])
def test_a_view_with_a_strided_last_axis_is_copied_and_right(op):
    work = draw(op, heads=4)
    flipped = {n: t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for n, t in work.arguments.items() if n in ("q", "k", "v")}
    compare(type(work)(op, {**work.arguments, **flipped}, 0, 0.0))


def test_case_C08_a_token_stride_whose_tile_offsets_leave_32_bits_is_copied():
    wide, near = (torch.empty_strided((3, 2, 16), (stride, 16, 1), device="meta") for stride in (2**24, 2**24 - 1))
    with patch.object(torch.Tensor, "contiguous", lambda self: "copy"):
        assert host.readable(wide) == ["copy"]
        assert host.readable(near)[0] is near


# ---- what is refused ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", COMPUTING)
def test_bf16_is_refused_under_the_interpreter(op):
    with pytest.raises(KernelUnavailable, match="interpreter computes bf16 products wrongly"):
        draw(op, dtype=torch.bfloat16).call(kernel_of(op))
    request = KernelRequest(op=op, device="interpreter", dtype="bf16", head_dim=16)
    assert "bf16" in limits.check(request)[0]
    assert limits.check(KernelRequest(op=op, device="cuda", dtype="bf16", head_dim=16)) == []


@pytest.mark.parametrize("op", COMPUTING)
def test_mixed_and_unknown_dtypes_are_refused(op):
    work = draw(op)
    with pytest.raises(KernelUnavailable, match="float64"):
        work.cast(torch.float64).call(kernel_of(op))
    first, second = [name for name, value in work.arguments.items() if isinstance(value, torch.Tensor) and value.requires_grad][:2]
    mixed = type(work)(op, {**work.arguments, second: work.arguments[second].detach().half()}, 0, 0.0)
    with pytest.raises(KernelUnavailable, match="same dtype"):
        mixed.call(kernel_of(op))
    assert first != second


@pytest.mark.parametrize(("op", "limit"), [("block_attention", 128), ("hstu_attention", 256), ("pooled_attention", 256), ("pffn", 256)])
def test_head_sizes_beyond_the_limit_are_refused(op, limit):
    check = {"block_attention": limits.check_block_attention, "pffn": limits.check_pffn}.get(op, limits.check_attention)
    assert f"head size {limit + 1} is above {limit}" in check(KernelRequest(op=op, device="cuda", dtype="bf16", head_dim=limit + 1))
    assert check(KernelRequest(op=op, device="cuda", dtype="bf16", head_dim=limit)) == []
    with pytest.raises(KernelUnavailable, match=f"head size {limit + 1}"):
        draw(op, (3,), dim=limit + 1).call(kernel_of(op))


@pytest.mark.parametrize(("op", "backend"), [("jagged_attention", "gluon_fp8"), ("gdpa", "gluon_fp8")])
def test_what_no_gpu_has_shown_faster_is_taken_on_one_only_where_it_is_asked_for(op, backend, monkeypatch):
    (impl,) = [impl for impl in gem_kernel_impls() if impl.op == op and impl.backend == backend]
    check, request = load_object(impl.check), KernelRequest(op=op, device="cuda", dtype="bf16", arch=90, head_dim=128)
    monkeypatch.delenv(limits.UNMEASURED, raising=False)
    assert check(request) == ["no GPU has shown it right and faster yet; GEM_UNMEASURED=1 takes it all the same"]
    assert check(replace(request, device="interpreter", dtype="fp16")) == []
    monkeypatch.setenv(limits.UNMEASURED, "1")
    assert check(request) == []


@pytest.mark.parametrize("op", ["add_norm", "gated_residual"])
def test_passes_over_rows_wait_for_nothing(op, monkeypatch):
    monkeypatch.delenv(limits.UNMEASURED, raising=False)
    (impl,) = [impl for impl in gem_kernel_impls() if impl.op == op and impl.backend == "triton"]
    assert load_object(impl.check)(KernelRequest(op=op, device="cuda", dtype="bf16", arch=90)) == []


def test_pffn_waits_for_nothing(monkeypatch):
    monkeypatch.delenv(limits.UNMEASURED, raising=False)
    for dtype, word, width in (("bf16", "act_gelu", 256), ("fp16", "act_gelu_fast", 256), ("bf16", "act_gelu_fast", 128)):
        assert limits.check_pffn(KernelRequest(op="pffn", device="cuda", dtype=dtype, head_dim=width, features=frozenset({word}))) == []


def test_halves_of_queries_leave_room_for_heads_half_as_wide():
    for width, reasons in ((128, []), (129, ["head size 129 is above 128"])):
        request = KernelRequest(op="pffn", device="cuda", dtype="bf16", head_dim=width, features=frozenset({"act_gelu_fast"}))
        assert limits.check_pffn(request) == reasons


@pytest.mark.parametrize(("dtype", "block", "most"), [(torch.float16, 129, 128), (torch.float32, 65, 64)])
def test_blocks_beyond_the_limit_are_refused(dtype, block, most):
    with pytest.raises(KernelUnavailable, match=f"a block of {block} is above {most}"):
        draw("block_attention", dtype=dtype, block=block).call(kernel_of("block_attention"))


def test_rows_beyond_the_limit_of_the_norms_are_refused():
    x = torch.zeros(1, limits.MAX_NORM_WIDTH + 1)
    with pytest.raises(KernelUnavailable, match="rows of 8193 are above 8192"):
        kernel_of("norm_linear")(x, torch.zeros(1, x.shape[1]))
    with pytest.raises(KernelUnavailable, match="rows of 8193 are above 8192"):
        kernel_of("add_norm")(x)
    with pytest.raises(KernelUnavailable, match="tokens of 8208 are above 8192"):
        kernel_of("pffn")(torch.zeros(1, 513, 16), *(torch.zeros(1, 1, 513, 16) for _ in range(2)), offsets_of([1]), max_q=1)


@pytest.mark.parametrize("op", OPS)
def test_cpu_tensors_without_the_interpreter_are_refused(op):
    with patch.object(host, "interpreted", lambda: False), pytest.raises(MachineError, match="lie on cpu"):
        draw(op).call(kernel_of(op))


# ---- registration ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    """Each custom op that a call goes through, with the arguments it gets."""
    calls = []
    work = draw(op, (4, 7), heads=1)

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "gem_kernels":
                calls.append((func, args))
            return func(*args, **(kwargs or {}))

    with Spy():
        results(kernel_of(op), work)
    assert calls
    for func, args in {func: (func, args) for func, args in calls}.values():
        opcheck(func, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", OPS)
def test_a_compiler_sees_no_break(op):
    work = draw(op, (4, 0, 7), heads=1)
    compiled = torch.compile(kernel_of(op), backend="aot_eager", fullgraph=True)
    expected = results(kernel_of(op), work)
    for a, b in zip(results(compiled, work), expected, strict=True):
        assert_close(a, b, bound=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("op", COMPUTING)
def test_a_surrounding_autocast_does_not_change_the_result(op):
    work = draw(op, (4, 0, 7), heads=1)
    plain = results(kernel_of(op), work)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(kernel_of(op), work)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


@pytest.mark.parametrize("op", OPS)
def test_a_checkpointed_call_gives_the_same_gradients_and_computes_forward_again(op):
    from torch.utils.checkpoint import checkpoint

    work = draw(op, (4, 0, 7), heads=1)
    calls = []

    def counted(first, **options):
        calls.append(op)
        return kernel_of(op)(first, **options)

    expected = results(kernel_of(op), work)
    again = results(lambda first, **options: checkpoint(counted, first, use_reentrant=False, **options), work)
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert len(calls) == 2


# ---- FLOPs ----------------------------------------------------------------------------------------------------------------------------

LENGTHS = (3, 0, 9, 2)
FORWARD = {
    "block_attention": 4 * 2 * 16 * (9 + 81 + 4),
    "hstu_attention": 4 * 2 * 16 * (6 + 45 + 3),
    "pooled_attention": 4 * 2 * 16 * 5 * 14,
    "norm_linear": 2 * 14 * 24 * 40,
    "jagged_dense_bmm_add": 2 * 14 * 24 * 40,
}


@pytest.mark.parametrize("op", FORWARD)
def test_flops_are_counted_by_real_lengths(op):
    work = draw(op, LENGTHS)
    with FlopCounterMode(display=False) as counter:
        out = work.call(kernel_of(op))
    assert counter.get_total_flops() == FORWARD[op]
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 2 * FORWARD[op]


@pytest.mark.parametrize("op", [op for op in FORWARD if op != "norm_linear"])
def test_flops_without_data_are_bounded_by_the_longest_row(op):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    work = draw(op, (3, 1))
    longest = draw(op, (3, 3))
    fakes = {name: mode.from_tensor(t.detach()) if isinstance(t, torch.Tensor) else t for name, t in work.arguments.items()}
    with mode, FlopCounterMode(display=False) as counter:
        type(work)(op, fakes, 0, 0.0).call(kernel_of(op))
    with FlopCounterMode(display=False) as full:
        longest.call(kernel_of(op))
    assert counter.get_total_flops() == full.get_total_flops()


@pytest.mark.parametrize("shared", [False, True])
def test_pooling_on_hopper_with_keys_that_heads_share_is_jagged_attention_of_the_seeds(shared, monkeypatch):
    """The kernel itself needs a GPU: the reference of ``jagged_attention`` stands in its place, and offsets, lengths and shapes are what is seen."""
    monkeypatch.setattr(hopper.jagged, "gluon", attend)
    generator = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 8])
    seeds = torch.randn(*(() if shared else (3,)), 5, 4, 8, dtype=torch.float64, generator=generator)
    k, v = (torch.randn(8, 2, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    wanted = pool(seeds, k, v, offsets, max_k=5, scale=0.3)
    assert torch.equal(hopper.gluon(seeds, k, v, offsets, max_k=5, scale=0.3), wanted)
