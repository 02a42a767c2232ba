"""Offering the nearest name for one that is not known."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence for the ``do`` part of an error: the nearest known name first, then all of them.

    Args:
        name: what was asked for.
        known: the names that exist.
    """
    names = sorted(set(known))
    if not names:
        return "There is none to choose from."
    close = get_close_matches(name.lower(), [n.lower() for n in names], n=1, cutoff=0.5)
    hint = next((f"Did you mean {n!r}? " for n in names if close and n.lower() == close[0]), "")
    return f"{hint}Known: {', '.join(names)}."
