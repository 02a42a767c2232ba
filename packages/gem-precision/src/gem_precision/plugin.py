"""Declarations of this package. Imports no torch and no pydantic."""

from collections.abc import Sequence
from pathlib import Path

from gem_core.spec import CliCommand, KernelImpl, PrecisionRecipe, RunInfo, StepInfo, hookimpl

_LOW = {
    "fp8_rowwise": "large linear layers and attention in FP8 with a scale a row, emulated; the rest as bf16_islands",
    "fp8_block": "large linear layers and attention in FP8 with scales for 1 x 128 and 128 x 128 blocks, emulated; the rest as bf16_islands",
    "fp8_square": "large linear layers in FP8 with scales for 128 x 128 blocks, 1 x 128 of gradients, emulated; the rest as bf16_islands",
    "mxfp8": "large linear layers and attention in MXFP8, emulated exactly; the rest as bf16_islands",
    "mxfp4_mlp": "large linear layers in MXFP4 with MXFP8 gradients, emulated; experimental",
    "fp8_naive": "every linear layer and attention in FP8 with one scale a tensor, emulated: what not to do, for comparison",
}
_NO_ATTENTION = ("fp8_square", "mxfp4_mlp")
_ACTIVATIONS = tuple(f"act_{name}" for name in ("gelu", "gelu_tanh", "gelu_fast", "silu", "relu", "relu2", "leaky_relu", "hardswish", "identity"))

LOW_OPS = {
    "jagged_attention": ("cross", "causal", "window", "broadcast_q", "bias", "lse", "gqa"),
    "gdpa": ("cross", "window", "broadcast_q", "dense_kv", "gqa", "scale_after", *_ACTIVATIONS),
    "block_attention": ("rope", "rope_v", "qk_norm"),
    "hstu_attention": ("causal", "noncausal", "window", "contextual", "targets", "bias"),
    "pooled_attention": ("per_row_seeds", "gqa"),
    "pffn": ("scale_after", *_ACTIVATIONS),
    "norm_linear": ("rms", "layer", "before", "after", "affine", "residual", "return_sum"),
}
"""Ops that multiply matrices, with the features that the emulated backends have: those of the references."""
_CONTRACTS = {"block_attention": 2}
"""The contracts that they were written for; 1 for the others."""


def emulated(recipe: str) -> str:
    """The kernel backend that emulates the formats of a recipe."""
    return f"{recipe}_emulated"


@hookimpl
def gem_kernel_impls() -> Sequence[KernelImpl]:
    return [
        *(
            KernelImpl(
                op="norm_linear",
                contract=1,
                backend=f"{recipe}_native",
                load=f"gem_precision.native_ops:{function}",
                devices=("cuda",),
                dtypes=("bf16",),
                min_arch=90,
                max_arch=90,
                features=("rms", "layer", "before", "affine", "residual", "return_sum"),
                requires=("triton",),
                summary=f"FP8 products in the formats of {recipe}; the norm adds a residual and writes what they read",
            )
            for recipe, function in (("fp8_block", "norm_linear"), ("fp8_square", "square_norm_linear"))
        ),
        *(
            KernelImpl(
                op=op,
                contract=_CONTRACTS.get(op, 1),
                backend=emulated(recipe),
                load=f"gem_precision.emulated:{op}__{recipe}",
                devices=("cpu", "cuda", "interpreter"),
                dtypes=("fp32", "bf16", "fp16"),
                features=features,
                summary=f"the reference with operands of the recipe {recipe}; for quality, not for speed",
            )
            for recipe in _LOW
            for op, features in LOW_OPS.items()
            if recipe not in _NO_ATTENTION or op == "norm_linear"
        ),
    ]


@hookimpl
def gem_precision_recipes() -> Sequence[PrecisionRecipe]:
    return [
        PrecisionRecipe(
            name="bf16_islands",
            summary="matmuls and kernels in bfloat16, named modules in float32; parameters in float32",
            load="gem_precision.recipes.bf16_islands:Bf16Islands",
            options="gem_precision.options:Bf16IslandsOptions",
        ),
        *(
            PrecisionRecipe(
                name=name,
                summary=summary,
                load=f"gem_precision.recipes.low_precision:{name}",
                options="gem_precision.options:LowPrecisionOptions",
            )
            for name, summary in _LOW.items()
        ),
        PrecisionRecipe(
            name="auto",
            summary="each site in the first of a list of formats whose measured error keeps within a bound, emulated",
            load="gem_precision.recipes.auto:Auto",
            options="gem_precision.options:AutoOptions",
        ),
        PrecisionRecipe(
            name="probe",
            summary="as bf16_islands, and records what each low-precision recipe would get wrong, site by site",
            load="gem_precision.recipes.probe:Probe",
            options="gem_precision.options:ProbeOptions",
        ),
    ]


@hookimpl
def gem_run_started(run: RunInfo) -> None:
    """A run whose formats a probe has chosen keeps the probe, and says what it has chosen."""
    if run.rank == 0 and run.config["precision"]["recipe"] == "auto":
        from gem_precision.probe.record import keep
        from gem_precision.probe.report import decided

        keep(Path(run.config["precision"]["options"]["probe"]), run.folder)
        decided(run.folder)


@hookimpl
def gem_step_finished(run: RunInfo, step: StepInfo) -> None:
    """With ``precision.options.telemetry``, rank 0 writes what it saw of its operands since the last logging step."""
    if run.rank == 0 and run.config["precision"]["options"].get("telemetry"):
        from gem_precision.telemetry import append

        append(run.folder, step.step)


@hookimpl
def gem_run_finished(run: RunInfo) -> None:
    """A probing run leaves the record of its first rank beside its other files."""
    if run.rank == 0 and run.config["precision"]["recipe"] == "probe":
        from gem_precision.probe.record import Record, latest

        (latest or [Record()])[0].write(run.folder)


@hookimpl
def gem_cli_commands() -> Sequence[CliCommand]:
    return [CliCommand(name="precision", load="gem_precision.cli:app", summary="hold number formats to the quality of a run")]
