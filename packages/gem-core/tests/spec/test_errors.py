"""Errors: three parts, one exit code each."""

import pytest

from gem_core.spec import GemError, KernelUnavailable, MachineError, PluginError, RequestError, RunFailed, load_object


@pytest.mark.parametrize(
    ("kind", "code"), [(GemError, 1), (RunFailed, 1), (RequestError, 2), (PluginError, 2), (KernelUnavailable, 2), (MachineError, 3)]
)
def test_exit_codes_and_text(kind: type[GemError], code: int) -> None:
    error = kind("the thing", "it is so", "Do that.")
    assert error.exit_code == code
    assert str(error) == "the thing: it is so. Do that."
    assert (error.asked, error.so, error.do) == ("the thing", "it is so", "Do that.")


def test_load_object() -> None:
    assert load_object("json:dumps").__name__ == "dumps"
    with pytest.raises(ModuleNotFoundError):
        load_object("json_not_there:dumps")
    with pytest.raises(AttributeError):
        load_object("json:dumpz")
