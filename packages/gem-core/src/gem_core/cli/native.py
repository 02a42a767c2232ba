"""torch, fbgemm and torchrec: which releases go together, what is installed, and whether the native library loads."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from gem_core.cli.findings import Finding
from gem_core.select.device import release

WHEELS = ("fbgemm-gpu-cpu", "fbgemm-gpu")
"""Both install the folder ``fbgemm_gpu``, so the later one overwrites files of the earlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Triple:
    """Releases that go together; ``tried`` is False where only the pattern says so."""

    torch: str
    fbgemm: str
    torchrec: str
    triton: str
    tried: bool = True


TRIPLES = (
    Triple(torch="2.11", fbgemm="1.6.0", torchrec="1.6.1", triton="3.6.0"),
    Triple(torch="2.13", fbgemm="1.8.0", torchrec="1.8.0", triton="3.7.1"),
    Triple(torch="2.14", fbgemm="1.9.0", torchrec="1.9.2", triton="3.8", tried=False),
)
TESTED = ((2, 11), (2, 14))
"""Oldest and newest torch minor that is supported."""

_PROBE = """
import json, sys
facts = {"torch_error": None, "cuda_build": None, "cuda": False, "fbgemm_error": None}
try:
    import torch
    facts["cuda_build"], facts["cuda"] = torch.version.cuda, torch.cuda.is_available()
except BaseException as error:
    facts["torch_error"] = f"{type(error).__name__}: {error}"
else:
    if sys.argv[1] == "fbgemm":
        try:
            import fbgemm_gpu
            if not hasattr(torch.ops.fbgemm, "jagged_2d_to_dense"):
                facts["fbgemm_error"] = "it registered no operators"
        except BaseException as error:
            facts["fbgemm_error"] = f"{type(error).__name__}: {error}"
print(json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """What a fresh process found on importing torch and fbgemm: error texts, the CUDA version torch is built for, and whether it sees a device."""

    torch_error: str | None = None
    cuda_build: str | None = None
    cuda: bool = False
    fbgemm_error: str | None = None


def probe(*, fbgemm: bool, timeout: float = 300.0) -> Probe:
    """Import torch, and fbgemm if asked, in a process of its own: a native crash there is an answer, not the end of the doctor."""
    command = [sys.executable, "-P", "-c", _PROBE, "fbgemm" if fbgemm else "torch"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Probe(torch_error=f"importing took more than {timeout:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        error = f"importing ended with code {done.returncode}: {last}"
        return replace(probe(fbgemm=False, timeout=timeout), fbgemm_error=error) if fbgemm else Probe(torch_error=error)
    return Probe(**json.loads(lines[-1]))


def installed_wheels() -> list[tuple[str, str]]:
    """``(distribution, version)`` of the fbgemm wheels, in the order they were installed."""
    found: list[tuple[float, str, str]] = []
    for name in WHEELS:
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue
        found.append((_installed_at(dist), name, dist.version))
    return [(name, version) for _, name, version in sorted(found)]


def _installed_at(dist: Distribution) -> float:
    record = dist.locate_file(f"{dist.metadata['Name'].replace('-', '_')}-{dist.version}.dist-info/METADATA")
    try:
        return float(record.stat().st_mtime)  # type: ignore[attr-defined]
    except OSError:
        return 0.0


def triple_of(torch: str) -> Triple | None:
    """The row of the table for a torch version, None for one that is not in it."""
    minor = release(torch)[:2]
    return next((triple for triple in TRIPLES if release(triple.torch) == minor), None)


def repair(torch: str, cuda_build: str | None) -> str:
    """Commands that install the matching releases; the CPU build where torch is one."""
    triple = triple_of(torch)
    if triple is None:
        return f"No release of fbgemm is known to fit torch {torch}; the table names torch {', '.join(t.torch for t in TRIPLES)}."
    wheel = "fbgemm-gpu" if cuda_build else "fbgemm-gpu-cpu"
    return (
        f"python3 -m pip uninstall -y {' '.join(WHEELS)} torchrec; "
        f"python3 -m pip install {wheel}=={triple.fbgemm}; "
        f"python3 -m pip install --no-deps torchrec=={triple.torchrec}; "
        "python3 -m pip install tensordict torchmetrics pyre-extensions tqdm"
    )


def check(versions: Mapping[str, str | None], wheels: Sequence[tuple[str, str]], found: Probe) -> list[Finding]:
    """Findings about fbgemm and torchrec beside this torch."""
    torch = versions["torch"] or "0"
    cure = repair(torch, found.cuda_build)
    if not wheels:
        so = "not installed; tables run on plain torch"
        findings = [Finding(level="note", what="fbgemm", so=so)]
        if versions["torchrec"] is not None:
            findings.append(Finding(level="broken", what="torchrec", so=f"{versions['torchrec']} is installed without fbgemm", do=cure))
        return findings
    findings = [_check_fbgemm(torch, wheels, found, cure)]
    return findings + _check_torchrec(torch, versions["torchrec"], cure)


def _check_fbgemm(torch: str, wheels: Sequence[tuple[str, str]], found: Probe, cure: str) -> Finding:
    names = " and ".join(f"{name} {version}" for name, version in wheels)
    if len(wheels) > 1:
        so = f"{names} are both installed and share one folder: {wheels[-1][0]} overwrote files of {wheels[0][0]}"
        return Finding(level="broken", what="fbgemm", so=so, do=cure)
    triple, version = triple_of(torch), wheels[0][1]
    if triple is not None and release(version)[:2] != release(triple.fbgemm)[:2]:
        so = f"{names} does not fit torch {torch}, which wants {triple.fbgemm}"
        return Finding(level="broken", what="fbgemm", so=so, do=cure)
    if found.fbgemm_error is not None:
        return Finding(level="broken", what="fbgemm", so=f"the native library of {names} did not load: {_one_line(found.fbgemm_error)}", do=cure)
    tried = "" if triple is not None and triple.tried else f"; nobody has tried it with torch {torch}"
    return Finding(level="note" if tried else "ok", what="fbgemm", so=f"{names}, native library loads{tried}")


def _check_torchrec(torch: str, version: str | None, cure: str) -> list[Finding]:
    if version is None:
        return [Finding(level="note", what="torchrec", so="not installed; the torchrec engine is not available")]
    triple = triple_of(torch)
    if triple is not None and release(version)[:2] != release(triple.torchrec)[:2]:
        return [Finding(level="broken", what="torchrec", so=f"{version} does not fit torch {torch}, which wants {triple.torchrec}", do=cure)]
    return [Finding(level="ok", what="torchrec", so=version)]


def _one_line(text: str) -> str:
    """The first line of an error, without torch's misleading talk of an operator namespace."""
    line = text.strip().splitlines()[0]
    return "its operators are missing" if "_OpNamespace" in line else line
