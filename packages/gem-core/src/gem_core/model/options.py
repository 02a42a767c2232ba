"""Options that the models share. Each model's own options lie beside it.

Unknown keys are errors. What depends on the schema as well is checked when the model is built.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Width = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
Activation = Literal["gelu", "gelu_tanh", "gelu_fast", "silu", "relu", "relu2", "leaky_relu", "hardswish", "identity"]


class Options(BaseModel):
    """Base of all option types: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FeatureOptions(Options):
    """How non-sequence features become tokens."""

    embedding_dim: Width = 32
    """Width of the embedding tables (bias columns of ``wide`` come on top)."""
    init_scale: float = Field(default=0.05, gt=0.0)
    """Tables start uniform in [-init_scale, init_scale]."""
    numbers: Literal["each", "group", "both"] = "each"
    """A token for each number, tokens made of all of them together, or both."""
    group_tokens: Width = 1
    """Tokens that are made of all numbers together."""
    compress: bool = True
    """Replace a number x by sign(x) log(1 + |x|) first: a fixed map, so a row's value does not depend on its batch."""
    frequencies: int = Field(default=4, ge=0)
    """Learned sine and cosine pairs that describe a number beside its value; 0 leaves the value alone."""
    norm: bool = True
    """LayerNorm over each token."""
    dropout: Rate = 0.0


class SequenceOptions(Options):
    """One event type. In ``sequences.NAME`` only the keys that differ from ``sequence`` are given."""

    dim: Width = 64
    heads: Width = 2
    layers: Width | None = None
    """Layers that work on this group; later ones reuse its last pooling. None: all."""
    pffn: Literal["gdpa", "fused", "off"] = "gdpa"
    """Personalised feed-forward: ``gdpa`` with projections of queries and output, ``fused`` the projection-free block of the ``pffn`` op."""
    keys_per_token: Width = 4
    """Generated key/value pairs for each source token (X_sum and targets): the hidden width of the personalised network."""
    activation: Activation = "gelu"
    tau: float | None = Field(default=None, gt=0.0)
    """Scores are divided by tau inside the activation; None: sqrt(dim / heads)."""
    attention: Literal["window", "block", "off"] = "window"
    window: int | None = Field(default=64, ge=0)
    """Events on each side that one event sees; None: all."""
    block: Width = 64
    rope: Literal["off", "position", "time"] = "position"
    """Rotary angles by the number of later events, with ``time`` plus log(1 + age / time_scale)."""
    time_scale: float = Field(default=3600.0, gt=0.0)
    """Seconds."""
    time_buckets: int = Field(default=32, ge=2)
    """Log-spaced buckets of the age of an event at the impression."""
    seeds: int = Field(default=4, ge=0)
    """Learned pooling queries shared by all rows."""
    queries: int = Field(default=2, ge=0)
    """Pooling queries generated for each row from X_sum."""
    pooled_tokens: Width | None = None
    """Tokens that the seeds are folded into by SumKronLinear; None keeps one a seed."""
    kron_rank: Width = 2
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = True
    """Of the linear maps of events. Each bias costs a pass over all events in backward; many large transformers have none."""
    dropout: Rate = 0.0


class WukongOptions(Options):
    """Factorisation-machine block and linear compression (Wukong, arXiv 2403.02545)."""

    kind: Literal["wukong"] = "wukong"
    rank: Width | None = 8
    """Width k of the factorisation X (X^T Y); None takes all pairs X X^T."""
    linear_tokens: int | None = Field(default=None, ge=0)
    """Output tokens of the linear part; None: half."""
    hidden: tuple[Width, ...] = (128,)
    dropout: Rate = 0.0


class CrossOptions(Options):
    """Low-rank cross network (DCN v2) over all tokens, then a map to the output tokens."""

    kind: Literal["cross"] = "cross"
    depth: Width = 1
    rank: Width = 16
    dropout: Rate = 0.0


class DeepOptions(Options):
    """Multi-layer perceptron over all tokens."""

    kind: Literal["deep"] = "deep"
    hidden: tuple[Width, ...] = (128,)
    dropout: Rate = 0.0


class LinearOptions(Options):
    """A linear map of tokens."""

    kind: Literal["linear"] = "linear"
    dropout: Rate = 0.0


ExpertOptions = Annotated[WukongOptions | CrossOptions | DeepOptions | LinearOptions, Field(discriminator="kind")]


class HeadOptions(Options):
    """From the last tokens to the logits."""

    hidden: tuple[Width, ...] = (64,)
    """Hidden widths of each task's network."""
    shared: tuple[Width, ...] = ()
    """Hidden widths of a network under all tasks."""
    numbers: bool = False
    """Give the heads the described numbers directly as well."""
    domain: str | None = None
    """A single id feature whose value picks the last layer: every domain has its own output of each task."""
    dropout: Rate = 0.0


class BaseModelOptions(Options):
    """What every model has."""

    features: FeatureOptions = FeatureOptions()
    head: HeadOptions = HeadOptions()
    wide: bool = False
    """Add a first-order term to the logits: a weight for each id and task, kept as further columns of its table."""


class MergedSequences(Options):
    """Sequence options by group: ``sequences.NAME`` overrides single keys of ``sequence``."""

    sequence: SequenceOptions = SequenceOptions()
    sequences: dict[str, SequenceOptions] = {}

    @field_validator("sequences", mode="before")
    @classmethod
    def _fill_up(cls, value: Any, info: ValidationInfo) -> Any:
        """Give each group the keys of ``sequence`` that it does not override, so that what is shown is what is used."""
        base = info.data.get("sequence")
        if base is None or not isinstance(value, Mapping):
            return value  # wrong in itself, and reported as such

        def filled(override: Any) -> Any:
            if isinstance(override, SequenceOptions):
                override = override.model_dump(include=override.model_fields_set)
            return {**base.model_dump(), **override} if isinstance(override, Mapping) else override

        return {name: filled(override) for name, override in value.items()}

    def group(self, name: str) -> SequenceOptions:
        """The options of one group."""
        return self.sequences.get(name, self.sequence)

    def named(self) -> list[tuple[str, SequenceOptions]]:
        """``sequence`` and each group of ``sequences`` with the path that errors name them by."""
        return [("sequence", self.sequence), *((f"sequences.{name}", options) for name, options in self.sequences.items())]

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        for where, options in self.named():
            if options.dim % options.heads:
                raise ValueError(f"{where}: dim {options.dim} is not a multiple of heads {options.heads}")
            if options.rope != "off" and options.attention != "off" and options.dim // options.heads % 2:
                raise ValueError(f"{where}: rope turns pairs, so dim / heads must be even; it is {options.dim // options.heads}")
        return self
