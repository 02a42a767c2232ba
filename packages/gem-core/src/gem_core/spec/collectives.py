"""What a package that talks between ranks records, so that the trainer's step ledger can tell exposed communication from computing."""

from collections.abc import Sequence
from typing import Any, Protocol


class Collective(Protocol):
    """One collective that has ended, or one wait for collectives on a stream of their own (``kind = "wait"``).

    - ``name``: what it was for; the same on all ranks.
    - ``kind``: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``wait``.
    - ``sent``: bytes that this rank sent to others.
    - ``group``, ``ranks``: the process group's description and its number of ranks.
    - ``seconds``: from issue to end, with the wait for the slowest rank.
    - ``exposed``: seconds in which nothing else ran on the stream that computes.
    - ``phase``: the recorder's ``phase`` at the time it ended.
    """

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def sent(self) -> int: ...
    @property
    def group(self) -> str: ...
    @property
    def ranks(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def exposed(self) -> float: ...
    @property
    def phase(self) -> Any: ...


class CollectiveRecorder(Protocol):
    """A record of a process's collectives. A strategy or an engine that has one shows it as the attribute ``recorder``.

    The trainer sets ``phase`` as a step goes on, and finds it in what was recorded meanwhile.
    """

    phase: Any

    def start(self, *, timed: bool = True) -> None:
        """Begin a record; an earlier one is dropped."""
        ...

    def stop(self) -> Sequence[Collective]:
        """The collectives since ``start``, in the order in which they ended. May wait for the GPU."""
        ...
