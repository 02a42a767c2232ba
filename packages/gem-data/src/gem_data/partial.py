"""Files that appear under their name only when they are whole."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a hidden file beside ``path`` to write to; it takes the name when the block ends well and is removed when it does not.

    What writers left that were killed is removed as well; one that is writing now is younger than an hour.

    Raises:
        OSError: the folder cannot be written.
    """
    for left in path.parent.glob(f".{path.name}.*"):
        if left.stat().st_mtime < time.time() - 3600:
            left.unlink(missing_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
