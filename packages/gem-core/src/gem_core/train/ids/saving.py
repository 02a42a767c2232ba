"""The ids in a checkpoint, and back, whatever the number of ranks; and tables whose sizes were changed in between.

``tables/TABLE/id``, ``id_row``, ``id_count`` and ``id_used`` ``[entries]`` lie beside the table's weights, in the order of the ids' keys. Ranks keep
ranges of keys, so the tensors do not depend on the number of ranks.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from gem_core.config.schema import ManagedTable
from gem_core.spec import RequestError, TableSpec
from gem_core.train.checkpoint.pieces import Piece, Pieces
from gem_core.train.checkpoint.restore import Move
from gem_core.train.checkpoint.saved import Saved
from gem_core.train.ids.idmap import NAMES, IdMap
from gem_core.train.ids.layout import Ints, Layout, layout_of, rules_by_table
from gem_core.train.ids.managed import ManagedIds
from gem_core.train.world import World

log = logging.getLogger("gem_core.train")

BLOCK = 1 << 20
"""Entries that a rank reads at a time, to keep its own of them."""


def saved_rules(saved: Saved) -> dict[str, ManagedTable]:
    """The managed tables of a checkpoint, with the sizes that they had."""
    return {name: ManagedTable.model_validate(rule) for name, rule in saved.about.get("ids", {}).items()}


def rules_for(tables: Sequence[TableSpec], rules: Sequence[ManagedTable], saved: Saved | None) -> dict[str, ManagedTable]:
    """The rule of each managed table; under ``resized = "keep"`` with the sizes of the checkpoint that the run goes on from.

    Raises:
        RequestError: as ``rules_by_table``.
    """
    found = rules_by_table(tables, rules)
    for name, before in (saved_rules(saved) if saved else {}).items():
        if name in found and found[name].resized == "keep" and layout_of(before) != layout_of(found[name]):
            found[name] = found[name].model_copy(update={key: getattr(before, key) for key in ("rows", "buckets", "hashed_rows")})
    return found


def ids_pieces(ids: ManagedIds, world: World) -> dict[str, Pieces]:
    """What this rank keeps, to be saved. Collective."""
    if not ids.maps:
        return {}
    counts = world.all_gather(torch.tensor([held.state.shape[1] for held in ids.maps.values()]))
    out: dict[str, Pieces] = {}
    for (table, held), of_ranks in zip(ids.maps.items(), counts.T.tolist(), strict=True):
        for name, column in zip(NAMES, held.state, strict=True):
            if column.size:
                part = Piece((sum(of_ranks[: world.rank]),), torch.from_numpy(column))
                out[f"tables/{table}/{name}"] = Pieces((sum(of_ranks),), torch.int64, [part])
    return out


def restore_ids(ids: ManagedIds, saved: Saved, world: World, *, clock: int) -> dict[str, Move]:
    """Load the ids; give the moves of rows in tables that have other sizes than in the checkpoint. Collective.

    Raises:
        RequestError: a table was managed and is not, or the reverse, or its sizes differ and the rule does not say what to do.
    """
    before = saved_rules(saved)
    if lost := sorted(set(before) - set(ids.maps)):
        so = f"it was trained with managed ids ({before[lost[0]].rows} rows), and the configuration has no rule for it"
        raise RequestError(f"table {lost[0]!r} of the checkpoint", so, "Put its entry back into embedding.ids.")
    ids.clock = clock
    moves: dict[str, Move] = {}
    for name, held in ids.maps.items():
        move = _restored(name, held, before.get(name), saved, clock)
        if move is not None:
            everywhere = world.gather_objects(move)
            rows = np.concatenate([move for move in everywhere if move.size] or [np.zeros((2, 0), np.int64)], axis=1)
            moves[name] = Move(*torch.from_numpy(rows[:, np.unique(rows[0], return_index=True)[1]]))
            ids.report.append(_report(name, held, before.get(name), moves[name]))
            log.warning("%s", ids.report[-1])
    return moves


def _restored(name: str, held: IdMap, before: ManagedTable | None, saved: Saved, clock: int) -> Ints | None:
    """Fill a map; rows ``[2, n]`` (new, old) that this rank's ids take along if the table's sizes differ."""
    if before is not None and layout_of(before) == held.layout:
        held.load(_entries(name, held, saved))
        return None
    if held.rule.resized in ("error", "keep") or (before is None and held.rule.resized != "reset"):
        was = "without managed ids" if before is None else f"with {_sizes(layout_of(before))}"
        fits = (
            "resized = 'reset' starts the table afresh"
            if before is None
            else "resized = 'grow' moves ids over, 'keep' leaves the sizes, 'reset' starts afresh"
        )
        so = f"it was trained {was}, and embedding.ids asks for {_sizes(held.layout)}"
        raise RequestError(f"table {name!r} of the checkpoint", so, f"Set its resized: {fits}.")
    if held.rule.resized == "reset":
        return np.zeros((2, 0), np.int64)
    held.load(_entries(name, held, saved))
    shared = np.arange(held.layout.first if before is not None and layout_of(before).hashed == held.layout.hashed else 1)
    return np.concatenate([np.stack([shared, shared]), held.place_again(clock)], axis=1)


def _entries(name: str, held: IdMap, saved: Saved) -> Ints:
    """``[4, n]``: the saved entries of this rank's buckets."""
    return np.concatenate([held.mine(block) for block in _blocks(name, saved)] or [np.zeros((4, 0), np.int64)], axis=1)


def _blocks(name: str, saved: Saved) -> Iterator[Ints]:
    names = [f"tables/{name}/{column}" for column in NAMES]
    total = saved.shape(names[0])[0] if names[0] in saved.index else 0  # a table that never saw an id has none
    for first in range(0, total, BLOCK):
        block = torch.empty(4, min(BLOCK, total - first), dtype=torch.int64)
        saved.fill({name: Pieces((total,), torch.int64, [Piece((first,), column)]) for name, column in zip(names, block, strict=True)})
        yield block.numpy()


def _sizes(layout: Layout) -> str:
    return f"{layout.rows} rows, {layout.hashed} of them hashed, in {layout.buckets} buckets"


def _report(name: str, held: IdMap, before: ManagedTable | None, move: Move) -> str:
    was = _sizes(layout_of(before)) if before is not None else "no managed ids"
    kept = int((move.new >= held.layout.first).sum())
    return f"table {name!r} changed from {was} to {_sizes(held.layout)} (resized = {held.rule.resized!r}): {kept} ids took their rows along"


def describe(maps: Mapping[str, IdMap]) -> dict[str, object]:
    """The rules of the tables, as ``about.json`` holds them."""
    return {name: held.rule.model_dump(mode="json") for name, held in maps.items()}
