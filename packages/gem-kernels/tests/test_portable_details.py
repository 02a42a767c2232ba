"""What is peculiar to each portable kernel: rotation, blocks, splits, norms at a large mean, runs of rows, moved dtypes; and planted faults."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, offsets_of, results

from gem_core.ops.block_attention import rotate
from gem_core.testing import assert_close

pytest.importorskip("triton")

from gem_kernels.ops import host, ragged
from gem_kernels.ops.block_attention import configs as block_configs
from gem_kernels.ops.jagged_attention.call import Call
from gem_kernels.ops.norm_linear import launch as norm_launch
from gem_kernels.ops.norm_linear import rows_launch
from gem_kernels.ops.pooled_attention import hopper as pooled_hopper
from gem_kernels.ops.pooled_attention import launch as pooled_launch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter")


def changed(work, **options):
    return type(work)(work.op, {**work.arguments, **options}, 0, 0.0)


# ---- block_attention ------------------------------------------------------------------------------------------------------------------


def angles(tokens, pairs, scale=1.0):
    return torch.arange(tokens)[:, None] * torch.linspace(0.1, 1, pairs) * scale


@pytest.mark.parametrize("block", [5, 64])
def test_rotation_by_the_kernel_is_rotation_before_it(block):
    work = draw("block_attention", (70, 3), block=block)
    turns = angles(73, 8)
    turned = {name: rotate(work.arguments[name].detach(), turns) for name in ("q", "k", "v")}
    fused = changed(work, rope=turns, rope_on_v=True).call(kernel_of("block_attention"))
    assert_close(fused, changed(work, **turned).call(kernel_of("block_attention")), bound=2e-6)


def test_rotation_in_float16_at_positions_of_a_long_row():
    compare(draw("block_attention", (40, 9), dtype=torch.float16, rope=angles(49, 8, scale=400.0), rope_on_v=True))


@pytest.mark.parametrize("block", [3, 17, 100])
def test_blocks_of_any_size(block):
    compare(draw("block_attention", (130, 0, 31), heads=1, dtype=torch.float16, block=block))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # of the interpreter
def test_a_block_sees_nothing_of_its_neighbours():
    work = draw("block_attention", (128,), heads=1)
    poisoned = {name: work.arguments[name].detach().clone() for name in ("q", "k", "v")}
    for tensor in poisoned.values():
        tensor[:64] = torch.nan
    out = changed(work, **poisoned).call(kernel_of("block_attention"))
    assert not torch.isfinite(out[:64]).any()
    assert torch.isfinite(out[64:]).all()


def test_block_configurations_by_what_they_depend_on():
    plain = block_configs.Key("forward", 64, 128, False, False, False, True)
    assert block_configs.choose(plain) == block_configs.FORWARD
    assert block_configs.choose(replace(plain, roomy=False)) == block_configs.SMALL
    assert block_configs.choose(replace(plain, direction="backward")) == block_configs.BACKWARD
    for change in ({"turned": True}, {"normed": True}, {"turned": True, "normed": True}):
        assert block_configs.choose(replace(plain, direction="backward", **change)) == block_configs.CHANGED_BACKWARD
        assert block_configs.choose(replace(plain, direction="backward", **change, roomy=False)) == block_configs.SMALL_BACKWARD
    assert block_configs.choose(replace(plain, tile=128)) == block_configs.choose(replace(plain, wide_dtype=True)) == block_configs.WIDE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block", [20, 64])
def test_heads_normed_by_the_kernel_are_heads_normed_before_it(dtype, block):
    work = draw("block_attention", (70, 0, 3), dtype=dtype, block=block)
    gains = {name: torch.randn(16).to(dtype).requires_grad_() for name in ("q_gain", "k_gain")}
    compare(changed(work, **gains, eps=1e-3))
    compare(changed(work, **gains, rope=angles(73, 8), rope_on_v=True))


def test_normed_views_of_a_fused_buffer():
    work = draw("block_attention", (40, 9))
    q, k, v = torch.randn(49, 2, 48, requires_grad=True).split(16, dim=-1)
    gains = {name: torch.randn(16, requires_grad=True) for name in ("q_gain", "k_gain")}
    views = changed(work, q=q, k=k, v=v, **gains)
    copies = changed(work, q=q.detach().clone(), k=k.detach().clone(), v=v.detach().clone(), **gains)
    assert torch.equal(views.call(kernel_of("block_attention")), copies.call(kernel_of("block_attention")))
    found = [torch.autograd.grad(w.call(kernel_of("block_attention")).sum(), list(gains.values())) for w in (views, copies)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"shape": (9, 2, 24)}, False),
        ({"dtype": torch.float32}, False),
        ({"offset": 1}, False),
        ({"stride": (100, 36, 1)}, False),
        ({"stride": (200, 64, 1)}, True),
    ],
    ids=str,
)
def test_what_the_copy_engine_is_given(change, fits):
    """On a meta device, as if it were Hopper."""
    shape = change.get("shape", (9, 2, 32))
    x = torch.empty_strided(shape, change.get("stride", (shape[1] * shape[2], shape[2], 1)), dtype=change.get("dtype", torch.float16), device="meta")
    with patch.object(host, "hopper", lambda like: True), patch.object(torch.Tensor, "data_ptr", lambda self: change.get("offset", 0) * 2):
        assert ragged.copied(x) == fits
    assert not ragged.copied(torch.zeros(9, 2, 32).half())


# ---- norm_linear ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fused_norms_over_several_steps_and_tiles(norm, where):
    x, weight = (torch.randn(shape).half().requires_grad_() for shape in ((70, 56), (72, 56)))
    normed = 56 if where == "before" else 72
    columns = {name: torch.randn(normed).half().requires_grad_() for name in (("gamma", "beta") if norm == "layer" else ("gamma",))}
    work = draw("norm_linear")
    compare(type(work)("norm_linear", {"x": x, "weight": weight, "norm": norm, "where": where, **columns}, 0, 0.0))


def test_a_fused_layer_norm_is_exact_far_from_zero():
    x = (torch.randn(20, 56) + 300).half().requires_grad_()
    work = draw("norm_linear", dtype=torch.float16)
    compare(type(work)("norm_linear", {"x": x, "weight": torch.randn(40, 56).half().requires_grad_(), "norm": "layer"}, 0, 0.0))


def test_what_the_copy_engine_cannot_address_is_computed_all_the_same():
    work = draw("norm_linear", (9,), dtype=torch.float16)
    odd = {"x": torch.randn(9, 23).half().requires_grad_(), "weight": torch.randn(41, 23).half().requires_grad_()}
    assert not norm_launch._fits(*odd.values(), before=True)
    assert norm_launch._fits(work.arguments["x"], work.arguments["weight"], before=True)
    with patch.object(norm_launch, "_launch_fused", side_effect=AssertionError("fused")):
        compare(changed(work, **odd))


def bare(rows=70, **options):
    """A norm after the product, with nothing done to the normed rows."""
    x, weight, bias = (torch.randn(shape).half().requires_grad_() for shape in ((rows, 56), (72, 56), (72,)))
    return changed(draw("norm_linear"), x=x, weight=weight, bias=bias, where="after", **options)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("rows", [1, 33, 70])
def test_rows_normed_after_a_product_are_not_computed_again_for_their_gradients(norm, rows):
    residual = torch.randn(rows, 72).half().requires_grad_()
    calls = [bare(rows, norm=norm, **more) for more in ({}, {"residual": residual}, {"return_sum": True}, {"residual": residual, "return_sum": True})]
    wide = {name: t.detach().float().requires_grad_() for name, t in calls[1].arguments.items() if isinstance(t, torch.Tensor)}
    for work in (*calls, changed(calls[1], **wide)):
        linear = Mock(side_effect=torch.nn.functional.linear)
        with patch.object(norm_launch, "F", SimpleNamespace(linear=linear)):
            compare(work)
        fused = work.arguments["x"].dtype is torch.half and not {"residual", "return_sum"} & work.arguments.keys()
        assert linear.call_count == (0 if fused else 1)
    scaled = bare(rows, norm=norm, residual=residual, gamma=torch.randn(72).half().requires_grad_())  # the result is not the normed rows
    compare(scaled)


@pytest.mark.parametrize("fault", [lambda r: r * 1.1, lambda r: r.roll(1)], ids=["scaled", "shifted"])
def test_a_planted_fault_in_the_factors_of_the_rows_is_noticed(fault):
    real = norm_launch.norm_rows_grad

    def wrong(*arguments, factors, **options):
        return real(*arguments, factors=fault(factors), **options)

    with patch.object(norm_launch, "norm_rows_grad", wrong), pytest.raises(AssertionError):
        compare(bare())


@pytest.mark.parametrize("rows", [0, 7])
def test_fake_results_have_the_shapes_of_kept_factors(rows):
    work = bare(rows)
    options = (work.arguments["bias"], None, None, None, False, False, 1e-5, False)
    given = (work.arguments["x"], work.arguments["weight"], *options)
    torch.library.opcheck(torch.ops.gem_kernels.norm_linear.default, given, test_utils=("test_schema", "test_faketensor"))
    assert torch.ops.gem_kernels.norm_linear(*given)[2].shape == (rows,)


def test_wide_results_are_products_of_normed_rows():
    given = {"x": torch.randn(9, 24).half().requires_grad_(), "weight": torch.randn(520, 24).half().requires_grad_()}
    assert norm_launch._fits(given["x"], given["weight"][:512], before=True)
    assert not norm_launch._fits(*given.values(), before=True)
    compare(changed(draw("norm_linear"), **given, bias=torch.randn(520).half().requires_grad_(), norm="layer"))


@pytest.mark.parametrize("rows", [0, 1, 700])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_of_columns_by_a_product_are_sums(rows, dtype):
    x = torch.randn(rows, 24).to(dtype)
    found = norm_launch._column_sums(x)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, (24,), True)
    assert_close(found, x.double().sum(0), bound=1e-3)


def test_columns_gradients_are_added_by_a_fixed_number_of_programs():
    columns = {"gamma": torch.randn(40, requires_grad=True), "bias": torch.randn(40, requires_grad=True)}
    work = draw("norm_linear", (133,), where="after", **columns)
    full = results(kernel_of("norm_linear"), work)
    with patch.object(rows_launch, "PROGRAMS", 2):
        few = results(kernel_of("norm_linear"), work)
    for a, b in zip(full, few, strict=True):
        assert_close(a, b, bound=1e-6)


@pytest.mark.parametrize("roomy", [True, False])
def test_tiles_of_the_fused_norms_hold_their_rows(roomy):
    for width in (8, 64, 200, 256, 512):
        assert norm_launch.after_tile(width, roomy).block >= width
        assert norm_launch.before_tile(width, roomy).block <= 256


@pytest.mark.parametrize(
    ("gate", "gamma", "width", "most"), [(True, True, 256, 128), (True, False, 256, None), (False, True, 256, None), (True, True, 4096, None)]
)
def test_registers_of_a_gated_gradient_that_is_summed_are_bounded(gate, gamma, width, most, monkeypatch):
    """Two even turns of all programs; of four warps, since eight hold more values each."""
    seen = {}
    monkeypatch.setattr(host, "launch", lambda kernel, like, tiles, **arguments: seen.update(arguments))
    x, vector = torch.zeros(2, width), torch.zeros(width) if gamma else None
    rows_launch.norm_rows_grad(x, x, None, vector, vector, layer=True, eps=1e-5, gate=x if gate else None)
    assert seen["maxnreg"] == most


def test_gradients_that_are_columns_of_a_wider_one_are_read_where_they_lie():
    """Rows of two outer dimensions too; what has no rows to step over is copied."""
    wide = torch.randn(2, 5, 3 * 24)
    x, gate = torch.randn(10, 24), torch.randn(10, 24)
    dy, dtotal = wide[..., 24:48], wide[..., 48:]
    given = {"layer": True, "eps": 1e-5, "gate": gate, "normed": True}
    with patch.object(host, "launch", wraps=host.launch) as launched:
        found = rows_launch.norm_rows_grad(dy, x, None, None, None, dtotal=dtotal, **given)
        rows_launch.norm_rows_grad(dy.mT, x.view(-1, 5), None, None, None, **given | {"gate": gate.view(-1, 5)})
    (_, first), (_, turned) = ((call.args, call.kwargs) for call in launched.call_args_list)
    assert [(first[name].data_ptr(), first[f"{name}_stride"]) for name in ("dy", "dtotal")] == [(t.data_ptr(), 72) for t in (dy, dtotal)]
    assert turned["dy_stride"] == 5
    copies = rows_launch.norm_rows_grad(dy.contiguous(), x, None, None, None, dtotal=dtotal.contiguous(), **given)
    assert all(torch.equal(a, b) for a, b in zip(found, copies, strict=True) if a is not None)


# ---- pooled_attention, pffn -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_row", [False, True])
def test_rows_split_along_their_keys_give_the_same(per_row):
    seeds = torch.randn(*((3,) if per_row else ()), 5, 2, 16, requires_grad=True)
    work = draw("pooled_attention", (70, 0, 33), seeds=seeds)
    whole = results(kernel_of("pooled_attention"), work)
    with patch.object(pooled_launch, "SPLIT_KEYS", 20):
        split = results(kernel_of("pooled_attention"), work)
        compare(work)
    for a, b in zip(whole, split, strict=True):
        assert_close(a, b, bound=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gradient_of_seeds_of_each_row_is_written_once_unless_rows_are_split(dtype):
    """Nothing is added then, so no sums in float32 are made and converted."""
    made = []

    def seen(self, kernel, tiles, **arguments):
        made.extend((arguments["dq"].dtype, tuple(arguments["dq"].shape[:2])) for _ in range("dq" in arguments))
        return run(self, kernel, tiles, **arguments)

    run = pooled_launch.Inputs.run
    work = draw("pooled_attention", (70, 0, 33), dtype=dtype, seeds=torch.randn(3, 5, 2, 16).to(dtype).requires_grad_())
    with patch.object(pooled_launch.Inputs, "run", seen):
        compare(work)
        with patch.object(pooled_launch, "SPLIT_KEYS", 20):
            compare(work)
    assert made == [(dtype, (3, 1)), (torch.float32, (3, 3))]


@pytest.mark.parametrize(
    ("seeds", "dim", "v_dim", "keys"), [(64, 128, 128, 32), (64, 64, 128, 32), (64, 64, 64, 64), (32, 128, 128, 64), (5, 256, 16, 32)]
)
def test_keys_of_a_tile_beside_many_seeds_of_wide_heads(seeds, dim, v_dim, keys, monkeypatch):
    monkeypatch.setattr(host, "interpreted", lambda: False)
    q, k, v = (torch.empty(*shape, dtype=torch.float16) for shape in ((seeds, 2, dim), (3, 2, dim), (3, 2, v_dim)))
    assert pooled_launch.Inputs(q, k, v, None, 3, 1.0).grad_keys() == keys


@pytest.mark.parametrize("runs", [1, 2])
def test_the_gradient_of_shared_seeds_is_added_in_runs_of_rows(runs):
    with patch.object(pooled_launch, "RUNS", runs), patch.object(pooled_launch, "FUSED_RUNS", runs):
        compare(draw("pooled_attention", (3, 0, 20, 7, 1)))


@pytest.mark.parametrize(("seeds", "kv_heads"), [(33, 2), (5, 1)])
def test_many_seeds_and_shared_keys_take_two_kernels_and_few_seeds_one(seeds, kv_heads):
    """The interpreter's tile holds 32 seeds."""
    used = []

    def seen(self, kernel, tiles, **arguments):
        used.append(kernel.fn.__name__)
        return run(self, kernel, tiles, **arguments)

    run = pooled_launch.Inputs.run
    work = draw("pooled_attention", (70, 0, 33))
    k, v = (work.arguments[name].detach()[:, :kv_heads].requires_grad_() for name in "kv")
    with patch.object(pooled_launch.Inputs, "run", seen):
        compare(changed(work, seeds=torch.randn(seeds, 2, 16, requires_grad=True), k=k, v=v))
        assert used == ["forward_kernel", "key_grad_kernel", "query_grad_kernel"]
        used.clear()
        compare(work)
        assert used == ["forward_kernel", "grad_kernel"]


