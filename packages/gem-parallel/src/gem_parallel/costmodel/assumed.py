"""Figures that no description of a machine holds. Each has a name, by which ``gem plan --assume NAME=VALUE`` replaces it, and a source."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

from gem_core.spec import RequestError

BALANCE = {"none": 1.0, "interleaved": 0.37}
"""What balancing leaves of the deviation of ranks' costs. ``interleaved`` joins sub-batches of 128 rows, heavy with light ones, over 8 batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumed:
    """Fractions of data-sheet figures that are reached, and what the software adds.

    Args:
        matmul: of the peak FLOP/s.
        memory: of the memory bandwidth.
        links: of a tier's bandwidth.
        scatter: time of a reduce-scatter over that of an all-gather of the same parts.
        reduce: time of an all-reduce over that of an all-gather of its parts.
        launch: seconds to start a collective.
        host: seconds in which a rank does nothing but ``fully_shard``'s work on the host, for each collective of a block.
        message: seconds that an all-to-all takes longer for each further rank.
        row_cv: standard deviation over mean of the rows' costs; negative takes what was measured on a batch.
        balance: what balancing leaves of the deviation between ranks: 1 without, ``BALANCE["interleaved"]`` with it.
        pipelined: 1 if the ids of the next batch travel behind this step's compute, 0 if a step waits for them.
        reserve: part of the memory that libraries and fragments take.
    """

    matmul: float = 0.58
    memory: float = 0.89
    links: float = 0.8
    scatter: float = 1.0
    reduce: float = 2.0
    launch: float = 8.4e-6
    host: float = 0.0
    message: float = 0.4e-6
    row_cv: float = -1.0
    balance: float = 1.0
    pipelined: float = 1.0
    reserve: float = 0.1

    @classmethod
    def of(cls, given: Mapping[str, float] | None) -> "Assumed":
        """The defaults with the user's figures.

        Raises:
            RequestError: there is no such figure, or it cannot have this value.
        """
        known = [field.name for field in fields(cls)]
        for name, value in (given or {}).items():
            if name not in known:
                raise RequestError(f"--assume {name}={value:g}", "there is no such figure", f"Known are {', '.join(known)}.")
            most = 1.0 if name not in ("scatter", "reduce", "launch", "host", "message", "row_cv") else float("inf")
            least = {"row_cv": -1.0, "balance": 0.0, "pipelined": 0.0, "reserve": 0.0, "launch": 0.0, "host": 0.0, "message": 0.0}.get(name, 1e-6)
            if not least <= value <= most:
                raise RequestError(f"--assume {name}={value:g}", f"it lies outside {least:g} ... {most:g}", "Give a value between them.")
        return cls(**(given or {}))

    def told(self, given: Collection[str]) -> tuple[str, ...]:
        """One line for each figure: value and source, or that it was ``given``."""
        return tuple(f"{name} = {getattr(self, name):g}: {'given' if name in given else source}" for name, source in SOURCES.items())


SOURCES = {
    "matmul": "a bf16 matmul of 1M x 512 x 512 on one H200, 573 of 989 TFLOP/s",
    "memory": "a copy of 4 GiB on one H200, 4.27 of 4.8 TB/s",
    "links": "NCCL's cost model for NVLink, 360 of 450 GB/s on Hopper; taken for the network too",
    "scatter": "as quick, as NCCL's cost model has it",
    "reduce": "a reduce-scatter and an all-gather, as NCCL's cost model has it",
    "launch": "base latency of a ring in NCCL's cost model",
    "host": "assumed: the host is ahead of a GPU; on a CPU it is the rank itself",
    "message": "assumed: a network hop of 14 us shared by about 32 messages on their way",
    "row_cv": "measured on the rows of a small training batch",
    "balance": "no balancing; 0.37 was simulated for interleaved sub-batches",
    "pipelined": "the ids of the next batch travel behind this step's compute, as the trainer does it",
    "reserve": "assumed",
}
