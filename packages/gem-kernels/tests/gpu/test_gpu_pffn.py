"""pffn in bf16 with gelu_fast, whose queries are kept in two halves."""

import pytest
import torch
from gem_kernels_portable import compare, draw

from gem_kernels.bench.workloads import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_gpu(work):
    moved = {name: t.detach().cuda().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for name, t in work.arguments.items()}
    return Workload(work.op, moved, 0, 0.0)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_stay_in_the_bound_where_the_slope_jumps(seed, dim):
    work = on_gpu(draw("pffn", (5, 0, 200), dim=dim, dtype=torch.bfloat16, seed=seed, activation="gelu_fast"))
    work.arguments["k"] = (work.arguments["k"].detach() * 3).requires_grad_()
    compare(work)
