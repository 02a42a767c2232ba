"""When sites turn low, and which layers never do."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import nn

from gem_core.spec import RequestError
from gem_precision.options import GuardOptions, RampOptions
from gem_precision.probe.record import FILE
from gem_precision.ramps import by_sensitivity, last_layers, low_from

SITES = {"a": "mxfp8", "b": "mxfp8", "c": "fp8_block", "d": "mxfp8"}


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """Lowest figures: a 20 dB in mxfp8, b 30, c 40 in fp8_block (and 5 in mxfp8); d was not met."""
    values = [("a", "mxfp8", 20.0), ("a", "mxfp8", 50.0), ("b", "mxfp8", 30.0), ("c", "mxfp8", 5.0), ("c", "fp8_block", 40.0)]
    rows = [{"site": s, "product": "forward", "recipe": r, "sqnr": v, "calls": 1} for s, r, v in values]
    (tmp_path / FILE).write_text(json.dumps({"format": 1, "rows": rows}))
    return tmp_path


def test_without_a_ramp_sites_are_low_from_the_first_step() -> None:
    assert low_from(SITES, None) == dict.fromkeys(SITES, 1)


def test_all_at_once() -> None:
    assert low_from(SITES, RampOptions(start=100)) == dict.fromkeys(SITES, 100)


def test_one_by_one_the_least_sensitive_first_each_in_its_own_format(probe: Path) -> None:
    assert by_sensitivity(SITES, probe) == ["c", "b", "a", "d"]
    assert low_from(SITES, RampOptions(start=100, end=400, probe=probe)) == {"c": 100, "b": 200, "a": 300, "d": 400}


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 50), st.integers(0, 1000), st.integers(1, 30))
def test_a_ramp_begins_and_ends_where_it_is_told(start: int, length: int, sites: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(json.dumps({"format": 1, "rows": []}))
        steps = list(low_from({str(i): "mxfp8" for i in range(sites)}, RampOptions(start=start, end=start + length, probe=Path(folder))).values())
    assert steps == sorted(steps)  # the order given, where nothing was measured
    assert steps[0] == start
    assert steps[-1] == (start + length if sites > 1 else start)


@pytest.mark.parametrize(
    "words",
    [{"start": 0}, {}, {"start": 5, "end": 9}, {"start": 5, "probe": "x"}, {"start": 5, "end": 4, "probe": "x"}, {"start": 1, "stop": 4}],
)
def test_ramps_that_make_no_sense_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RampOptions.model_validate(words)


@pytest.mark.parametrize(
    "words", [{}, {"every": 0}, {"every": 5, "bound": 0.0}, {"every": 5, "pairs": 7}, {"every": 5, "on_breach": "shout"}, {"evry": 5}]
)
def test_guards_that_make_no_sense_are_refused(words: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GuardOptions.model_validate(words)


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.trunk = nn.Module()
        self.trunk.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(layers))


def test_the_last_layers() -> None:
    assert last_layers(Stack(12), 2) == ("trunk.layers.10", "trunk.layers.11")
    assert last_layers(Stack(2), 2) == ("trunk.layers.0", "trunk.layers.1")
    assert last_layers(nn.Linear(2, 2), 0) == ()


@pytest.mark.parametrize(("model", "so"), [(nn.Linear(2, 2), "no list of modules"), (Stack(2), "has 2")])
def test_layers_that_are_not_there_are_an_error(model: nn.Module, so: str) -> None:
    with pytest.raises(RequestError, match=so):
        last_layers(model, 3)
