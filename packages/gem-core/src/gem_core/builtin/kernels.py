"""Core's ops and the reference kernel of each. Declarations only: imports no torch."""

from gem_core.spec.kernels import DEVICES, DTYPES, KernelImpl, OpSpec

ACTIVATIONS = ("gelu", "gelu_tanh", "gelu_fast", "silu", "relu", "relu2", "leaky_relu", "hardswish", "identity")
_ACTIVATION_WORDS = tuple(f"act_{name}" for name in ACTIVATIONS)
_FLOATS = ("fp64", "fp32", "bf16", "fp16")


def _op(name: str, summary: str, features: tuple[str, ...] = (), module: str = "", prefix: str = "", contract: int = 1) -> OpSpec:
    path = f"gem_core.ops.{module or name}:{prefix}"
    return OpSpec(name=name, contract=contract, features=features, reference=f"{path}reference", flops=f"{path}flops", summary=summary)


OPS = (
    _op(
        "jagged_attention",
        "softmax attention over packed rows: self, cross, causal, window, shared query, bias",
        ("cross", "causal", "window", "broadcast_q", "bias", "lse", "gqa"),
    ),
    _op(
        "gdpa",
        "attention with a pointwise activation in the place of softmax",
        ("cross", "window", "broadcast_q", "dense_kv", "gqa", "scale_after", *_ACTIVATION_WORDS),
    ),
    _op(
        "block_attention",
        "softmax attention inside diagonal blocks, with norms of queries and keys and rotary embedding",
        ("rope", "rope_v", "qk_norm"),
        contract=2,
    ),
    _op(
        "hstu_attention",
        "SiLU attention of HSTU with contextual prefix, targets and relative bias",
        ("causal", "noncausal", "window", "contextual", "targets", "bias"),
    ),
    _op("pooled_attention", "learned seeds attend to long jagged rows", ("per_row_seeds", "gqa")),
    _op(
        "norm_linear",
        "RMSNorm or LayerNorm before or after a matmul, with residual",
        ("rms", "layer", "before", "after", "affine", "residual", "return_sum"),
    ),
    _op("add_norm", "RMSNorm or LayerNorm of a sum, with a gate behind it", ("rms", "layer", "affine", "residual", "gate", "concat")),
    _op("gated_residual", "gate times x plus residual"),
    _op("pffn", "LayerNorm, gdpa on dense keys, residual and RMSNorm in one", ("scale_after", *_ACTIVATION_WORDS)),
    _op("jagged_concat", "join jagged tensors row by row", module="jagged", prefix="concat_"),
    _op("jagged_split", "undo jagged_concat", module="jagged", prefix="split_"),
    _op("jagged_pad", "packed rows to padded rows", module="jagged", prefix="pad_"),
    _op("jagged_unpad", "padded rows to packed rows", module="jagged", prefix="unpad_"),
    _op("jagged_dense_bmm_add", "each packed row times its own matrix plus its own bias", module="jagged", prefix="bmm_"),
)
_MOVING = ("jagged_concat", "jagged_split", "jagged_pad", "jagged_unpad")

REFERENCE_KERNELS = tuple(
    KernelImpl(
        op=op.name,
        contract=op.contract,
        backend="reference",
        load=op.reference,
        devices=DEVICES,
        dtypes=DTYPES if op.name in _MOVING else _FLOATS,
        features=op.features,
        summary="plain torch, padded rows, float64-able",
    )
    for op in OPS
)
