"""Declarations of the kernels. Imports no torch and no triton."""

from collections.abc import Sequence
from dataclasses import replace

from gem_core.spec import CliCommand, KernelImpl, hookimpl
from gem_kernels.adapters import ADAPTERS

_GDPA_FEATURES = (
    "cross",
    "window",
    "broadcast_q",
    "dense_kv",
    "gqa",
    "scale_after",
    "act_gelu",
    "act_gelu_tanh",
    "act_gelu_fast",
    "act_silu",
    "act_relu",
    "act_relu2",
    "act_leaky_relu",
    "act_hardswish",
    "act_identity",
)

_PFFN_FEATURES = ("scale_after", *(word for word in _GDPA_FEATURES if word.startswith("act_")))


def _sdpa(op: str, features: tuple[str, ...]) -> list[KernelImpl]:
    """Two variants: torch's backward on a GPU may add in any order, its CPU kernel does not."""
    return [
        KernelImpl(
            op=op,
            contract=1,
            backend="sdpa",
            variant=device,
            load=f"gem_kernels.ops.sdpa:{op}",
            devices=(device,),
            dtypes=("fp64", "fp32", "bf16", "fp16"),
            features=features,
            deterministic=device == "cpu",
            summary="padded rows through torch's scaled_dot_product_attention",
        )
        for device in ("cpu", "cuda")
    ]


_FLOATS = ("fp32", "bf16", "fp16")
_TUNING = "gem_kernels.common.tuning:where"
_MOVED = ("fp64", *_FLOATS, "int64", "int32", "bool")


def _portable(
    op: str, features: tuple[str, ...], check: str | None = "check", module: str | None = None, dtypes: tuple[str, ...] = _FLOATS
) -> KernelImpl:
    """A portable Triton kernel beside gdpa and jagged_attention; ``module`` under ``gem_kernels.ops`` where it is not that of the op."""
    return KernelImpl(
        op=op,
        contract=1,
        backend="triton",
        load=f"gem_kernels.ops.{module or f'{op}.launch'}:{op}",
        devices=("cuda", "interpreter"),
        dtypes=dtypes,
        min_arch=80,
        features=features,
        check=check and f"gem_kernels.ops.limits:{check}",
        requires=("triton",),
        summary="portable Triton, forward and backward without atomics",
    )


def _gluon(op: str, load: str, features: tuple[str, ...]) -> KernelImpl:
    return KernelImpl(
        op=op,
        contract=1,
        backend="gluon",
        load=load,
        devices=("cuda",),
        dtypes=("bf16", "fp16"),
        min_arch=90,
        max_arch=90,
        head_dims=(64, 128),
        features=features,
        requires=("triton",),
        summary="Hopper: copy engine, warp-specialised, without atomics",
    )


def _fp8(op: str, features: tuple[str, ...]) -> KernelImpl:
    return replace(
        _gluon(op, f"gem_kernels.ops.{op}.launch:gluon_fp8", features),
        backend="gluon_fp8",
        dtypes=("bf16",),
        head_dims=(128,),
        check="gem_kernels.ops.limits:check_unmeasured",
        summary="Hopper: forward on FP8 tensor cores, backward as gluon",
    )


@hookimpl
def gem_kernel_impls() -> Sequence[KernelImpl]:
    return [
        KernelImpl(
            op="gdpa",
            contract=1,
            backend="triton",
            load="gem_kernels.ops.gdpa.launch:gdpa",
            devices=("cuda", "interpreter"),
            dtypes=("fp32", "bf16", "fp16"),
            min_arch=80,
            features=_GDPA_FEATURES,
            check="gem_kernels.ops.limits:check_attention",
            requires=("triton",),
            configuration=_TUNING,
            summary="portable Triton, forward and backward without atomics",
        ),
        KernelImpl(
            op="jagged_attention",
            contract=1,
            backend="triton",
            load="gem_kernels.ops.jagged_attention.launch:triton",
            devices=("cuda", "interpreter"),
            dtypes=("fp32", "bf16", "fp16"),
            min_arch=80,
            features=("cross", "causal", "window", "broadcast_q", "bias", "gqa", "lse"),
            check="gem_kernels.ops.limits:check_attention",
            requires=("triton",),
            configuration=_TUNING,
            summary="portable Triton, forward and backward without atomics",
        ),
        _gluon("gdpa", "gem_kernels.ops.gdpa.launch:gluon", _GDPA_FEATURES),
        _gluon("jagged_attention", "gem_kernels.ops.jagged_attention.launch:gluon", ("cross", "causal", "window", "broadcast_q", "gqa", "lse")),
        _fp8("gdpa", ("cross", "dense_kv", "gqa", "scale_after", "act_gelu", "act_gelu_tanh", "act_silu")),
        _fp8("jagged_attention", ("cross", "gqa", "lse")),
        *_sdpa("jagged_attention", ("cross", "causal", "window", "broadcast_q", "bias", "gqa")),
        *_sdpa("pooled_attention", ("per_row_seeds", "gqa")),
        replace(_portable("block_attention", ("rope", "rope_v", "qk_norm"), "check_block_attention"), contract=2, configuration=_TUNING),
        replace(_gluon("hstu_attention", "gem_kernels.ops.hstu_attention.launch:gluon", ("causal", "noncausal", "window")), dtypes=("bf16",)),
        _portable("hstu_attention", ("causal", "noncausal", "window", "contextual", "targets", "bias"), "check_attention"),
        # On an H200 (self-L2048, self-u1024) 1.12 and 0.32 ms forward for 1.31 and 0.40 of triton, whose gradients it shares where few ask.
        _gluon("pooled_attention", "gem_kernels.ops.pooled_attention.hopper:gluon", ("per_row_seeds", "gqa")),
        _portable("pooled_attention", ("per_row_seeds", "gqa"), "check_attention"),
        _portable("norm_linear", ("rms", "layer", "before", "after", "affine", "residual", "return_sum")),
        _portable("add_norm", ("rms", "layer", "affine", "residual", "gate", "concat")),
        _portable("gated_residual", ()),
        replace(_gluon("pffn", "gem_kernels.ops.pffn.launch:gluon", _PFFN_FEATURES), check="gem_kernels.ops.limits:check_pffn_hopper"),
        _portable("pffn", _PFFN_FEATURES, "check_pffn"),
        *(_portable(op, (), None, "jagged.move", _MOVED) for op in ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad")),
        _portable("jagged_dense_bmm_add", (), module="jagged.product"),
        *ADAPTERS,
    ]


@hookimpl
def gem_cli_commands() -> Sequence[CliCommand]:
    return [
        CliCommand(name="kernels bench", load="gem_kernels.bench.cli:bench", summary="Time kernels on the published shapes, beside installed peers."),
        CliCommand(name="kernels tune", load="gem_kernels.bench.tune:tune", summary="Find the fastest tile shapes of portable kernels on this GPU."),
    ]
