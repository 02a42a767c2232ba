"""The typed configuration of a run. Every key has a default, so an empty file is a valid configuration.

Values are read strictly: a bool is no number and a string is no bool. Plugins own the models of their ``options`` tables, which are checked when the
named implementation is built.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Rate = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Above = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Options = dict[str, Any]


class Section(BaseModel):
    """Base of all tables: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """`[run]`: what holds for the whole run."""

    seed: Count = Field(default=1, description="seed of weights, shuffling and dropout")
    out: str = Field(default="runs/run", description="run folder, relative to the working directory; runs/NAME for a configuration called NAME")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto takes CUDA where there is a device")
    threads: Count = Field(default=0, description="CPU threads of torch; 0 leaves torch's choice")


class PluginsSection(Section):
    """`[plugins]`: which plugins the run insists on."""

    require: tuple[Name, ...] = Field(default=(), description="plugins that must load; `gem plugins list` shows the names")


class DataSection(Section):
    """`[data]`: where rows come from."""

    source: Name = Field(default="ml-100k", description="a data source by name")
    batch_size: Positive = Field(default=1024, description="rows of a global training batch, over all ranks")
    eval_batch_size: Positive = Field(default=4096, description="rows of a global evaluation batch")
    options: Options = Field(default_factory=dict, description="the source's own options")


class ModelSection(Section):
    """`[model]`: what is trained."""

    name: Name = Field(default="gem", description="a model by name")
    options: Options = Field(default_factory=dict, description="the model's own options")


class ManagedTable(Section):
    """An entry of `[[embedding.ids]]`: tables whose ids get and lose rows while the model trains."""

    pattern: Name = Field(description="tables by name; `*` and `?` as in a shell, and the first entry that matches a table counts")
    rows: Annotated[int, Field(ge=2)] = Field(description="rows of such a table, whatever the number of ids")
    policy: Literal["distance_lfu", "lfu", "lru"] = Field(default="distance_lfu", description="which ids are worth least when a table is full")
    admit_after: Positive = Field(default=1, description="look-ups before an id may own a row")
    evict_every: Positive = Field(default=100, description="steps between evictions")
    buckets: Positive = Field(default=64, description="parts of a table that admit and evict on their own; at most one rank works on each")
    hashed_rows: Count = Field(default=0, description="rows that ids without a row share by hash; with 0 they share row 0")
    resized: Literal["error", "grow", "keep", "reset"] = Field(
        default="error",
        description="if a checkpoint has other rows, buckets or hashed rows: refuse it, move its best ids over, go on with its sizes, start afresh",
    )


class EmbeddingSection(Section):
    """`[embedding]`: how tables are stored and updated."""

    engine: Name = Field(default="torch", description="an embedding engine by name")
    optimizer: Literal["rowwise_adagrad", "sgd", "adam"] = Field(default="rowwise_adagrad", description="update rule of the tables")
    lr: Rate = Field(default=0.05, description="learning rate of the tables, before the schedule's factor")
    eps: Above = Field(default=1e-8, description="epsilon of the update rule")
    ids: tuple[ManagedTable, ...] = Field(default=(), description="tables whose ids get and lose rows while the model trains")
    options: Options = Field(default_factory=dict, description="the engine's own options")


class PrecisionSection(Section):
    """`[precision]`: number formats."""

    recipe: Name = Field(default="fp32", description="a precision recipe by name")
    options: Options = Field(default_factory=dict, description="the recipe's own options")


class ParallelSection(Section):
    """`[parallel]`: how the model is spread over ranks."""

    strategies: tuple[Name, ...] = Field(
        default=("single",), description="parallel strategies by name; their stages fix the order they are applied in"
    )
    options: dict[str, Options] = Field(default_factory=dict, description="options by strategy name")
    topology: str = Field(
        default="", description="the machine: a file that ends in .toml, or a shipped name; empty asks plugins and the machine itself"
    )


class KernelsSection(Section):
    """`[kernels]`: which backends run the ops."""

    use: dict[str, Name] = Field(default_factory=dict, description="backend by op; a named backend that does not fit is an error")
    prefer: tuple[Name, ...] = Field(default=("gluon", "triton", "reference"), description="backends in order, for ops that are not named")
    on_reference: Literal["warn", "error", "allow"] = Field(default="warn", description="when training on CUDA would fall to the slow reference")


class CompileSection(Section):
    """`[compile]`: torch.compile."""

    blocks: Literal["off", "default", "reduce-overhead"] = Field(
        default="off", description="compile each repeated block of the model, in a mode of torch.compile; reduce-overhead records CUDA graphs"
    )
    dynamic: Literal["auto", "always"] = Field(
        default="auto", description="auto compiles for the first batch's sizes, then for any; always for any from the start"
    )
    recompiles: Positive = Field(default=8, description="compilations of a block, after which the next one ends the run")
    graphs: Count = Field(
        default=0,
        description="CUDA graphs of forward and backward, for so many capacities at most, chosen by the sizes of the first batches; 0 is off",
    )


class OptimSection(Section):
    """`[optim]`: AdamW of the dense part, and the schedule of dense part and tables."""

    lr: Rate = Field(default=1e-3, description="learning rate of the dense part")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW's decay rates")
    eps: Above = Field(default=1e-8, description="AdamW's epsilon")
    weight_decay: AtLeastZero = Field(default=0.0, description="AdamW's decoupled weight decay")
    clip_norm: AtLeastZero = Field(default=1.0, description="largest norm of the dense gradients; 0 is off")
    accumulate: Positive = Field(default=1, description="batches a step")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="shape of the learning rate after warm-up")
    warmup_steps: Count = Field(default=0, description="steps of linear warm-up")
    final_lr_fraction: Fraction = Field(default=0.0, description="where linear and cosine end, as a fraction of the learning rate")


class TrainSection(Section):
    """`[train]`: the loop."""

    epochs: Positive = Field(default=1, description="passes over the training split")
    max_steps: Count = Field(default=0, description="stop after so many steps; 0 is no limit")
    eval_every: Count = Field(default=0, description="steps between evaluations; 0 evaluates at the end only")
    checkpoint_every: Count = Field(default=0, description="steps between checkpoints; 0 saves at the end only")
    checkpoint_last: bool = Field(default=True, description="save at the end; off for runs that only measure, which cannot go on")
    checkpoint_background: bool = Field(default=True, description="write checkpoints beside training, from a copy in host memory")
    log_every: Positive = Field(default=20, description="steps between log lines")
    steps_csv: bool = Field(default=False, description="write steps.csv: tokens, pairs, rows and computing seconds of every step and rank")
    trace: tuple[Positive, ...] = Field(default=(), description="steps whose timelines are written to trace/, for chrome://tracing")
    uneven: Literal["stop", "pad", "drop"] = Field(default="stop", description="what ranks do when their shares of the last rows differ")
    ahead: bool = Field(default=True, description="read, copy and send the ids of the next step's first batch while a step computes")
    shuffle: bool = Field(default=True, description="shuffle the training split each epoch")
    keep_checkpoints: Positive = Field(default=2, description="how many checkpoints stay on disk")
    ema_decay: Beta = Field(default=0.0, description="decay of averaged dense weights, used for evaluation; 0 is off")


class RunConfig(Section):
    """A whole run."""

    run: RunSection = RunSection()
    plugins: PluginsSection = PluginsSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    embedding: EmbeddingSection = EmbeddingSection()
    precision: PrecisionSection = PrecisionSection()
    parallel: ParallelSection = ParallelSection()
    kernels: KernelsSection = KernelsSection()
    compile: CompileSection = CompileSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
