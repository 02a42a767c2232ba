"""``gem plan``: what an engine plans is printed whole, and a plan that leaves a table out is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_core.batch import Jagged, KeyedJagged
from gem_core.cli.main import run
from gem_core.cli.plan import facts_of, topology_for, totals
from gem_core.cli.sizes import size
from gem_core.select.device import DeviceInfo
from gem_core.spec import RequestError, TableSpec

ENGINE = """
from gem_core.spec import EmbeddingPlan, MachineError, TablePlan

def load(tables, optimizer, *, device, seed):
    raise AssertionError("gem plan builds no tables")

def planned(tables, optimizer, *, topology, facts, leave_out=0, fits=True, pinned=True):
    if not fits:
        raise MachineError("tables", "too large", "Take more ranks.")
    world = topology.world
    lines = [
        TablePlan(table=t.name, rows=t.rows, dim=t.dim, sharding="even", where="all", bytes=1000 * i)
        for i, t in enumerate(tables)
    ]
    ids = sum(facts.ids.values())
    return EmbeddingPlan(
        world=world, tables=tuple(lines[leave_out:]), held=tuple(range(world)), working=5,
        sent={"ids": (8 * ids,) * world}, file="format = 1" if pinned else None,
    )

@hookimpl
def gem_embedding_engines():
    return [EmbeddingEngine(name="acme", summary="plans", load="acme_gem:load", plan="acme_gem:planned")]
"""


@pytest.fixture
def acme(install: Any) -> None:
    install("acme-gem", ENGINE)


def words(*more: str, world: int = 4) -> list[str]:
    return ["plan", "-c", "toy", "--world", str(world), "--set", "embedding.engine=acme", *more]


@pytest.mark.parametrize("world", [1, 4, 4096])
def test_case_F16_J07_the_plan_as_json_on_any_number_of_ranks(acme: None, capsys: pytest.CaptureFixture[str], world: int) -> None:
    assert run(words("--json", world=world)) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["engine"] == "acme"
    assert (out["world"], out["topology"]["world"]) == (world, world)
    assert len(out["held"]) == len(out["sent_total"]) == world
    assert {entry["table"] for entry in out["tables"]} == {"user", "item", "tags", "action"}
    assert out["facts"]["rows"] == pytest.approx(256 / world)
    assert out["sent_total"][0] == pytest.approx(8 * sum(out["facts"]["ids"].values()))
    assert not torch.distributed.is_initialized()


def test_facts_hardly_depend_on_the_number_of_ranks(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for world in (1, 8):
        run(words("--json", world=world))
        seen.append(json.loads(capsys.readouterr().out)["facts"]["ids"])
    for feature, ids in seen[0].items():
        assert 8 * seen[1][feature] == pytest.approx(ids, rel=0.5), feature


def test_case_J07_every_table_stands_once_and_the_largest_first(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("--machine", "h200")) == 0
    out = capsys.readouterr().out
    tables = [line.split()[0] for line in out.split("WITH STATE\n")[1].split("\n\n")[0].splitlines()]
    assert sorted(tables) == ["action", "item", "tags", "user"]
    assert tables[-1] == "user"  # it has no bytes
    assert "a device has 141 GB" in out
    assert "described by h200" in out


def test_unknown_memory_is_said(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words()) == 0
    assert "not checked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        (["--set", "embedding.options.leave_out=1"], 2, "does not have each of ['user'] once"),
        (["--set", "embedding.options.fits=false"], 3, "Take more ranks."),
        (["--set", "embedding.options.fit=false"], 2, "fits"),
        (["--set", "embedding.engine=torch"], 2, "Choose an engine that does: "),
        (["--machine", "h20"], 2, "h200"),
    ],
)
def test_what_cannot_be_planned_is_refused(acme: None, capsys: pytest.CaptureFixture[str], more: list[str], code: int, said: str) -> None:
    assert run(words(*more)) == code
    assert said in capsys.readouterr().err


def test_a_plan_file_is_written_where_there_is_something_to_pin(acme: None, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(words("--write", str(tmp_path / "plan.toml"))) == 0
    assert (tmp_path / "plan.toml").read_text() == "format = 1"
    assert run(words("--write", str(tmp_path / "other.toml"), "--set", "embedding.options.pinned=false")) == 2
    assert not (tmp_path / "other.toml").exists()


def test_facts_are_scaled_and_count_distinct_rows_of_a_table() -> None:
    two = Jagged(torch.tensor([1, 1, 5]), torch.tensor([0, 2, 3]), 2)
    ids = KeyedJagged.from_columns({"a": two, "b": Jagged(torch.tensor([5, 6]), torch.tensor([0, 1, 2]), 1)}, 2)
    table = TableSpec(name="t", rows=9, dim=4, features=("a", "b"), init_scale=1.0)
    facts = facts_of(ids, [table], 1.0)
    assert (facts.ids, facts.distinct) == ({"a": 1.5, "b": 1.0}, {"t": 1.5})


def test_sizes_totals_and_machines() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_234_567, 5e12, 2e18)] == ["0 B", "999 B", "1 kB", "1.23 MB", "5 TB", "2e+03 PB"]
    assert totals({"a": (1.0, 2.0), "b": (3.0, 4.0)}, 2) == (4.0, 6.0)
    assert totals({}, 3) == (0.0, 0.0, 0.0)
    assert topology_for(16, "h200").world == 16
    with pytest.raises(RequestError, match="no such machine"):
        topology_for(1, "b20")


@pytest.mark.parametrize(("name", "memory"), [("NVIDIA H200", 141 * 10**9), ("NVIDIA L4", None)])
def test_the_machine_at_hand_is_recognised(clean_host: None, monkeypatch: pytest.MonkeyPatch, name: str, memory: int | None) -> None:
    monkeypatch.setattr("gem_core.topology.detect.current_device", lambda: DeviceInfo(device="cuda", name=name))
    found = topology_for(4, None)
    assert (found.world, found.memory) == (4, memory)
