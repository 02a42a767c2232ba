"""Declarations only: listing plugins imports no torch."""

from gem_core.spec import KernelImpl, hookimpl

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_fast", "silu", "relu", "relu2", "leaky_relu", "hardswish", "identity")


@hookimpl
def gem_kernel_impls() -> list[KernelImpl]:
    return [
        KernelImpl(
            op="gdpa",
            contract=1,
            backend="acme",
            load="acme_gem_backend.gdpa:gdpa",
            devices=("cpu", "interpreter", "cuda"),
            dtypes=("fp64", "fp32", "bf16", "fp16"),
            features=("cross", "window", "broadcast_q", "dense_kv", "gqa", "scale_after", *(f"act_{name}" for name in ACTIVATIONS)),
            summary="one row at a time, no padding",
        )
    ]
