import pytest
import torch

from gem_core.ops import pffn
from gem_core.ops.pffn import flops, reference
from gem_core.spec import RequestError
from gem_core.testing import assert_close

LENGTHS = [3, 0, 5]


@pytest.mark.parametrize("position", ["inside", "after"])
@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_fast"])
def test_it_is_the_block_of_two_norms_written_out(brute, activations, offsets_of, randn, activation, position):
    q0, k, v = randn(8, 2, 4, grad=False), randn(3, 6, 2, 4, grad=False), randn(3, 6, 2, 4, grad=False)
    got = pffn(q0, k, v, offsets_of(LENGTHS), max_q=5, activation=activation, scale=0.5, scale_position=position, eps=1e-3)
    flat = q0.reshape(8, 8)
    centred = flat - flat.mean(1, keepdim=True)
    ln = (centred / (centred.square().mean(1, keepdim=True) + 1e-3).sqrt()).view(8, 2, 4)
    attended = brute(
        list(zip(torch.split(ln, LENGTHS), k, v)),
        scale=0.5 if position == "inside" else 1.0,
        weights=lambda s: activations[activation](s) * (0.5 if position == "after" else 1.0),
    )
    o = (attended + ln).reshape(8, 8)
    want = o / (o.square().mean(1, keepdim=True) + 1e-3).sqrt() + flat
    assert_close(got, want.view(8, 2, 4), bound=1e-13)


def test_norms_are_over_heads_and_width_together(offsets_of, randn):
    """Doubling one head changes the other."""
    q0, k, v = randn(8, 2, 4, grad=False), randn(3, 6, 2, 4), randn(3, 6, 2, 4)
    before = pffn(q0, k, v, offsets_of(LENGTHS), max_q=5)
    q0[:, 0] *= 2
    after = pffn(q0, k, v, offsets_of(LENGTHS), max_q=5)
    assert not torch.allclose(before[:, 1], after[:, 1])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_case_B01_empty_batches_and_rows(offsets_of, randn, lengths):
    q0, k = randn(0, 2, 4), randn(len(lengths), 6, 2, 4)
    out = pffn(q0, k, k, offsets_of(lengths), max_q=0)
    assert out.shape == (0, 2, 4)
    gradients = torch.autograd.grad(out.sum(), (q0, k))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)


@pytest.mark.parametrize("options", [{}, {"activation": "silu", "scale": 0.5, "scale_position": "after"}])
def test_gradcheck(offsets_of, randn, options):
    offsets = offsets_of([2, 0, 3])
    assert torch.autograd.gradcheck(
        lambda q0, k, v: pffn(q0, k, v, offsets, max_q=3, **options), (randn(5, 2, 3), randn(3, 2, 2, 3), randn(3, 2, 2, 3))
    )


def test_rows_beyond_the_maximum_are_cut_where_they_are_no_error(offsets_of, randn):
    q0, k, v = randn(8, 2, 4), randn(2, 6, 2, 4), randn(2, 6, 2, 4)
    out = reference(q0, k, v, offsets_of([5, 3]), max_q=3)
    kept = [0, 1, 2, 5, 6, 7]
    assert_close(out[kept], pffn(q0[kept], k, v, offsets_of([3, 3]), max_q=3), bound=1e-14)
    assert torch.equal(out[3:5], torch.zeros(2, 2, 4, dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(out.sum(), q0)[0][3:5], torch.zeros(2, 2, 4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(offsets_of, randn, dtype):
    q0, k, v = (randn(*shape, dtype=dtype, grad=False) for shape in ((8, 2, 4), (3, 6, 2, 4), (3, 6, 2, 4)))
    got = pffn(q0, k, v, offsets_of(LENGTHS), max_q=5)
    want = pffn(q0.double(), k.double(), v.double(), offsets_of(LENGTHS), max_q=5)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_flops_are_those_of_gdpa_on_dense_keys():
    assert flops(q_lengths=LENGTHS, keys=6, heads=2, dim=4) == 4 * 2 * 4 * sum(LENGTHS) * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "tanh"}, "unknown activation 'tanh'"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"k": torch.randn(2, 6, 1, 4)}, "k has shape"),
        ({"v": torch.randn(2, 5, 2, 4)}, "v has shape"),
        ({"k": torch.randn(3, 6, 2, 4)}, "k has shape"),
        ({"max_q": 2}, "a row of q0 has 3 values"),
        ({"q0": torch.randn(5, 8)}, "q0 has shape"),
    ],
)
def test_bad_input_is_refused_before_any_work(offsets_of, change, message):
    good = {"q0": torch.randn(5, 2, 4), "k": torch.randn(2, 6, 2, 4), "v": torch.randn(2, 6, 2, 4), "q_offsets": offsets_of([2, 3]), "max_q": 3}
    pffn(**good)
    with pytest.raises(RequestError, match=message):
        pffn(**{**good, **change})
