"""From a checkpoint back into a run, whatever its number of ranks, layout and embedding engine; and what must not differ."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from gem_core.config.load import flat
from gem_core.config.schema import RunConfig
from gem_core.spec import Embeddings, GemError, PluginError, RequestError, Source
from gem_core.train.checkpoint.pieces import Piece, Pieces, pieces_of, table_pieces
from gem_core.train.checkpoint.saved import Saved, differing
from gem_core.train.world import World

log = logging.getLogger("gem_core.train")

MOVED_ROWS = 1 << 16
"""Rows of a table that are read at a time where single ones are taken over."""

FIXED = (
    "run.seed",
    "data.source",
    "data.batch_size",
    "model",
    "embedding.optimizer",
    "precision",
    "train.shuffle",
    "train.ema_decay",
)
"""Configuration that a resumed run cannot change: the data cursor, the weights or their state would mean something else."""


def verify_together(saved: Saved, world: World) -> None:
    """Verify a checkpoint's files, each on one rank. Collective.

    Raises:
        RunFailed: on every rank, what the first rank with a bad file found.
    """
    error: GemError | None = None
    try:
        saved.verify(share=world.rank, shares=world.size)
    except GemError as found:
        error = found
    errors: list[GemError | None] = world.gather_objects(error)
    for bad in errors:
        if bad is not None:
            raise bad


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """``{"dense/model/NAME": tensor}``, the model's own tensors."""
    return {f"dense/model/{name}": _tensor(name, value) for name, value in get_model_state_dict(model).items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """``{"dense/optimizer/SLOT/PARAMETER": tensor}``, the optimiser's own tensors. An optimiser that has made no step gets its state made."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    out = {}
    for key, value in get_optimizer_state_dict(model, optimizer, options=options).items():
        if key.startswith("state."):
            name, slot = key.removeprefix("state.").rsplit(".", 1)
            out[f"dense/optimizer/{slot}/{name}"] = _tensor(key, value)
    return out


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise PluginError(f"{name} of the state to save", f"it is a {type(value).__name__}", "A checkpoint holds tensors; keep it as a buffer.")
    return value


def restore_dense(model: nn.Module, saved: Saved, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load weights, and the optimiser's state when one is given; its learning rate and other settings stay as they are configured.

    Raises:
        RequestError: names or shapes differ from the model's.
    """
    own = model_tensors(model)
    theirs = [f"dense/model/{name}" for name in saved.names("dense/model/")]
    differ = differing([*own], theirs) or [name for name in own if tuple(own[name].shape) != saved.shape(name)]
    if differ:
        so = f"{len(differ)} weights have other names or shapes, the first is {differ[0].removeprefix('dense/model/')!r}"
        raise RequestError("the dense weights of the checkpoint", so, "Use the model and options the run was started with.")
    if optimizer is not None:
        state = optimizer_tensors(model, optimizer)
        own |= {name: tensor for name, tensor in state.items() if name in saved.index}
        _forget_new_state(model, optimizer, state, saved)
    saved.fill({name: pieces_of(tensor) for name, tensor in own.items()})


def _forget_new_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], saved: Saved) -> None:
    """A parameter that had never had a gradient when the checkpoint was made had no state either."""
    parameters = dict(model.named_parameters())
    for name in {name.split("/", 3)[3] for name in state if name not in saved.index}:
        optimizer.state.pop(parameters[name], None)


