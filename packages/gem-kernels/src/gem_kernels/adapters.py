"""Declarations of the adapters: what other packages and torch itself bring, offered as backends. Imports no torch.

None stands in the default order of preference: they are taken where somebody names them, and they are the peers of the benchmark.
"""

from gem_core.spec import KernelImpl

_ATTENTION = ("cross", "causal", "window", "broadcast_q", "gqa", "lse")
_SIXTEEN = ("bf16", "fp16")


def _attention(backend: str, summary: str, *, requires: tuple[str, ...] = (), min_arch: int = 80, check: str) -> KernelImpl:
    """Softmax attention; all of them add the gradient of the queries with atomics or may do so."""
    return KernelImpl(
        op="jagged_attention",
        contract=1,
        backend=backend,
        load=f"gem_kernels.ops.{backend}:jagged_attention",
        devices=("cuda",),
        dtypes=_SIXTEEN,
        min_arch=min_arch,
        features=_ATTENTION,
        deterministic=False,
        check=f"gem_kernels.ops.limits:{check}",
        requires=requires,
        summary=summary,
    )


def _fbgemm(op: str, dtypes: tuple[str, ...]) -> KernelImpl:
    return KernelImpl(
        op=op,
        contract=1,
        backend="fbgemm",
        load=f"gem_kernels.ops.fbgemm:{op}",
        devices=("cpu",),
        dtypes=dtypes,
        requires=("fbgemm_gpu",),
        summary="jagged operators of fbgemm-gpu",
    )


ADAPTERS = (
    _attention("varlen", "FlashAttention 2 as torch brings it", check="check_attention"),
    _attention("fa4", "FlashAttention 4 in CuTe, from flash-attn-4", requires=("flash_attn", "cutlass"), min_arch=90, check="check_fa4"),
    _attention("flex", "padded rows through torch's FlexAttention, compiled", requires=("triton",), check="check_flex"),
    _fbgemm("jagged_pad", ("fp32", "bf16", "fp16", "int64", "int32")),
    _fbgemm("jagged_unpad", ("fp32", "bf16", "fp16", "int64", "int32")),
    _fbgemm("jagged_dense_bmm_add", ("fp32",)),
)
