"""``gem plan``: a strategy's answer is asked for with the model's facts and printed whole."""

import json
from pathlib import Path
from typing import Any

import pytest

from gem_core.cli.main import run
from gem_core.cli.plan_step import assumptions, time
from gem_core.spec import RequestError

PLUGIN = """
from gem_core.spec import EmbeddingPlan, LayoutPlan, MachineError, StepPlan, TablePlan

def load(*args, **keywords):
    raise AssertionError("gem plan builds nothing")

def tables(tables, optimizer, *, topology, facts, replicas=1):
    if replicas == 8:
        raise MachineError("tables", "too large", "Take more ranks.")
    lines = tuple(TablePlan(table=t.name, rows=t.rows, dim=t.dim, sharding="even", where="all", bytes=replicas) for t in tables)
    return EmbeddingPlan(world=topology.world, tables=lines, held=(replicas,) * topology.world, working=0, sent={})

def step(request):
    held = request.tables(request.table_replicas).held[0]
    layouts = tuple(
        LayoutPlan(
            axes={"replicate": 1, "shard": 2, "expert": 1, "sparse_shard": 2, "sparse_replicate": 1},
            seconds=0.5 + i, parts={"forward": 0.25 + i, "waiting": 0.25, "nothing": 0.0}, communication={"gather": 0.1}, sent={"gather": 8.0},
            memory={"tables": float(held), "weights": 4.0 * sum(b.parameters for b in request.model.blocks)}, local_mfu=0.4, scaling=0.5,
            samples_per_second=request.batch.rows * request.micro_batches, binding="waiting", fits=False, settings=("a.b=1",), why=("because",),
        )
        for i in range(max(1, request.best))
    )
    assumed = tuple(f"{name} = {value:g}" for name, value in (request.assume or {}).items())
    return StepPlan(layouts=layouts, considered=len(layouts), refused={"too small": 3}, drawing=("[0][1]",), assumptions=assumed)

@hookimpl
def gem_embedding_engines():
    return [EmbeddingEngine(name="acme", summary="plans", load="acme_gem:load", plan="acme_gem:tables")]

@hookimpl
def gem_parallel_strategies():
    return [ParallelStrategy(name="acme", stage="dense", summary="plans", load="acme_gem:load", plan="acme_gem:step")]
"""


@pytest.fixture
def acme(install: Any) -> None:
    install("acme-gem", PLUGIN)


def words(*more: str, strategy: str = "acme") -> list[str]:
    sets = ["--set", "embedding.engine=acme", "--set", f'parallel.strategies=["{strategy}"]']
    return ["plan", "-c", "toy", "--world", "2", "--machine", "h100", *sets, *more]


def test_the_step_is_printed(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("--assume", "matmul=0.5")) == 0
    out = capsys.readouterr().out
    for said in ("[0][1]", "- because", "bound by waiting", "local MFU 40.0% x scaling ratio 50.0% = MFU 20.0%", "--set 'a.b=1'", "matmul = 0.5"):
        assert said in out
    assert "more than a device has" in out
    assert "forward  250 ms         50.0%" in out
    assert "nothing" not in out  # a part that takes no time
    assert "TABLE" in out


def test_a_search_prints_the_best(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("--search", "3")) == 0
    out = capsys.readouterr().out
    assert "3 layouts; 3 refused: too small" in out
    table = out.split("MEMORY\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[:6] for line in table] == [["1", "2", "1", "2", "1", ms] for ms in ("500", "1.5e+03", "2.5e+03")]
    assert "WITH STATE" not in out


def test_as_json(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("--json", "--search", "2")) == 0
    out = json.loads(capsys.readouterr().out)
    assert "tables" not in out
    assert [layout["mfu"] for layout in out["step"]["layouts"]] == [0.2, 0.2]
    assert out["step"]["layouts"][0]["memory"]["weights"] > 1000
    assert run(words("--json")) == 0
    out = json.loads(capsys.readouterr().out)
    assert len(out["tables"]) == 4
    assert len(out["step"]["layouts"]) == 1


def test_table_replicas_are_the_configured_ones(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words("--json", "--set", "embedding.options.replicas=2")) == 0
    assert json.loads(capsys.readouterr().out)["step"]["layouts"][0]["memory"]["tables"] == 2.0
    assert run(words("--set", "embedding.options.replicas=8")) == 3
    assert "Take more ranks." in capsys.readouterr().err


def test_the_planner_is_told_how_many_micro_batches_a_step_has(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of a rank are those of one of them."""
    for accumulate in (1, 3):
        assert run(words("--json", "--set", f"optim.accumulate={accumulate}")) == 0
        assert json.loads(capsys.readouterr().out)["step"]["layouts"][0]["samples_per_second"] == 128 * accumulate


def test_what_cannot_be_timed_is_said(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(strategy="single")) == 0
    assert "The time of a step is not estimated" in capsys.readouterr().out
    assert run(words("--json", strategy="single")) == 0
    assert json.loads(capsys.readouterr().out)["step"] is None
    assert run(words("--search", "1", strategy="single")) == 0  # a search asks whoever plans
    assert "because" in capsys.readouterr().out


def test_without_a_planner_a_search_is_refused(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-gem", PLUGIN.replace(', plan="acme_gem:step"', ""))
    assert run(words("--search", "1")) == 2
    assert "no installed strategy plans one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--assume", "matmul"), "it is no NAME=NUMBER"),
        (("--assume", "matmul=much"), "it is no NAME=NUMBER"),
        (("--search", "-1"), "--search"),
        (("--search", "1", "--write", "plan.toml"), "looks at many layouts"),
        (("--machine", "none.toml"), "cannot be read"),
    ],
)
def test_wrong_words_are_refused(
    acme: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words(*more)) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.glob("*.toml")) == []


def test_assumptions_and_times() -> None:
    assert assumptions(["a=1", "b=2e-3"]) == {"a": 1.0, "b": 0.002}
    with pytest.raises(RequestError):
        assumptions(["a"])
    assert [time(seconds) for seconds in (0.0, 2e-6, 9.99e-4, 0.001, 1.5)] == ["0 us", "2 us", "999 us", "1 ms", "1.5e+03 ms"]
