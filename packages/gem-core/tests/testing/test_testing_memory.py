import pytest
import torch

from gem_core.ops.padded import widen
from gem_core.testing import plain_precision, poisoned_memory


def test_fresh_memory_is_poisoned():
    with poisoned_memory():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            assert torch.empty(100, dtype=dtype).isnan().all()
            assert torch.empty_like(torch.zeros(7, dtype=dtype)).isnan().all()
        assert (torch.empty(100, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
        assert torch.zeros(5).eq(0).all()


def test_everything_is_as_before_afterwards():
    before = torch.get_deterministic_debug_mode()
    with poisoned_memory():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_deterministic_debug_mode() == before
    with pytest.raises(ZeroDivisionError), poisoned_memory():
        _ = 1 / 0
    assert torch.get_deterministic_debug_mode() == before


def test_plain_precision_lets_references_compute_as_they_are_given():
    x = torch.ones(3, dtype=torch.bfloat16)
    assert widen(x).dtype == torch.float32
    with plain_precision():
        assert widen(x).dtype == torch.bfloat16
    assert widen(x).dtype == torch.float32
    assert widen(x.double()).dtype == torch.float64


def test_plain_torch_in_bf16_is_measurably_worse_than_the_reference():
    """Else the bound it sets for kernels would mean nothing."""
    from gem_core.ops.gdpa import reference

    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(40, 2, 16, generator=generator).bfloat16() for _ in range(3))
    offsets = torch.tensor([0, 40])
    truth = reference(q.double(), k.double(), v.double(), offsets, offsets, max_q=40, max_k=40)
    wide = reference(q, k, v, offsets, offsets, max_q=40, max_k=40)
    with plain_precision():
        plain = reference(q, k, v, offsets, offsets, max_q=40, max_k=40)
    assert plain.dtype == wide.dtype == torch.bfloat16
    assert (plain.double() - truth).abs().mean() > 1.5 * (wide.double() - truth).abs().mean()
