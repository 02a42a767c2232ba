"""Declarations of this package. Imports no torch and no pydantic."""

from collections.abc import Sequence

from gem_core.spec import CliCommand, PrecisionRecipe, hookimpl

_LOW = {
    "fp8_rowwise": "large linear layers in FP8 with a scale a row, emulated; the rest as bf16_islands",
    "fp8_block": "large linear layers in FP8 with scales for 1 x 128 and 128 x 128 blocks, emulated; the rest as bf16_islands",
    "mxfp8": "large linear layers in MXFP8, emulated exactly; the rest as bf16_islands",
    "mxfp4_mlp": "large linear layers in MXFP4 with MXFP8 gradients, emulated; experimental",
    "fp8_naive": "every linear layer in FP8 with one scale a tensor, emulated: what not to do, for comparison",
}


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
    ]


@hookimpl
def gem_cli_commands() -> Sequence[CliCommand]:
    return [CliCommand(name="precision", load="gem_precision.cli:app", summary="hold number formats to the quality of a run")]
