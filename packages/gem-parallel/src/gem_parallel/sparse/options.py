"""``[embedding.options]`` of the ``torchrec`` engine."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class TorchRecOptions(BaseModel):
    """Options of the ``torchrec`` engine.

    ``sharding`` says how tables are spread over several ranks: ``table_wise`` puts each on one rank, ``row_wise`` gives every rank a range of rows,
    ``auto`` is table-wise except for tables that are larger than one rank's fair share. A single process has no use for it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sharding: Literal["auto", "table_wise", "row_wise"] = "auto"
