"""Options: what is checked, what is merged, what a configuration file may say."""

import tomllib
from typing import Any

import pytest
from pydantic import ValidationError

from gem_core.model.dlrm import DlrmOptions
from gem_core.model.gem import GemOptions
from gem_core.model.hstu import HstuOptions
from gem_core.model.options import CrossOptions, SequenceOptions, WukongOptions

EVERY = [GemOptions, HstuOptions, DlrmOptions]


@pytest.mark.parametrize("options", EVERY)
def test_defaults_are_valid_and_unknown_keys_are_not(options: Any) -> None:
    made = options()
    assert options.model_validate(made.model_dump()) == made
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        options(dimm=3)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        options(dim=0)


@pytest.mark.parametrize("options", EVERY)
def test_every_option_of_the_schema_has_a_type(options: Any) -> None:
    schema = options.model_json_schema()
    assert schema["additionalProperties"] is False
    assert {"features", "head", "wide"} <= set(schema["properties"])


def test_a_configuration_as_toml() -> None:
    text = """
    dim = 32
    [sequence]
    dim = 16
    heads = 4
    window = 100
    [sequences.clicks]
    dim = 64
    layers = 2
    [[experts]]
    kind = "wukong"
    rank = 24
    hidden = [512, 256]
    [[experts]]
    kind = "cross"
    """
    options = GemOptions.model_validate(tomllib.loads(text))
    assert options.experts == (WukongOptions(rank=24, hidden=(512, 256)), CrossOptions())
    assert options.group("views") == SequenceOptions(dim=16, heads=4, window=100)
    assert options.group("clicks") == SequenceOptions(dim=64, heads=4, window=100, layers=2)


def test_what_is_shown_of_a_group_is_what_is_used() -> None:
    """`gem config show` and the manifest print the dump."""
    options = GemOptions.model_validate({"sequence": {"dim": 16, "window": 9}, "sequences": {"clicks": {"heads": 4}}})
    shown = options.model_dump()["sequences"]["clicks"]
    assert (shown["dim"], shown["window"], shown["heads"]) == (16, 9, 4)
    assert shown == options.group("clicks").model_dump()
    assert GemOptions.model_validate(options.model_dump()) == options


def test_an_error_in_a_group_names_it() -> None:
    with pytest.raises(ValidationError, match=r"sequences\.clicks\.haeds"):
        GemOptions.model_validate({"sequences": {"clicks": {"haeds": 4}}})
    with pytest.raises(ValidationError, match="valid dictionary"):
        GemOptions.model_validate({"sequences": {"clicks": 3}})


def test_an_override_may_repeat_a_default() -> None:
    """A key that is given counts, whatever its value."""
    options = GemOptions.model_validate({"sequence": {"seeds": 9}, "sequences": {"views": {"seeds": SequenceOptions().seeds}}})
    assert options.group("views").seeds == SequenceOptions().seeds
    assert options.group("other").seeds == 9


@pytest.mark.parametrize(
    ("sequence", "fine"),
    [
        ({"dim": 6, "heads": 2, "rope": "off"}, True),
        ({"dim": 6, "heads": 2, "attention": "off"}, True),
        ({"dim": 6, "heads": 2}, False),
        ({"dim": 9, "heads": 3, "rope": "off"}, True),
        ({"dim": 9, "heads": 2, "rope": "off"}, False),
        ({"window": 0}, True),
        ({"window": -1}, False),
        ({"time_buckets": 1}, False),
        ({"tau": 0.0}, False),
    ],
)
def test_sizes_that_fit_together(sequence: dict[str, Any], fine: bool) -> None:
    if fine:
        assert GemOptions.model_validate({"sequence": sequence}).sequence.model_fields_set == set(sequence)
    else:
        with pytest.raises(ValidationError):
            GemOptions.model_validate({"sequence": sequence})
