"""Runs of the trainer, each a ``gem`` process of its own: this package knows the command, not what is behind it."""

import subprocess
import sys

from gem_core.spec import RunFailed


def gem(*words: str) -> None:
    """Run ``gem`` with these words; RunFailed with the last line it said where it fails."""
    done = subprocess.run([sys.executable, "-m", "gem_core", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RunFailed(f"gem {' '.join(words)}", f"it ended with exit code {done.returncode}: {last[0]}", "Run it by hand to see all it says.")
