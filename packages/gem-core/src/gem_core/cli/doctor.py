"""``gem doctor``: what is right and wrong with this machine, and the commands that repair it."""

from dataclasses import asdict
from typing import Annotated

import typer

from gem_core.cli import checks, native
from gem_core.cli.findings import Finding
from gem_core.cli.output import print_json, print_table
from gem_core.plugins.manager import host
from gem_core.select.device import cuda_devices, installed
from gem_core.spec import MachineError

VERSIONS = ("torch", "triton", "torchrec")


def findings() -> list[Finding]:
    """Every check of this machine, in the order they are printed."""
    versions = {name: installed(name) for name in VERSIONS}
    wheels, devices = native.installed_wheels(), cuda_devices()
    found = native.probe(fbgemm=bool(wheels))
    return [
        *checks.check_python(),
        *checks.check_torch(versions["torch"], found, devices),
        *checks.check_devices(devices),
        *checks.check_triton(versions["triton"], devices),
        *native.check(versions, wheels, found),
        *checks.check_plugins(host()),
        *checks.check_variables(),
    ]


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check this machine: versions, native libraries, devices, plugins. Ends with 3 when something is broken; what is merely absent is a note."""
    everything = findings()
    broken = [finding for finding in everything if finding.level == "broken"]
    if json:
        print_json({"ok": not broken, "findings": [asdict(f) for f in everything], "triples": [asdict(t) for t in native.TRIPLES]})
    else:
        print_table(("STATE", "WHAT", "FINDING"), [(f.level, f.what, f.so) for f in everything])
        for finding in everything:
            if finding.do:
                print(f"\n{finding.what}: {finding.do.replace('; ', chr(10) + '  ')}")
        if any(f.what in ("fbgemm", "torchrec") for f in broken):
            print("\nReleases that go together:")
            rows = [(t.torch, t.fbgemm, t.torchrec, t.triton, "yes" if t.tried else "no") for t in native.TRIPLES]
            print_table(("TORCH", "FBGEMM", "TORCHREC", "TRITON", "TRIED"), rows)
    if broken:
        raise typer.Exit(MachineError.exit_code)
