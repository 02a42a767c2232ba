"""The Triton hstu_attention: masks over many tiles, tiles that are skipped, tile shapes, planted faults."""

from unittest.mock import patch

import pytest
import torch
from gem_kernels_portable import compare, draw, kernel_of, offsets_of, results
from hypothesis import given, settings
from hypothesis import strategies as st

from gem_core.ops.hstu_attention import visible
from gem_core.spec import RequestError, load_object
from gem_core.testing import registry

pytest.importorskip("triton")

from gem_kernels.common.language import tl, triton
from gem_kernels.ops.hstu_attention import launch
from gem_kernels.ops.hstu_attention.spans import key_spans, masked_tile, masked_tiles, query_spans
from gem_kernels.ops.hstu_attention.spans import visible as shows

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="these run under the interpreter")
SMALL = launch.Config(16, 16, 1, 1)


def counts(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 0, 20])
def test_case_B23_I04_prefix_and_targets_over_many_tiles(causal, window):
    """Prefix of 0, 1 and 3 tokens and a long one, targets inside one tile and over two, in tiles smaller than all of them."""
    parts = {"contextual": counts(3, 0, 1, 40), "targets": counts(5, 20, 0, 4)}
    with patch.object(launch, "INTERPRETER", SMALL):
        compare(draw("hstu_attention", (40, 33, 5, 44), heads=1, causal=causal, window=window, norm_length=4, **parts))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_drawn_masks(data):
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=3))
    prefix = [data.draw(st.integers(0, n)) for n in lengths]
    targets = [data.draw(st.integers(0, n - p)) for n, p in zip(lengths, prefix, strict=True)]
    options = {"causal": data.draw(st.booleans()), "window": data.draw(st.none() | st.integers(0, 40)), "norm_length": 4}
    with patch.object(launch, "INTERPRETER", SMALL):
        compare(draw("hstu_attention", lengths, heads=1, contextual=counts(*prefix), targets=counts(*targets), **options))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_bias_of_every_sharing_gets_its_gradient(rows, heads):
    bias = torch.randn(rows, heads, 34, 34, requires_grad=True)
    compare(draw("hstu_attention", (20, 34), bias=bias, targets=counts(2, 3), norm_length=4))


def test_case_I02_without_a_causal_mask_later_tokens_count():
    work = draw("hstu_attention", (20,), heads=1, norm_length=1)
    causal, full = (type(work)(work.op, {**work.arguments, "causal": c}, 0, 0.0).call(kernel_of("hstu_attention")) for c in (True, False))
    assert not torch.allclose(causal[:-1], full[:-1])
    torch.testing.assert_close(causal[-1], full[-1])


def test_hidden_tiles_are_never_read():
    """NaN where a window hides whole tiles: a kernel that read them and multiplied by zero would pass it on."""
    work = draw("hstu_attention", (96,), heads=1, window=4)
    far = {name: work.arguments[name].detach().clone() for name in ("q", "k", "v")}
    far["k"][:32] = far["v"][:32] = torch.nan
    with patch.object(launch, "INTERPRETER", SMALL):
        out = type(work)(work.op, {**work.arguments, **far}, 0, 0.0).call(kernel_of("hstu_attention"))
    assert not torch.isfinite(out[:32]).any()
    assert torch.isfinite(out[48:]).all()


def test_case_B03_no_tokens_give_no_results():
    out, dq, dk, dv = results(kernel_of("hstu_attention"), draw("hstu_attention", (0, 0)))
    assert out.shape == dq.shape == dk.shape == dv.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("options", "so"),
    [({"targets": counts(4, 2)}, "row 0 has 3 tokens, its targets are 4"), ({"max_length": 2}, "longer than the given maximum 2")],
    ids=["B20", "B21"],
)
def test_case_B20_B21_parts_and_rows_that_do_not_fit_are_refused(options, so):
    from gem_core.ops import hstu_attention

    work = draw("hstu_attention", (3, 2), **options)
    with pytest.raises(RequestError, match=so):
        hstu_attention(**work.arguments, backend="triton")


# ---- which tiles are visited ----------------------------------------------------------------------------------------------------------


