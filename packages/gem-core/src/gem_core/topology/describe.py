"""Descriptions of machines in TOML: shipped ones by name, and the user's own by path.

A description says what one device has, what the network's tiers carry, and in ``[sources]`` where each figure comes from: see docs/efficiency.md.
"""

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from gem_core.plugins.nearest import nearest
from gem_core.plugins.options import parse
from gem_core.spec import RequestError, Tier, Topology

Size = Annotated[int, Field(ge=1)]
Above = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class TierEntry(BaseModel):
    """``[[tiers]]``, innermost first; the fields of ``gem_core.spec.Tier``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    size: Size
    bandwidth: Above
    latency: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    oversubscription: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 1.0


class Description(BaseModel):
    """A machine of any number of ranks.

    ``device_name`` is a part of the name that the driver gives the device, by which the machine at hand is recognised. ``sources`` gives the source
    of every figure by its key; those of a tier by ``tiers.NAME``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["cpu", "cuda"]
    device_name: str = ""
    memory: Size | None = None
    memory_bandwidth: Above | None = None
    peak_flops: dict[str, Above] = Field(default_factory=dict)
    tiers: tuple[TierEntry, ...] = ()
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _tiers_grow(self) -> "Description":
        sizes = [tier.size for tier in self.tiers]
        if sorted(set(sizes)) != sizes:
            raise ValueError(f"tiers hold {sizes} devices: each must be larger than the one inside it")
        if len({tier.name for tier in self.tiers}) < len(sizes):
            raise ValueError("two tiers have one name")
        return self

    def topology(self, world: int, source: str) -> Topology:
        """The machine with ``world`` ranks.

        Raises:
            RequestError: the outermost tier holds fewer.
        """
        if self.tiers and world > self.tiers[-1].size:
            so = f"its outermost tier, {self.tiers[-1].name!r}, holds {self.tiers[-1].size}"
            raise RequestError(f"{world} ranks on {source}", so, "Plan for fewer ranks, or describe a larger machine in a file of your own.")
        return Topology(
            world=world,
            device=self.device,
            tiers=tuple(Tier(**tier.model_dump()) for tier in self.tiers),
            source=source,
            memory=self.memory,
            memory_bandwidth=self.memory_bandwidth,
            peak_flops=dict(self.peak_flops),
        )


def described(machine: str, world: int) -> Topology:
    """The topology of a shipped description by name, or of a file if the name ends in ``.toml``.

    Raises:
        RequestError: there is no such description or file, it says what it may not, or it is too small.
    """
    description = read(Path(machine)) if machine.endswith(".toml") else _shipped(machine)
    return description.topology(world, f"described by {machine}")


def shipped_names() -> list[str]:
    """Names of the shipped descriptions."""
    return sorted(entry.name.removesuffix(".toml") for entry in files(__package__).iterdir() if entry.name.endswith(".toml"))


def recognised(device_name: str) -> Description | None:
    """The shipped description of a device that has the driver's name, or None."""
    known = (_shipped(name) for name in shipped_names())
    return next((found for found in known if found.device_name and found.device_name.lower() in device_name.lower()), None)


def read(path: Path) -> Description:
    """A description from a file.

    Raises:
        RequestError: the file is missing, is no TOML, or says what a description may not.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"topology {path}", f"it cannot be read: {error}", f"Name a file, or one of {', '.join(shipped_names())}.") from error


@cache
def _shipped(name: str) -> Description:
    if name not in shipped_names():
        do = f"{nearest(name, shipped_names())} A file's name ends in .toml."
        raise RequestError(f"machine {name!r}", "there is no such machine", do)
    return _parsed(files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"), f"machine {name}")


def _parsed(text: str, where: str) -> Description:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"topology {where}", f"it is no TOML: {error}", "See the example in docs/efficiency.md.") from error
    return parse(Description, values, where)
