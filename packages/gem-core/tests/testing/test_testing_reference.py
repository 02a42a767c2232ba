"""Core's own reference backend through the suite that strangers run, in the dtypes that are quick on a CPU."""

import pytest

from gem_core.builtin.kernels import OPS
from gem_core.testing import conformance_suite
from gem_core.testing.conformance import make_plan
from gem_core.testing.trial import check

TestGdpaReference = conformance_suite("gdpa", backend="reference", device="cpu", dtypes=["fp32"])
TestJaggedAttentionReference = conformance_suite("jagged_attention", backend="reference", device="cpu", dtypes=["fp32"])


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("op", [op.name for op in OPS])
def test_reference_is_as_accurate_as_plain_torch_in_every_dtype(op, dtype):
    plan = make_plan(op, backend="reference", device="cpu", dtypes=[dtype])
    assert plan.trials
    assert not plan.skipped
    for trial in plan.trials[:: 4 if len(plan.trials) > 20 else 2]:
        check(trial, plan.op)
