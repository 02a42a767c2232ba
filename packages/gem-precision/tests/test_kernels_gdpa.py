"""Attention without softmax in FP8, against the reference of the op."""

import itertools

import pytest
import torch

from gem_core.ops.gdpa import reference
from gem_core.spec import RequestError

pytest.importorskip("triton")

from gem_precision.kernels.gdpa import gdpa_forward

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUMS = 2**-9 if DEVICE == "cuda" else 1e-6  # a tensor core keeps about 14 bits of the largest term while it sums 128 of them
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, which the interpreter computes with


def offsets(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int64, device=DEVICE)


def exact_inputs(block_numbers, queries, keys, heads=2):
    """Each query reads one element of a key, so that scores, and with ReLU weights, are numbers that FP8 holds."""
    generator = torch.Generator().manual_seed(0)
    q = torch.zeros(queries, heads, 128)
    place = torch.randint(0, 128, (queries, heads, 1), generator=generator)
    q.scatter_(2, place, 2.0 ** torch.randint(-3, 4, place.shape, generator=generator).float())
    k, v = (block_numbers(keys, heads * 128, seed).reshape(keys, heads, 128) for seed in (1, 2))
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE)


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [((5, 130), (300, 7)), ((1, 0, 3), (0, 4, 129)), ((128,), (128,)), ((100, 28, 3), (100, 28, 150))],
    ids=["odd", "empty", "one tile", "two rows in a tile"],
)
def test_case_G11_weights_and_sums_are_those_of_the_reference(block_numbers, q_lengths, k_lengths):
    q, k, v = exact_inputs(block_numbers, sum(q_lengths), sum(k_lengths))
    where = {"max_q": max(q_lengths), "max_k": max(k_lengths), "activation": "relu", "scale": 0.5}
    got = gdpa_forward(q, k, v, offsets(*q_lengths), offsets(*k_lengths), **where)
    wanted = reference(q.double(), k.double(), v.double(), offsets(*q_lengths), offsets(*k_lengths), **where)
    assert (got.double() - wanted).abs().max() <= SUMS * wanted.abs().max()


def test_what_is_longer_is_cut_and_tokens_of_no_row_are_zeros(block_numbers):
    q, k, v = exact_inputs(block_numbers, 140, 200, heads=1)
    got = gdpa_forward(q, k, v, offsets(138), offsets(190), max_q=129, max_k=150, activation="relu")
    wanted = reference(q[:129].double(), k[:150].double(), v[:150].double(), offsets(129), offsets(150), max_q=129, max_k=150, activation="relu")
    assert (got[:129].double() - wanted).abs().max() <= SUMS * wanted.abs().max()
    assert not got[129:].any()


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_any_values_are_near(activation):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(150, 1, 128, generator=generator).to(DEVICE) for _ in range(3))
    where = {"max_q": 90, "max_k": 90, "activation": activation, "scale": 0.1}
    got = gdpa_forward(q, k, v, offsets(60, 90), offsets(60, 90), **where).double()
    wanted = reference(q.double(), k.double(), v.double(), offsets(60, 90), offsets(60, 90), **where)
    assert (got - wanted).norm() / wanted.norm() <= (0.08 if DEVICE == "cuda" else 0.5)  # the interpreter loses carries


def test_nothing_and_what_does_not_fit():
    x = torch.ones(3, 2, 128, device=DEVICE)
    none = gdpa_forward(x, x[:0], x[:0], offsets(3), offsets(0), max_q=3, max_k=0)
    assert torch.equal(none, torch.zeros_like(x))
    where = {"max_q": 3, "max_k": 3}
    with pytest.raises(RequestError, match="heads of 128"):
        gdpa_forward(x, x[:, :1], x[:, :1], offsets(3), offsets(3), **where)
    with pytest.raises(RequestError, match="heads of 128"):
        gdpa_forward(x[..., :64], x[..., :64], x[..., :64], offsets(3), offsets(3), **where)
    with pytest.raises(RequestError, match="int64"):
        gdpa_forward(x, x, x, offsets(3), offsets(3).int(), **where)
    with pytest.raises(RequestError, match="int64"):
        gdpa_forward(x, x, x, offsets(3), offsets(1, 2), **where)
    with pytest.raises(RequestError, match="no native kernel"):
        gdpa_forward(x, x, x, offsets(3), offsets(3), activation="identity", **where)
