"""``gem plan --memory``: a real pass of the first batch for the strategy that reports, its figures printed, and what is refused."""

import json
from typing import Any

import pytest

from gem_core.cli.main import run

STRATEGY = """
import torch

class Reports:
    def __init__(self, empty=False):
        self.blocks = () if empty else ("events", "layers")

    def apply(self, module, context):
        self.module = module
        return module

    def describe(self):
        return {}

    def memory_report(self, module, forward):
        assert module is self.module
        loss = forward()
        assert loss.requires_grad and bool(torch.isfinite(loss))
        loss.backward()
        assert all(p.grad is not None for p in module.layers[0].parameters())
        blocks = tuple(
            BlockMemory(name=name, saved=3_000_000, seconds=0.25, policy="recompute", held=1000, extra=0.5, measured=2000)
            for name in self.blocks
        )
        return MemoryReport(budget=5_000_000, blocks=blocks, rest=77, peak=4_000_000, measured_peak=None)

@hookimpl
def gem_parallel_strategies():
    return [ParallelStrategy(name="acme", stage="memory", summary="reports", load="acme_gem:Reports")]
"""
WORDS = ["plan", "--memory", "-c", "toy", "--set", "run.device=cpu", "--set", "data.batch_size=32"]
CHOSEN = ["--set", 'parallel.strategies=["single", "acme"]']


@pytest.fixture
def acme(install: Any) -> None:
    install("acme-gem", STRATEGY)


def test_the_report_is_printed_with_sums(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, *CHOSEN]) == 0
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["layers", "3", "MB", "250.00", "ms", "recompute", "1", "kB", "2", "kB", "500.00", "ms"] in lines
    assert ["all", "blocks", "6", "MB", "500.00", "ms", "2", "kB", "4", "kB", "1000.00", "ms"] in lines
    assert "a budget of 5 MB" in out
    assert "outside of all blocks 77 B" in out
    assert "most at once: 4 MB in the blocks by the plan; measured not on a CPU" in out


def test_the_report_as_json(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, *CHOSEN, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["device"] == "cpu"
    assert [block["name"] for block in out["blocks"]] == ["events", "layers"]
    assert (out["budget"], out["rest"], out["peak"], out["measured_peak"]) == (5_000_000, 77, 4_000_000, None)


@pytest.mark.parametrize("more", [["--world", "8"], ["--machine", "h200"], ["--search", "3"], ["--write", "plan.toml"]])
def test_case_H10_what_needs_no_machine_does_not_go_with_it(acme: None, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert run([*WORDS, *CHOSEN, *more]) == 2
    assert "it measures this machine" in capsys.readouterr().err


def test_case_H10_a_strategy_that_plans_memory_is_asked_for(acme: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(WORDS) == 2
    assert "none of the strategies ['single'] does" in capsys.readouterr().err
