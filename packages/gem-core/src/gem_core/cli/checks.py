"""The checks of ``gem doctor`` apart from fbgemm and torchrec."""

import os
import platform
import sys
from collections.abc import Mapping, Sequence

from gem_core.cli.findings import Finding
from gem_core.cli.lazy import OWN
from gem_core.cli.native import TESTED, Probe
from gem_core.plugins.manager import PluginHost
from gem_core.plugins.report import clashes, plugin_rows
from gem_core.select.device import DeviceInfo, release
from gem_core.select.known_bad import KNOWN_BAD
from gem_core.select.policy import named_backend, preference
from gem_core.select.registry import registry, stale
from gem_core.spec import GemError

VARIABLES = (
    "GEM_KERNELS",
    "GEM_KERNELS_PREFER",
    "GEM_PLUGINS_AUTOLOAD",
    "GEM_PLUGINS_BLOCK",
    "GEM_PLUGINS_TRACE",
    "TRITON_INTERPRET",
)
"""Environment variables that change what runs."""


def check_python(version: tuple[int, int, int] = sys.version_info[:3]) -> list[Finding]:
    """Python and platform."""
    text = ".".join(map(str, version))
    so = f"{text} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return [Finding(level="broken", what="python", so=so, do="Use Python 3.11 or newer.")]
    return [Finding(level="ok", what="python", so=so)]


def check_torch(version: str | None, found: Probe, devices: Sequence[DeviceInfo]) -> list[Finding]:
    """torch: present, supported, importable, and seeing the devices that the driver shows."""
    oldest, newest = (".".join(map(str, minor)) for minor in TESTED)
    if version is None:
        return [Finding(level="broken", what="torch", so="not installed", do=f"python3 -m pip install 'torch>={oldest}'")]
    if found.torch_error is not None:
        return [Finding(level="broken", what="torch", so=f"{version} cannot be imported: {found.torch_error}", do="Install torch again.")]
    build = f"CUDA {found.cuda_build}" if found.cuda_build else "CPU build"
    so = f"{version} ({build})"
    if release(version)[:2] < TESTED[0]:
        return [Finding(level="broken", what="torch", so=f"{so} is older than {oldest}", do=f"python3 -m pip install 'torch>={oldest}'")]
    if devices and found.cuda_build and not found.cuda:
        do = "Update the NVIDIA driver, or install the torch build for its CUDA version."
        return [Finding(level="broken", what="torch", so=f"{so} sees no device, though the driver shows {len(devices)}", do=do)]
    if devices and not found.cuda_build:
        return [Finding(level="warning", what="torch", so=f"{so}: the GPU lies idle", do="Install a CUDA build of torch.")]
    if release(version)[:2] > TESTED[1]:
        return [Finding(level="note", what="torch", so=f"{so} is newer than {newest}, the newest supported")]
    return [Finding(level="ok", what="torch", so=so)]


def check_devices(devices: Sequence[DeviceInfo]) -> list[Finding]:
    """CUDA devices, one line each."""
    if not devices:
        return [Finding(level="note", what="devices", so="no CUDA device; everything runs on the CPU")]
    return [Finding(level="ok", what=f"cuda:{i}", so=f"{d.name} (sm{d.arch})") for i, d in enumerate(devices)]


def check_triton(version: str | None, devices: Sequence[DeviceInfo]) -> list[Finding]:
    """triton and the list of versions that are known to go wrong on these devices."""
    if version is None:
        return [Finding(level="note", what="triton", so="not installed; Triton kernels are not available")]
    archs = {device.arch for device in devices}
    faults = [
        bad.fault
        for bad in KNOWN_BAD
        if bad.distribution == "triton" and bad.matches(version) and bad.device == "cuda" and devices and (bad.arch is None or bad.arch in archs)
    ]
    if faults:
        do = "If a kernel crashes, name another backend for its op: kernels.use, or GEM_KERNELS=OP=BACKEND."
        return [Finding(level="warning", what="triton", so=f"{version}: {fault}", do=do) for fault in faults]
    return [Finding(level="ok", what="triton", so=version)]


def check_plugins(host: PluginHost) -> list[Finding]:
    """Plugins that did not load, names that two of them declare, and kernels for another contract."""
    findings, loaded = [], []
    for row in plugin_rows(host):
        what = f"plugin {row['name']}"
        if row["status"] == "loaded":
            loaded.append(f"{row['name']} {row['version']}")
        elif row["status"] == "blocked":
            findings.append(Finding(level="note", what=what, so=row["error"]))
        else:
            do = f"Repair or uninstall {row['distribution']}, or set GEM_PLUGINS_BLOCK={row['name']}."
            findings.append(Finding(level="broken", what=what, so=f"{row['status']}: {row['error']}", do=do))
    findings.insert(0, Finding(level="ok", what="plugins", so=f"loaded: {', '.join(loaded) or 'none'}"))
    twice = [Finding(level="broken", what="plugins", so=line, do="Block one of the two: GEM_PLUGINS_BLOCK=NAME.") for line in clashes(host)]
    return findings + _check_commands(host) + (twice or _check_contracts())


def _check_commands(host: PluginHost) -> list[Finding]:
    return [
        Finding(
            level="warning",
            what=f"command {command.name}",
            so=f"{owner.owner} adds it, and core's own stands before it",
            do=f"Report it to {owner.distribution}.",
        )
        for owner, command in host.collect("gem_cli_commands")
        if command.name in OWN
    ]


def _check_contracts() -> list[Finding]:
    return [
        Finding(
            level="warning",
            what=f"kernel {owned.impl.op}/{owned.impl.backend}",
            so=f"{owned.owner}: {reason}",
            do=f"Install a release of {owned.owner_name} that fits this gem-core.",
        )
        for owned, reason in stale()
    ]


def check_variables(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Environment variables that are set, and whether kernel names in them exist."""
    findings = [Finding(level="note", what=name, so=f"set to {environment[name]!r}") for name in VARIABLES if name in environment]
    try:
        preference()
        for op in registry().ops:
            named_backend(op)
    except GemError as error:
        findings.append(Finding(level="broken", what=error.asked, so=error.so, do=error.do))
    return findings
