"""hstu_attention by the Hopper kernels: lengths around their tiles and blocks, masks, head sizes, views, rows beyond their maximum."""

import pytest
import torch

from gem_core.ops import hstu_attention
from gem_core.testing import assert_close, poisoned_memory
from gem_kernels.bench.measure import wrong
from gem_kernels.bench.workloads import Workload

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="no Hopper GPU")]

LENGTHS = [(700, 0, 65, 1), (64,), (63, 128, 129, 127), (256, 256, 192), (1, 1, 2), (1024, 900, 300)]
MASKS = [{}, {"causal": False}, {"window": 100}, {"window": 0}, {"causal": False, "window": 130}]


def offsets_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int64, device="cuda").cumsum(0)


def leaf(*shape):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").bfloat16().requires_grad_()


def by_gluon(q, **options):
    with poisoned_memory():
        return hstu_attention(q, **options, backend="gluon")


def work_of(lengths, dim, v_dim=None, **options):
    tokens = sum(lengths)
    qkv = {"q": leaf(tokens, 2, dim), "k": leaf(tokens, 2, dim), "v": leaf(tokens, 2, v_dim or dim)}
    return Workload("hstu_attention", {**qkv, "offsets": offsets_of(lengths), "max_length": max(lengths), "norm_length": 8, **options}, 0, 0.0)


@pytest.fixture(params=[2**30, 0, 128], ids=["again", "kept", "some"])
def forms(request, monkeypatch):
    """Rows make the scores again for the gradient of the queries, or keep their slopes, or it depends on their length."""
    monkeypatch.setattr("gem_kernels.ops.hstu_attention.hopper.LONG", request.param)


@pytest.mark.usefixtures("forms")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_case_B03_I02_lengths_around_tiles(mask, dim):
    for lengths in LENGTHS:
        assert wrong(by_gluon, work_of(lengths, dim, **mask)) is None, lengths


@pytest.mark.parametrize(("dim", "v_dim"), [(64, 128), (128, 64), (128, 48), (64, 20)])
def test_values_of_another_width(dim, v_dim):
    assert wrong(by_gluon, work_of((300, 65), dim, v_dim)) is None


@pytest.mark.usefixtures("forms")
def test_views_of_one_fused_buffer():
    fused = leaf(400, 2, 3 * 128)
    q, k, v = fused.split(128, -1)
    options = {"offsets": offsets_of((150, 250)), "max_length": 250}
    out = hstu_attention(q, k, v, **options, backend="gluon")
    (got,) = torch.autograd.grad(out.float().sum(), fused)
    copies = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    expected = hstu_attention(*copies, **options, backend="gluon")
    assert torch.equal(out, expected)
    assert torch.equal(got, torch.cat(torch.autograd.grad(expected.float().sum(), copies), -1))


@pytest.mark.usefixtures("forms")
def test_tokens_beyond_the_maximum_give_zeros_and_get_zeros():
    work = work_of((300, 40), 128, max_length=130)
    q, k, v = (work.arguments[name] for name in "qkv")
    out = by_gluon(**work.arguments)
    grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    for t in (out, *grads):
        assert not t[130:300].any()
        assert torch.isfinite(t).all()
        assert t[:130].any()
    short = hstu_attention(q[:130], k[:130], v[:130], offsets_of((130,)), max_length=130, norm_length=8, backend="gluon")
    assert torch.equal(out[:130], short)


def test_case_I02_later_tokens_do_not_matter():
    work = work_of((500,), 128)
    out = by_gluon(**work.arguments)
    changed = {name: work.arguments[name].detach().clone() for name in "qkv"}
    for t in changed.values():
        t[200:] = torch.nan
    assert torch.equal(by_gluon(**{**work.arguments, **changed})[:192], out[:192])


def test_a_row_of_100_000_tokens():
    q, k, v = (leaf(100_003, 1, 64) for _ in range(3))
    out = by_gluon(q, k=k, v=v, offsets=offsets_of((3, 100_000)), max_length=100_000, norm_length=1000)
    scores = torch.nn.functional.silu(k.detach()[3:, 0].double() @ q.detach()[-1, 0].double() / 8) / 1000
    assert_close(out[-1, 0], scores @ v.detach()[3:, 0].double(), bound=2e-2)


@pytest.mark.usefixtures("forms")
def test_two_runs_give_the_same_bits():
    work = work_of((700, 0, 65, 1), 128)
    first, second = ([out, *torch.autograd.grad(out.float().square().sum(), work.leaves())] for out in (by_gluon(**work.arguments) for _ in range(2)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