@pytest.mark.parametrize("v_dim", [16, 32, 40])
@pytest.mark.parametrize("per_row", [False, True])
def test_few_seeds_on_hopper_get_the_portable_gradients_of_its_own_statistics(per_row, v_dim, monkeypatch):
    """The forward kernel needs a GPU: the portable one of ``jagged_attention``, whose statistics have the same layout, stands in its place."""
    used, widths = [], []

    def seen(self, kernel, tiles, **arguments):
        used.append(kernel.fn.__name__)
        return run(self, kernel, tiles, **arguments)

    def portable(**given):
        assert given["backend"] == "gluon"
        widths.append(given["v"].shape[-1])
        return Call(**given | {"backend": "triton"})

    run = pooled_launch.Inputs.run
    monkeypatch.setattr(pooled_hopper, "Call", portable)
    monkeypatch.setattr(pooled_launch.Inputs, "run", seen)
    seeds = torch.randn(*((3,) if per_row else ()), 5, 2, 16, requires_grad=True)
    compare(draw("pooled_attention", (70, 0, 33), v_dim=v_dim, seeds=seeds), pooled_hopper.gluon)
    assert used == ["grad_kernel"]
    assert widths == [{16: 32, 32: 32, 40: 64}[v_dim]], "a power of two, as the kernels for Hopper want it"


