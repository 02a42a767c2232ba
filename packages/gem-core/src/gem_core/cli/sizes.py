"""Bytes for people."""


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count, units = count / 1000, units[1:]
    return f"{count:.3g} {units[0]}"
