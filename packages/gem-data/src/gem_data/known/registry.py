"""All known data sets."""

import difflib

from gem_core.spec import RequestError
from gem_data.known import ali_ccp, aliexpress, amazon, atomic, avazu, criteo, kuairand, movielens, open_bandit, taobao, yambda
from gem_data.known.dataset import KnownDataSet

MODULES = (movielens, kuairand, criteo, avazu, taobao, ali_ccp, aliexpress, amazon, yambda, open_bandit, atomic)
KNOWN: dict[str, KnownDataSet] = {known.name: known for module in MODULES for known in module.DATA_SETS}


def known_data_set(name: str) -> KnownDataSet:
    """The data set of that name; RequestError that offers the nearest name if there is none."""
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise RequestError(f"data set {name!r}", f"{hint}the known ones are {', '.join(KNOWN)}", "Name one of them.")
    return KNOWN[name]
