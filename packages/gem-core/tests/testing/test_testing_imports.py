"""Importing the testing package costs nothing; its parts import what they use."""

import subprocess
import sys

import pytest

import gem_core.testing


@pytest.mark.parametrize(
    ("statement", "absent"),
    [("import gem_core.testing", "torch pytest hypothesis"), ("from gem_core.testing import assert_close, fake_plugin", "pytest hypothesis")],
)
def test_nothing_is_imported_before_it_is_used(statement, absent):
    code = f"{statement}; import sys; print([name for name in {absent.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_every_public_name_resolves_and_others_do_not():
    for name in gem_core.testing.__all__:
        assert callable(getattr(gem_core.testing, name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gem_core.testing.nothing
