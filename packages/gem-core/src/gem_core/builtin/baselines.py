"""Kernels to compare with: ``padded`` and ``bucketed``, unfused torch in the dtype of the inputs. In no default preference. Imports no torch."""

from gem_core.builtin.kernels import OPS
from gem_core.spec.kernels import DEVICES, KernelImpl

ATTENTION = ("jagged_attention", "gdpa", "hstu_attention", "pooled_attention")
"""Ops whose cost is in the scores; the other baselines are norms, gates and blocks."""
_UNDECLARED = ("bias", "lse")
"""Features that the parts of a call could not share."""
_SUMMARIES = {
    "padded": "plain torch in the dtype of its inputs, every row padded to the longest: a baseline",
    "bucketed": "plain torch in the dtype of its inputs, rows padded within buckets of alike length: a baseline",
}

BASELINE_OPS = tuple(op for op in OPS if not op.name.startswith("jagged_") or op.name in ATTENTION)
BASELINE_KERNELS = tuple(
    KernelImpl(
        op=op.name,
        contract=op.contract,
        backend=backend,
        load=f"gem_core.ops.baselines:{backend}_{op.name}",
        devices=DEVICES,
        dtypes=("fp64", "fp32", "bf16", "fp16"),
        features=tuple(word for word in op.features if word not in _UNDECLARED),
        summary=summary,
    )
    for op in BASELINE_OPS
    for backend, summary in _SUMMARIES.items()
)
