"""pffn on a GPU by both backends: in bf16 with gelu_fast, whose queries are kept in two halves; at a model's sizes; where offsets leave 32 bits."""

import pytest
import torch
from gem_kernels_portable import compare, draw, offsets_of, results

from gem_core.spec import load_object
from gem_kernels.bench.workloads import Workload
from gem_kernels.plugin import gem_kernel_impls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
BACKENDS = ("triton", "gluon")


def by(backend):
    """The backend's function, without the checks of the public one: rows may be cut."""
    if backend == "gluon" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")
    (impl,) = [impl for impl in gem_kernel_impls() if impl.op == "pffn" and impl.backend == backend]
    return load_object(impl.load)


def on_gpu(work):
    moved = {name: t.detach().cuda().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for name, t in work.arguments.items()}
    return Workload(work.op, moved, 0, 0.0)


@pytest.mark.parametrize(("backend", "dim"), [("triton", 16), ("triton", 64), ("triton", 128), ("gluon", 64)])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_stay_in_the_bound_where_the_slope_jumps(seed, backend, dim):
    work = on_gpu(draw("pffn", (5, 0, 200), dim=dim, dtype=torch.bfloat16, seed=seed, activation="gelu_fast"))
    work.arguments["k"] = (work.arguments["k"].detach() * 3).requires_grad_()
    compare(work, by(backend))


def model_sized(lengths, heads, max_q):
    """128 keys a row, heads of 128."""
    g = torch.Generator("cuda").manual_seed(0)

    def leaf(*shape, scale=1.0):
        return (torch.randn(shape, generator=g, device="cuda") * scale).bfloat16().requires_grad_()

    k, v = leaf(len(lengths), 128, heads, 128, scale=0.1), leaf(len(lengths), 128, heads, 128)
    q0 = leaf(sum(lengths), heads, 128)
    return Workload("pffn", {"q0": q0, "k": k, "v": v, "q_offsets": offsets_of(lengths).cuda(), "max_q": max_q, "activation": "gelu"}, 0, 0.0)


@pytest.mark.parametrize("max_q", [1024, 100], ids=["whole", "cut"])
@pytest.mark.parametrize("heads", [4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_rows_of_all_lengths_are_as_accurate_as_plain_torch(backend, heads, max_q):
    lengths = torch.empty(16).log_normal_(3.7, 1.04, generator=torch.Generator().manual_seed(0)).long().clamp(0, 1024).tolist()
    compare(model_sized([*lengths, 1024, 0], heads, max_q), by(backend))


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_C08_the_last_of_more_than_2_31_elements_are_those_of_a_small_call(backend):
    """Three rows, of which the first is long and the last two are those of the small call."""
    long, tail, heads = 2**31 // 512 + 5, [70, 130], 4
    small = model_sized(tail, heads, 2**23)
    wanted = results(by(backend), small)
    q0, k, v = (small.arguments[name].detach() for name in ("q0", "k", "v"))
    large = Workload("pffn", {
        **small.arguments, "q_offsets": offsets_of([long, *tail]).cuda(),
        "q0": torch.cat([q0.new_zeros(long, heads, 128), q0]).requires_grad_(),
        "k": torch.cat([torch.zeros_like(k[:1]), k]).requires_grad_(), "v": torch.cat([torch.zeros_like(v[:1]), v]).requires_grad_(),
    }, 0, 0.0)  # fmt: skip
    out = large.call(by(backend))
    upstream = torch.linspace(-1, 1, wanted[0].numel(), dtype=torch.float64, device="cuda").view(wanted[0].shape).cos().to(out.dtype)
    dq, dk, dv = torch.autograd.grad(out, large.leaves(), torch.cat([out.new_zeros(long, heads, 128), upstream]))
    for mine, theirs in zip((out[long:], dq[long:], dk[1:], dv[1:]), wanted, strict=True):
        assert torch.equal(mine, theirs)
    assert not any(bool(t.any()) for t in (out[:long], dq[:long], dk[0], dv[0]))
