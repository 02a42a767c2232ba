"""Users and events are conserved by the same account as rows."""

import pytest

from gem_core.spec import RequestError
from gem_data.ledger import Ledger


def test_what_is_counted_is_named() -> None:
    ledger = Ledger(3, "users")
    ledger.keep("written", 1)
    with pytest.raises(RequestError, match=r"ledger of users: 3 users read, but {'written': 1} adds up to 1"):
        ledger.counts()
    ledger.drop("every row dropped", 2)
    assert ledger.counts() == {"read": 3, "written": 1, "dropped: every row dropped": 2}


def test_nothing_is_conserved_as_well() -> None:
    assert Ledger(0, "events").counts() == {"read": 0}
