"""The repeated blocks of a model, each compiled in place, and what that took.

A block is an entry of the model's list ``layers``, or what the model's method ``compiled_parts`` gives. It is compiled as it stands
(``Module.compile``), so names of parameters do not change, and checkpoints go from compiled runs to others. Batches differ in their number of
events: torch compiles for the first one's sizes, then again for any size (``dynamic = "auto"``). The longest row is a plain number to kernels, for
each of which torch would compile anew: the schema's stands in its place. More compilations of a block than ``compile.recompiles`` end the run,
where torch would go on without compiling and say nothing.

What is kept from the compiler (``torch.compiler.disable``), as low-precision layers are, cuts a block: what stands between the cuts is compiled piece
by piece, for the same kinds of input.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from gem_core.batch import Batch
from gem_core.config.schema import CompileSection
from gem_core.ops.slot import kernel_slots
from gem_core.spec import DataSchema, RequestError, RunFailed

BACKEND = "inductor"


class Compiled:
    """How many graphs this process has compiled while it was open, and the seconds that took."""

    def __init__(self) -> None:
        self.graphs, self.seconds = 0, 0.0
        self._begun = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count every compilation of this process; torch tells of the outermost ones only, so that their times add up."""
        from torch._dynamo.callback import callback_handler

        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            callback_handler.remove_start_callback(self._start)
            callback_handler.remove_end_callback(self._end)

    def told(self) -> dict[str, float]:
        """Plain values."""
        return {"graphs": self.graphs, "seconds": self.seconds}

    def _start(self, about: Any) -> None:
        self._begun = time.perf_counter()

    def _end(self, about: Any) -> None:
        self.graphs += 1
        self.seconds += time.perf_counter() - self._begun


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks: what the model's method ``compiled_parts`` gives, else the entries of its list of modules ``layers``.

    Raises:
        RequestError: the model has neither.
    """
    named: Callable[[], list[nn.Module]] | None = getattr(model, "compiled_parts", None)
    if named is not None:
        return named()
    found = getattr(model, "layers", None)
    if not isinstance(found, nn.ModuleList) or not found:
        so = f"{type(model).__name__} has no list of modules named layers"
        raise RequestError("compile.blocks", so, "Leave it off, or keep the repeated blocks of a model in such a list.")
    return list(found)


def bounded(batch: Batch, schema: DataSchema) -> Batch:
    """The batch with the schema's longest row in the place of its own, for every sequence; kernels take any bound that no row exceeds."""
    longest = {group.name: group.max_length for group in schema.sequences}
    spans = {name: replace(span, max_length=max(span.max_length, longest[name])) for name, span in batch.event_offsets.items()}
    return replace(batch, event_offsets=spans)


def sharing(found: Sequence[nn.Module]) -> int:
    """The most parts of ``found`` that run one function, by which torch counts compilations: the blocks, and where these are cut also the modules of
    one class or the kernel slots inside, which are then compiled on their own.
    """
    parts = [part for block in found for part in block.modules()]
    slots = [slot for block in found for slot in kernel_slots(block)]
    if not any(map(_kept_out, [*(part.forward for part in parts), *(slot._kernel for slot in slots)])):
        return len(found)
    return max(*Counter(map(type, parts)).values(), len(slots))


def _kept_out(function: Any) -> bool:
    """Whether the compiler does not look into a function, or into an object that is called as one."""
    return any(getattr(each, "_torchdynamo_disable", False) for each in (function, type(function).__call__))


@contextmanager
def compiled_blocks(model: nn.Module, options: CompileSection, schema: DataSchema) -> Iterator[Compiled]:
    """Compile the blocks of ``model``; they are when they first run. The limit on compilations holds for the process while this is open."""
    from torch._dynamo import config, reset

    found, compiled = blocks(model), Compiled()
    for block in found:
        block.compile(backend=BACKEND, mode=options.blocks, dynamic=True if options.dynamic == "always" else None)
    limit = options.recompiles * sharing(found)
    patch: Any = config.patch
    hook = model.register_forward_pre_hook(lambda module, inputs: (bounded(inputs[0], schema), *inputs[1:]))
    try:
        with patch(recompile_limit=limit, accumulated_recompile_limit=4 * limit, fail_on_recompile_limit_hit=True), compiled.watch():
            yield compiled
    finally:
        hook.remove()
        reset()  # what was compiled keeps memory that the next run of this process may want


@contextmanager
def limit_named(limit: int) -> Iterator[None]:
    """Torch's error at the limit on compilations as a RunFailed."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":  # named, as torch._dynamo is not imported where nothing is compiled
            raise
        so = f"a block was compiled for {limit} kinds of input, and met another one: {str(error).splitlines()[0]}"
        do = 'TORCH_LOGS=recompiles says what changed from call to call; raise compile.recompiles, or set compile.blocks = "off".'
        raise RunFailed("compiled blocks", so, do) from error