@pytest.mark.parametrize(("seeds", "kv_heads", "way"), [(64, 2, "one"), (65, 2, "two"), (5, 1, "two")])
def test_pooling_on_hopper_is_compiled_whole_and_goes_the_way_of_the_gradients(seeds, kv_heads, way, monkeypatch):
    """On a GPU, where a tile of 16-bit values holds 64 seeds; the portable kernels stand in the place of those for Hopper."""
    ways = []
    monkeypatch.setattr(pooled_hopper, "Call", lambda **given: ways.append("one") or Call(**given | {"backend": "triton"}))
    monkeypatch.setattr(pooled_hopper.jagged, "gluon", lambda *given, **options: ways.append("two") or pooled_hopper.jagged.triton(*given, **options))
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(host, "interpreted", lambda: False)
        call = pooled_launch.Inputs(*(torch.empty(seeds, heads, 16, dtype=torch.float16) for heads in (2, kv_heads, kv_heads)), None, 3, 1.0)
        assert pooled_launch.fused(call) == (way == "one")
    work = draw("pooled_attention", (3, 0, 5))
    k, v = (work.arguments[name].detach()[:, :kv_heads].requires_grad_() for name in "kv")
    compiled = torch.compile(pooled_hopper.gluon, backend="aot_eager", fullgraph=True)
    compare(changed(work, seeds=torch.randn(seeds, 2, 16, requires_grad=True), k=k, v=v), compiled)
    assert set(ways) == {way}


