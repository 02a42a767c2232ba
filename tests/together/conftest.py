"""What the tests of all five packages share: running ``gem`` as a user does."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

GEM = str(Path(sys.executable).with_name("gem"))


@pytest.fixture
def gem(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``gem`` in a temporary folder and hold its exit code to ``expect``."""

    def run(*words: str, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([GEM, *words], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **env})
        assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run


@pytest.fixture
def torchrun(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``gem`` in ``processes`` processes of this machine."""

    def run(processes: int, *words: str, expect: int = 0) -> subprocess.CompletedProcess[str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(port), GEM]
        done = subprocess.run(
            [*launch, *words], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
        )
        assert (done.returncode == 0) == (expect == 0), done.stdout[-4000:] + done.stderr[-4000:]
        return done

    return run
