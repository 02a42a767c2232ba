"""When sites turn low: not before a step, one after another, or not at all in the last layers."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from gem_core.spec import RequestError
from gem_precision.options import RampOptions
from gem_precision.probe.record import read_probe, worst

LAYERS = "layers"
"""The name of the list of modules whose last members ``keep_last`` means."""


def low_from(presets: Mapping[str, str], ramp: RampOptions | None) -> dict[str, int]:
    """The first step, counted from 1, that each site computes low in.

    All sites begin with ``ramp.start``; with ``ramp.end`` the least sensitive by the probe does, the most sensitive with ``end``, and the others in
    even distances between. A site that the probe did not meet counts as the most sensitive.

    Args:
        presets: by site, the recipe whose formats it is going to have.
    """
    if ramp is None:
        return dict.fromkeys(presets, 1)
    if ramp.end is None or ramp.probe is None:
        return dict.fromkeys(presets, ramp.start)
    ordered = by_sensitivity(presets, ramp.probe)
    gaps = max(1, len(ordered) - 1)
    return {name: ramp.start + place * (ramp.end - ramp.start) // gaps for place, name in enumerate(ordered)}


def by_sensitivity(presets: Mapping[str, str], probe: Path) -> Sequence[str]:
    """The sites, the least sensitive first: highest SQNR of their worst product in their own format; equal ones in the order given."""
    measured = worst(read_probe(probe))
    return sorted(presets, key=lambda name: -measured.get(name, {}).get(presets[name], -math.inf))


def last_layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """Names of the last ``count`` members of the outermost list called ``layers``.

    Raises:
        RequestError: the model has no such list, or a shorter one.
    """
    if not count:
        return ()
    found = next(((name, part) for name, part in model.named_modules() if name.rpartition(".")[2] == LAYERS and _is_list(part)), None)
    if found is None or len(found[1]) < count:
        so = f"the model has no list of modules called {LAYERS!r}" if found is None else f"{found[0]!r} has {len(found[1])}"
        raise RequestError(f"precision.options.keep_last = {count}", so, "Name modules by patterns in precision.options.high.")
    return tuple(f"{found[0]}.{i}" for i in range(len(found[1]) - count, len(found[1])))


def _is_list(part: Any) -> bool:
    return isinstance(part, nn.ModuleList | nn.Sequential)