@pytest.mark.parametrize("seeds", [5, 33])
def test_scores_far_below_zero_leave_nothing_of_what_lies_past_the_end_of_a_row(seeds):
    """There a score is zero, whose weight would overflow. 33 seeds take the kernels of a pass each."""
    work = draw("pooled_attention", (70, 0, 33))
    k = (work.arguments["k"].detach().abs() + 2).requires_grad_()
    compare(changed(work, seeds=(-9.0 - torch.rand(seeds, 2, 16)).requires_grad_(), k=k))


def test_both_ways_to_the_gradients_agree():
    work = draw("pooled_attention", (70, 0, 33, 64))
    one = results(kernel_of("pooled_attention"), work)
    with patch.object(pooled_launch, "fused", lambda call: False):
        two = results(kernel_of("pooled_attention"), work)
    for a, b in zip(one, two, strict=True):
        assert_close(a, b, bound=2e-6)


def test_pffn_of_strided_tokens():
    work = draw("pffn", (5, 0, 20), activation="relu")
    q0 = torch.randn(25, 2, 32, requires_grad=True)[..., :16]
    expected = changed(work, q0=q0.detach().contiguous()).call(kernel_of("pffn"))
    assert torch.equal(changed(work, q0=q0).call(kernel_of("pffn")), expected)