def average_tensors(average: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``{"dense/average/PARAMETER": tensor}``."""
    return {f"dense/average/{name}": tensor for name, tensor in average.items()}


def restore_average(average: Mapping[str, Tensor], saved: Saved) -> None:
    """Load averaged weights in place."""
    saved.fill({name: pieces_of(tensor) for name, tensor in average_tensors(average).items()})


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a table that has another size than in the checkpoint: ``new[i]`` is the checkpoint's ``old[i]``; all others stay as built."""

    new: Tensor
    old: Tensor


def restore_tables(embeddings: Embeddings, saved: Saved, *, updates: int | None, moves: Mapping[str, Move] | None = None) -> None:
    """Fill the tables of any engine; each process reads only the rows it keeps. Collective where the engine is.

    Args:
        updates: updates made so far; None for evaluation, which leaves the optimiser's state alone.
        moves: tables of which single rows are taken over.

    Raises:
        RequestError: the engine has other tables, sizes or optimiser state.
    """
    there = {name.rsplit("/", 1)[0] for name in saved.names("tables/")}
    differ = differing([*embeddings.table_names()], [*there])
    if differ:
        so = f"they differ in {differ[0]!r}"
        raise RequestError("the tables of the checkpoint", so, "Use the data and model options the run was started with.")
    own = table_pieces([piece for piece in embeddings.table_slices() if updates is not None or piece.name == "weight"])
    moved = {name: move for name in own if (move := (moves or {}).get(name.split("/", 1)[1].rsplit("/", 1)[0])) is not None}
    for name, held in own.items():
        if name not in saved.index:
            so = f"it has no {name.rsplit('/', 1)[1]!r}"
            raise RequestError(f"{name} of the checkpoint", so, "Use the optimiser of the checkpoint.")
        first = 1 if name in moved else 0
        if held.shape[first:] != saved.shape(name)[first:]:
            so = f"its shape is {list(saved.shape(name))}, this model wants {list(held.shape)}"
            raise RequestError(f"{name} of the checkpoint", so, "Use the data and model options the run was started with.")
    saved.fill({name: held for name, held in own.items() if name not in moved})
    for name, move in moved.items():
        for part in own[name].parts:
            _move_rows(saved, name, part, move)
    embeddings.tables_loaded(updates or 0)


@torch.no_grad()
def _move_rows(saved: Saved, name: str, part: Piece, move: Move) -> None:
    """Fill the rows of a part that come from other rows of the saved tensor, of which a block at a time is in memory."""
    here = (move.new >= part.offsets[0]) & (move.new < part.offsets[0] + part.tensor.shape[0])
    new, old = move.new[here] - part.offsets[0], move.old[here]
    total, *width = saved.shape(name)
    for first in range(0, total, MOVED_ROWS):
        block = torch.empty(min(MOVED_ROWS, total - first), *part.tensor.shape[1:], dtype=saved.dtype(name))
        saved.fill({name: Pieces((total, *width), block.dtype, [Piece((first, *part.offsets[1:]), block)])})
        inside = (old >= first) & (old < first + block.shape[0])
        part.tensor[new[inside].to(part.tensor.device)] = block[old[inside] - first].to(part.tensor)


def check_same_run(about: Mapping[str, Any], config: RunConfig) -> None:
    """Whether a checkpoint can go on under a configuration. What else differs is allowed, and told in the log.

    Raises:
        RequestError: a value of ``FIXED`` differs.
    """
    before, now = (dict(flat(c)) for c in (RunConfig.model_validate(about["config"]), config))
    for path in sorted(set(before) | set(now)):
        old, new = before.get(path), now.get(path)
        if old == new or path == "run.out":
            continue
        if any(path == fixed or path.startswith(f"{fixed}.") for fixed in FIXED):
            raise RequestError(f"resuming with {path} = {new!r}", f"the run was started with {old!r}", "Leave it as it was, or start a new run.")
        log.warning("resuming with %s = %r; the run was started with %r", path, new, old)


def data_facts(source: Source) -> dict[str, Any]:
    """What must be the same when a run goes on: rows and columns."""
    return {"rows": {split: source.rows(split) for split in ("train", "test")}, "schema": repr(source.schema())}


def check_same_data(about: Mapping[str, Any], source: Source) -> None:
    """Raise RequestError unless the source gives the rows and columns that the run was started with: a data cursor means nothing else."""
    facts = data_facts(source)
    for name, value in facts.items():
        if about["data"][name] != value:
            so = f"the data source gives {name} {value}, the run was started with {about['data'][name]}"
            raise RequestError("resuming", so, "Give the same data, or start a new run.")
