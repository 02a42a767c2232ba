"""Descriptions of machines: shipped ones give a source for every figure, and a wrong file is refused before anything is planned."""

from pathlib import Path

import pytest

from gem_core.config.load import load_config
from gem_core.spec import RequestError, Tier
from gem_core.topology.describe import Description, TierEntry, described, read, recognised, shipped_names

OWN = """
device = "cuda"
memory = 24_000_000_000
[[tiers]]
name = "host"
size = 4
bandwidth = 25e9
[[tiers]]
name = "room"
size = 64
bandwidth = 12.5e9
latency = 2e-5
oversubscription = 4.0
"""


def unsourced(description: Description) -> list[str]:
    """Figures without a source."""
    wanted = ["memory", "memory_bandwidth", "peak_flops", *(f"tiers.{tier.name}" for tier in description.tiers)]
    return [key for key in wanted if not description.sources.get(key)]


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_machines_are_whole_and_sourced(name: str) -> None:
    found = described(name, 4096)
    assert (found.world, found.device, [tier.name for tier in found.tiers]) == (4096, "cuda", ["host", "zone", "region"])
    assert found.memory is not None
    assert found.memory >= 80 * 10**9
    assert found.peak_flops["bf16"] > found.peak_flops["tf32"] > found.peak_flops["fp32"]
    assert [tier.size for tier in found.tiers] == [8, 3072, 24576]
    description = recognised(f"NVIDIA {name.upper()} 8x")
    assert description is not None
    assert unsourced(description) == []


def test_a_missing_source_is_seen() -> None:
    found = recognised("NVIDIA H200")
    assert found is not None
    assert unsourced(found.model_copy(update={"sources": {k: v for k, v in found.sources.items() if k != "memory"}})) == ["memory"]
    more = (*found.tiers, TierEntry(name="moon", size=1 << 20, bandwidth=1.0))
    assert unsourced(found.model_copy(update={"tiers": more})) == ["tiers.moon"]


def test_other_devices_are_not_recognised() -> None:
    assert recognised("NVIDIA L4") is None
    assert recognised("CPU") is None


def test_a_file_describes_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    found = described(str(file), 8)
    assert found.tiers[1] == Tier(name="room", size=64, bandwidth=12.5e9, latency=2e-5, oversubscription=4.0)
    assert found.tiers[1].share == 12.5e9 / 4
    assert (found.memory, found.memory_bandwidth, dict(found.peak_flops)) == (24 * 10**9, None, {})
    assert str(file) in found.source


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("size = 64", "size = 4"), "larger than the one inside it"),
        (("size = 64", "size = 2"), "larger than the one inside it"),
        (('name = "room"', 'name = "host"'), "two tiers have one name"),
        (("bandwidth = 25e9", "bandwidth = 0.0"), "greater than 0"),
        (("oversubscription = 4.0", "oversubscription = 0.5"), "greater than or equal to 1"),
        (("latency = 2e-5", "latency = nan"), "latency"),
        (("memory = ", "memmory = "), "memory"),
        (('device = "cuda"', ""), "device"),
        (("[[tiers]]", "[[tiers"), "no TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN.replace(*change))
    assert file.read_text() != OWN
    with pytest.raises(RequestError, match=said):
        read(file)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot be read.*h100, h200"):
        described(str(tmp_path / "none.toml"), 2)
    with pytest.raises(RequestError, match="h200"):
        described("h20", 2)
    with pytest.raises(RequestError, match="holds 24576"):
        described("h100", 30_000)


def test_a_configuration_names_a_machine(clean_host: None) -> None:
    from gem_core.train.compose import STAGES
    from gem_core.train.composed import Run

    run = Run(load_config("toy", ["parallel.topology=b200"]))
    (stage,) = [stage for stage in STAGES if stage.name == "topology"]
    assert stage.do is not None
    stage.do(run)
    assert run.topology.tiers[0].bandwidth == 900e9
    wrong = Run(load_config("toy", ["parallel.topology=b20"]))
    with pytest.raises(RequestError, match="b200"):
        stage.do(wrong)