# ---- movers ---------------------------------------------------------------------------------------------------------------------------

MOVED = [torch.bool, torch.int32, torch.int64, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("dtype", MOVED, ids=str)
@pytest.mark.parametrize("tail", [(), (3,), (2, 2)], ids=str)
def test_movers_keep_every_bit(dtype, tail):
    lengths, offsets = [3, 0, 5], offsets_of([3, 0, 5])
    values = torch.randn(8, *tail).mul(100).to(dtype)
    dense = kernel_of("jagged_pad")(values, offsets, max_length=6)
    assert torch.equal(dense[2, :5], values[3:])
    assert not dense[0, 3:].any()
    assert torch.equal(kernel_of("jagged_unpad")(dense, offsets), values)
    joined, joined_offsets = kernel_of("jagged_concat")([(values, offsets), (values[:3], offsets_of([1, 1, 1]))])
    assert joined_offsets.tolist() == [0, 4, 5, 11]
    assert torch.equal(joined[3], values[0])
    first, second = kernel_of("jagged_split")(joined, joined_offsets, [offsets, offsets_of([1, 1, 1])])
    assert torch.equal(first, values)
    assert torch.equal(second, values[:3])
    assert sum(lengths) == len(first)


def test_case_B07_truncated_rows_get_exactly_zero_gradient():
    values = torch.arange(5.0, requires_grad=True)
    out = kernel_of("jagged_pad")(values, offsets_of([3, 2]), max_length=2)
    (gradient,) = torch.autograd.grad(out, [values], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert gradient.tolist() == [1, 2, 0, 3, 4]
    out = kernel_of("jagged_pad")(values, offsets_of([3, 2]), max_length=2, truncate="left")
    (gradient,) = torch.autograd.grad(out, [values], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert gradient.tolist() == [0, 1, 2, 3, 4]


def test_a_transposed_matrix_a_row_is_read_by_stride():
    work = draw("jagged_dense_bmm_add", (4, 0, 35))
    dense = work.arguments["dense"].detach().mT.contiguous().mT.requires_grad_()
    with patch.object(torch.Tensor, "contiguous", side_effect=AssertionError("copied")):
        out = changed(work, dense=dense.detach()).call(kernel_of("jagged_dense_bmm_add"))
    assert_close(out, work.call(kernel_of("jagged_dense_bmm_add")), bound=0.0)


# ---- planted faults: the comparisons above go red -------------------------------------------------------------------------------------

FAULTS = [
    ("block_attention", {"block": 8}, {"block": 16}),
    ("block_attention", {"rope": angles(39, 8)}, {"rope": None}),
    ("block_attention", {"q_gain": torch.full((16,), 2.0, requires_grad=True), "k_gain": torch.ones(16, requires_grad=True)}, {"eps": 0.5}),
    ("pooled_attention", {}, {"scale": 0.26}),
    ("norm_linear", {"norm": "layer"}, {"norm": "rms"}),
    ("norm_linear", {"where": "before"}, {"eps": 0.1}),
    ("add_norm", {"norm": "rms", "beta": None}, {"norm": "layer"}),
    ("add_norm", {}, {"eps": 0.1}),
    ("pffn", {}, {"activation": "relu"}),
    ("jagged_pad", {}, {"fill": 1.0}),
    ("jagged_dense_bmm_add", {}, {"max_length": 33}),
]


@pytest.mark.parametrize(("op", "options", "fault"), FAULTS, ids=[f"{op}-{next(iter(fault))}" for op, _, fault in FAULTS])
def test_a_planted_fault_is_noticed(op, options, fault):
    real = kernel_of(op)
    with pytest.raises(AssertionError):
        compare(draw(op, **options), lambda first, **given: real(first, **{**given, **fault}))


@pytest.mark.parametrize("op", ["add_norm", "gated_residual"])
def test_a_gate_in_the_place_of_the_residual_is_noticed(op):
    real = kernel_of(op)
    compare(draw(op))
    with pytest.raises(AssertionError):
        compare(draw(op), lambda x, *, residual, gate, **rest: real(x, residual=gate, gate=residual, **rest))


@pytest.mark.parametrize("op", ["block_attention", "pooled_attention", "norm_linear", "add_norm", "gated_residual", "jagged_pad"])
def test_reserved_multiprocessors_shrink_the_grid_and_change_nothing(op):
    work = draw(op, (70, 0, 3))
    full = results(kernel_of(op), work)
    with patch.object(host, "programs_on", lambda tiles, resident, device: 1) as fewer:
        assert fewer(9, 1, None) == 1
        few = results(kernel_of(op), work)
    for a, b in zip(full, few, strict=True):
        assert_close(a, b, bound=1e-6)


def test_the_interpreter_is_told_from_the_compiler():
    assert host.interpreted()
    assert host.multiprocessors(torch.zeros(1)) == 2
    assert not host.approximate(torch.zeros(1).half())
    assert not host.roomy(torch.zeros(1))
