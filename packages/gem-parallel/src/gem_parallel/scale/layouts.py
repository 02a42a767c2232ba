"""The layouts that are compared, each with the settings that ask for it on a number of ranks. Imports no torch.

The rule for degrees is the same everywhere: 2, the smallest that is one. Experts are dealt out to pairs of neighbouring ranks, tables have two
replicas, and all ranks that are left shard, which on two ranks leaves one shard. Between one layout and the next a single thing changes.
"""

import json
from collections.abc import Mapping
from typing import Any

DEGREE = 2
"""Ranks that share out the experts; replicas of the tables."""
LAYOUTS = {
    "fsdp": "dense part sharded over all ranks, tables as the recipe has them",
    "fsdp-experts": "the same, with experts shared out to pairs of ranks",
    "fsdp-experts-2d": "the same, with tables by torchrec in two copies that are averaged",
    "fsdp-experts-sharded2d": "the same, with tables by sharded_2d: two replicas of a shard keep half of it each",
}
"""A line on each layout, by name."""
ENGINES = {"fsdp-experts-2d": "torchrec", "fsdp-experts-sharded2d": "sharded_2d"}
_DENSE = ("single", "ddp", "fsdp", "experts")


def why_not(layout: str, ranks: int) -> str | None:
    """Why a layout cannot be on so many ranks, or None. One rank is every layout's base."""
    if ranks == 1 or layout == "fsdp":
        return None
    if ranks % DEGREE:
        return f"{ranks} ranks cannot be divided into pairs that share out experts"
    return None


def settings_of(layout: str, ranks: int, config: Mapping[str, Any]) -> tuple[str, ...]:
    """``--set`` values of a layout.

    Args:
        ranks: a number on which the layout can be.
        config: the recipe's configuration: strategies that do not lay out the dense part stay, and so do the options of an engine that stays.
    """
    experts = layout != "fsdp" and ranks > 1
    others = [name for name in config["parallel"]["strategies"] if name not in _DENSE]
    strategies = [*(["experts"] if experts else []), "fsdp", *others]
    settings = [f"parallel.strategies={json.dumps(strategies)}"]
    if experts:
        settings.append(f"parallel.options.experts.degree={DEGREE}")
    configured = config["embedding"]["engine"]
    engine = ENGINES.get(layout, configured)
    if engine != configured:
        settings += [f'embedding.engine="{engine}"', "embedding.options={}"]
    if engine in ENGINES.values():
        settings.append(f"embedding.options.replicas={DEGREE if layout in ENGINES and ranks > 1 else 1}")
    return tuple(settings)