@triton.jit
def mark(
    by_query, by_key, n, prefix, end, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CONTEXTUAL: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Count for each pair of positions how often the tiles of each pass show it."""
    zero = n * 0
    for first in range(0, n, BLOCK_M):
        span = key_spans(zero + first, n, prefix, end, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, CONTEXTUAL, TARGETS)
        i = (first + tl.arange(0, BLOCK_M))[:, None]
        for m in range(span[2], span[3], BLOCK_N):
            j = (m + tl.arange(0, BLOCK_N))[None, :]
            at = by_query + i * 96 + j
            tl.store(at, tl.load(at, mask=(i < n) & (j < 96)) + 1, mask=(i < n) & (j < 96))
        for t in range(masked_tiles(*span, BLOCK_N)):
            m, bound = masked_tile(zero + t, *span, BLOCK_N)
            j = (m + tl.arange(0, BLOCK_N))[None, :]
            shown = shows(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS) & (j < bound) & (i < n) & (j < 96)
            at = by_query + i * 96 + j
            tl.store(at, tl.load(at, mask=shown) + 1, mask=shown)
    for first in range(0, n, BLOCK_N):
        span = query_spans(zero + first, n, prefix, end, window, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, CONTEXTUAL, TARGETS)
        j = (first + tl.arange(0, BLOCK_N))[:, None]
        for m in range(span[2], span[3], BLOCK_M):
            i = (m + tl.arange(0, BLOCK_M))[None, :]
            at = by_key + i * 96 + j
            tl.store(at, tl.load(at, mask=(i < n) & (j < n)) + 1, mask=(i < n) & (j < n))
        for t in range(masked_tiles(*span, BLOCK_M)):
            m, bound = masked_tile(zero + t, *span, BLOCK_M)
            i = (m + tl.arange(0, BLOCK_M))[None, :]
            shown = shows(i, j, prefix, end, window, CAUSAL, WINDOW, CONTEXTUAL, TARGETS) & (i < bound) & (i < n) & (j < n)
            at = by_key + i * 96 + j
            tl.store(at, tl.load(at, mask=shown) + 1, mask=shown)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_tiles_cover_what_is_seen_once_and_whole_tiles_are_seen_whole(data):
    """The spans themselves against the reference's mask, both ways round, without any attention."""
    n = data.draw(st.integers(1, 90))
    prefix = data.draw(st.integers(0, n))
    end = n - data.draw(st.integers(0, n - prefix))
    causal, window = data.draw(st.booleans()), data.draw(st.none() | st.integers(0, 60))
    words = {"CAUSAL": causal, "WINDOW": window is not None, "CONTEXTUAL": True, "TARGETS": True, "BLOCK_M": 16, "BLOCK_N": 32}
    seen = visible(counts(n), n, causal=causal, window=window, contextual=counts(prefix), targets=counts(n - end))[0]
    marks = torch.zeros(2, 96 * 96, dtype=torch.int32)
    mark[(1,)](marks[0], marks[1], n, prefix, end, window or 0, **words)
    for axis, found in zip(("query", "key"), marks.view(2, 96, 96), strict=True):
        assert torch.equal(found[:n, :n] > 0, seen), axis
        assert int(found.max()) <= 1, f"{axis}: a pair is visited twice"
        assert not found[:n, n:].any(), f"{axis}: keys past the row"


# ---- tile shapes, declarations --------------------------------------------------------------------------------------------------------


def test_case_I06_few_tile_shapes_serve_all_lengths():
    kernels = ("forward", "query_grad", "key_grad", "bias_grad")
    shapes = {(k, launch.choose(k, 128, wide_dtype=False, longest=n, roomy=True)) for k in kernels for n in range(1, 5000, 7)}
    assert len(shapes) <= 8
    assert launch.choose("forward", 256, wide_dtype=False, longest=9, roomy=False).stages == 1
    assert launch.choose("forward", 64, wide_dtype=True, longest=9, roomy=True).block_m == 32


def test_the_hopper_backend_declares_no_more_than_it_takes():
    (gluon,) = [o.impl for o in registry().of("hstu_attention") if o.impl.backend == "gluon"]
    assert (gluon.features, gluon.dtypes) == (("causal", "noncausal", "window"), ("bf16",))
    assert load_object(gluon.load) is launch.gluon


# ---- planted faults -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"window": None}, {"causal": False}, {"targets": None}, {"contextual": None}, {"norm_length": 5}], ids=str)
def test_a_planted_fault_is_noticed(fault):
    work = draw("hstu_attention", (30,), heads=1, window=3, contextual=counts(6), targets=counts(4), norm_length=4)
    real = kernel_of("hstu_attention")
    with pytest.raises(AssertionError):
        compare(work, lambda q, **options: real(q, **{**options, **fault}))


def test_offsets_that_point_outside_are_held_inside_the_tensor():
    work = draw("hstu_attention", (4, 2), norm_length=4)
    bad = type(work)(work.op, {**work.arguments, "offsets": torch.tensor([0, 4, 900]), "max_length": 600}, 0, 0.0)
    good = type(work)(work.op, {**work.arguments, "offsets": offsets_of([4, 2])}, 0, 0.0)
    torch.testing.assert_close(bad.call(kernel_of(work.op)), good.call(kernel_of(work.op)))
