"""``manifest.json``: what a run was made of."""

import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from gem_core.config.load import LoadedConfig, flat
from gem_core.plugins import LoadedPlugin
from gem_core.select.device import installed
from gem_core.select.policy import KernelChoice
from gem_core.spec import PrecisionDecision, TableSpec, Topology
from gem_core.train.efficiency import Peak
from gem_core.train.world import World

FORMAT = 1
_DISTRIBUTIONS = ("torch", "triton", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "numpy", "pydantic", "pluggy")


def versions(plugins: Iterable[LoadedPlugin]) -> dict[str, str]:
    """Versions of Python, of what numerics depend on, and of every distribution that brings a loaded plugin."""
    names = {*_DISTRIBUTIONS, *(p.distribution for p in plugins if p.status == "loaded")}
    found = {name: installed(name) for name in sorted(names)}
    return {"python": platform.python_version(), **{name: version for name, version in found.items() if version is not None}}


def kernel_rows(choices: Iterable[KernelChoice]) -> list[dict[str, Any]]:
    """One plain row for each chosen kernel: the request, the backend and the rule that chose it."""
    rows = []
    for choice in choices:
        request = asdict(choice.request) | {"features": sorted(choice.request.features)}
        rows.append({"op": choice.request.op, "backend": choice.backend, "variant": choice.impl.variant, "rule": choice.rule, "request": request})
    return rows


def config_rows(loaded: LoadedConfig, earlier: Iterable[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """``path``, ``value`` and ``origin`` of every value; a resumed run keeps the origin of what it did not change."""
    before = {row["path"]: row for row in earlier}
    rows = []
    for path, value in flat(loaded.config):
        same = path in before and before[path]["value"] == value
        rows.append({"path": path, "value": value, "origin": before[path]["origin"] if same else loaded.origins[path]})
    return rows


def manifest(
    *,
    config: list[dict[str, Any]],
    world: World,
    plugins: Iterable[LoadedPlugin],
    kernels: list[dict[str, Any]],
    decisions: Iterable[PrecisionDecision],
    strategies: Mapping[str, Mapping[str, Any]],
    topology: Topology,
    model: nn.Module,
    tables: Iterable[TableSpec],
    peak: Peak,
    resumed: list[dict[str, Any]],
    precision_events: list[dict[str, Any]],
) -> dict[str, Any]:
    """Plain values that say how the run can be made again."""
    plugins, tables = list(plugins), list(tables)
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "gem_run": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(plugins),
        "machine": {"system": f"{platform.system()} {platform.machine()}", "device": world.device.type, "name": name, "world": world.size},
        "peak": asdict(peak),
        "plugins": [{key: getattr(p, key) for key in ("name", "distribution", "version", "status", "error")} for p in plugins],
        "kernels": kernels,
        "precision": [asdict(decision) for decision in decisions],
        "precision_events": precision_events,
        "topology": asdict(topology),
        "parallel": {key: dict(value) for key, value in strategies.items()},
        "parameters": {
            "dense": sum(p.numel() for p in model.parameters()),
            "tables": sum(t.rows * t.dim for t in tables),
        },
        "tables": [{"name": t.name, "rows": t.rows, "dim": t.dim, "pooling": t.pooling, "features": list(t.features)} for t in tables],
        "config": config,
        "resumed": resumed,
        "arguments": sys.argv[1:],
    }
