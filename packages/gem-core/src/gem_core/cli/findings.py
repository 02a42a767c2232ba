"""What a check of the machine found."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One finding: ``broken`` makes ``gem doctor`` end with 3, a ``note`` is something optional that is not there.

    Args:
        level: how grave it is.
        what: the thing that was looked at.
        so: what is the case.
        do: the repair, for warnings and broken things.
    """

    level: Level
    what: str
    so: str
    do: str = ""
