"""The strategy of a single process."""

from collections.abc import Mapping
from typing import Any

from gem_core.spec import ParallelContext, RequestError


class SingleDevice:
    """Leaves the dense module as it is, and refuses more than one process: their weights would drift apart without a word."""

    def apply(self, module: Any, context: ParallelContext) -> Any:
        """Return ``module`` itself.

        Raises:
            RequestError: there is more than one rank.
        """
        if context.world > 1:
            so = f"the run has {context.world} processes"
            raise RequestError("strategy 'single'", so, "Use --set 'parallel.strategies=[\"ddp\"]' (package gem-parallel), or start one process.")
        return module

    def describe(self) -> Mapping[str, Any]:
        return {"strategy": "single"}
