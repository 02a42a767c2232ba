"""Errors of products in each format, summed over the batches of a run; and what they take on its device."""

import json
import math
from collections import defaultdict
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor

from gem_core.spec import RequestError
from gem_precision.backends import Device, LinearShape
from gem_precision.probe.times import time_sites

FILE = "precision-probe.json"
FORWARD, LEFT, RIGHT = "forward", "first gradient", "second gradient"
"""The three products of a site: of a linear layer, the output, the gradient of the input and that of the weights."""


latest: list["Record"] = []
"""The record that grew last, for the notice that a run has finished: composing a run prepares models that never compute."""


class Record:
    """Sums over calls, by site, product and recipe: the energy of the exact product, and that of the difference to the low one."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], Tensor] = {}
        self._calls: dict[str, int] = defaultdict(int)
        self._met: dict[str, list[LinearShape]] = defaultdict(list)
        self._where: tuple[torch.device, torch.dtype] | None = None

    def add(self, site: str, product: str, recipe: str, exact: Tensor, low: Tensor) -> None:
        """One product; nothing is read back from the device."""
        energies = torch.stack([exact.double().square().sum(), (low.double() - exact.double()).square().sum()])
        key = (site, product, recipe)
        self._sums[key] = self._sums[key] + energies if key in self._sums else energies

    def called(self, site: str) -> None:
        self._calls[site] += 1
        latest[:] = [self]

    def met(self, site: str, x: Tensor, weight: Tensor) -> None:
        """A linear product ``[rows, in]`` with ``[out, in]``."""
        self._met[site].append(LinearShape(rows=x.shape[0], inputs=weight.shape[1], outputs=weight.shape[0]))
        kind = x.device.type
        self._where = x.device, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype

    def shapes(self) -> dict[str, LinearShape]:
        """The linear product of each site, with the median of the rows that it met."""
        return {site: sorted(shapes, key=lambda shape: shape.rows or 0)[len(shapes) // 2] for site, shapes in self._met.items()}

    def rows(self) -> list[dict[str, Any]]:
        """``{site, product, recipe, sqnr, calls}``; ``sqnr`` is the signal-to-quantisation-noise ratio in dB, None where a product was 0 or exact."""
        return [
            {"site": site, "product": product, "recipe": recipe, "sqnr": ratio(*sums.tolist()), "calls": self._calls[site]}
            for (site, product, recipe), sums in self._sums.items()
        ]

    def write(self, folder: Path) -> Path:
        """Time the linear products, and write ``precision-probe.json`` into a run's folder."""
        path, speed = folder / FILE, {} if self._where is None else time_sites(self.shapes(), *self._where)
        path.write_text(json.dumps({"format": 1, **speed, "rows": self.rows()}, indent=1))
        return path


def ratio(signal: float, noise: float) -> float | None:
    """``10 log10(signal / noise)``; None where either is 0; -999 for a noise that is not finite, which JSON has no word for."""
    if not math.isfinite(noise):
        return -999.0
    return 10 * math.log10(signal / noise) if signal > 0 and noise > 0 else None


def read_probe(path: Path) -> list[dict[str, Any]]:
    """The errors that a probe wrote: a file, or the folder that it stands in.

    Raises:
        RequestError: there is none, or it is of another format.
    """
    return list(_content(path)["rows"])


def all_times(path: Path) -> list[dict[str, Any]]:
    """The times that a probe wrote, as ``time_sites`` gives them, whatever device they are of; RequestError as ``read_probe``."""
    return list(_content(path).get("times", ()))


def read_times(path: Path, here: Device) -> list[dict[str, Any]]:
    """The times that a probe wrote on this device.

    Raises:
        RequestError: as ``read_probe``; or it has no times, or those of another device than ``here``.
    """
    content = _content(path)
    asked, do = f"the times of probe {path}", "Make one here (gem precision sweep), or set precision.options.order = 'given'."
    if "times" not in content:
        raise RequestError(asked, "it has none", do)
    measured = Device(**content["device"])
    if measured != here:
        raise RequestError(asked, f"they were measured on {measured.name} ({measured.type}), and this run computes on {here.name} ({here.type})", do)
    return list(content["times"])


def _content(path: Path) -> dict[str, Any]:
    file = path / FILE if path.is_dir() else path
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RequestError(f"probe {file}", f"it cannot be read ({error})", "Make one: gem precision sweep.") from error
    if not isinstance(content, dict) or content.get("format") != 1:
        raise RequestError(f"probe {file}", "it is of another format", "Make it again: gem precision sweep.")
    return content


def keep(probe: Path, folder: Path) -> None:
    """Put the probe that a run has chosen its formats by beside the run's other files, where the next run can find it."""
    file = probe / FILE if probe.is_dir() else probe
    if file.resolve() != (folder / FILE).resolve():
        copyfile(file, folder / FILE)


def worst(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """``{site: {recipe: the lowest SQNR of its products, dB}}``; a site whose products are all exact or zero has infinity."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        of_site = found.setdefault(row["site"], {})
        value = math.inf if row["sqnr"] is None else float(row["sqnr"])
        of_site[row["recipe"]] = min(value, of_site.get(row["recipe"], math.inf))
    return found
