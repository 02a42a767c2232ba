"""What became of every row that was read."""

from collections import Counter

from gem_core.spec import RequestError


class Ledger:
    """Counts rows read, kept by split and dropped by reason.

    Args:
        read: rows found in the files, before anything is dropped.
        what: what is counted, in the plural, if not rows: users or events are conserved alike.
    """

    def __init__(self, read: int, what: str = "rows") -> None:
        self.read, self.what = read, what
        self._kept: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    def keep(self, split: str, rows: int) -> None:
        self._kept[split] += rows

    def drop(self, reason: str, rows: int) -> None:
        """Count dropped rows; a reason with no rows is not listed."""
        self._dropped[reason] += rows

    def counts(self) -> dict[str, int]:
        """``{"read": .., SPLIT: .., "dropped: REASON": ..}``.

        Raises:
            RequestError: the parts do not add up to the rows read.
        """
        dropped = {f"dropped: {reason}": rows for reason, rows in self._dropped.items() if rows}
        parts = {**self._kept, **dropped}
        if sum(parts.values()) != self.read:
            so = f"{self.read} {self.what} read, but {parts} adds up to {sum(parts.values())}"
            raise RequestError(f"ledger of {self.what}", so, "Count each of them once.")
        return {"read": self.read, **parts}
