"""Declarations of this package. Imports no torch and no pydantic."""

from collections.abc import Sequence

from gem_core.spec import PrecisionRecipe, hookimpl


@hookimpl
def gem_precision_recipes() -> Sequence[PrecisionRecipe]:
    return [
        PrecisionRecipe(
            name="bf16_islands",
            summary="matmuls and kernels in bfloat16, named modules in float32; parameters in float32",
            load="gem_precision.recipes.bf16_islands:Bf16Islands",
            options="gem_precision.options:Bf16IslandsOptions",
        )
    ]
