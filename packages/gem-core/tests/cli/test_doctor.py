"""gem doctor: what it calls broken, and the commands that repair it."""

import json
import os
import re
from pathlib import Path

import pytest

from gem_core.cli import checks, doctor, native
from gem_core.cli.findings import Finding
from gem_core.cli.main import run
from gem_core.cli.native import TRIPLES, Probe
from gem_core.plugins.manager import host
from gem_core.select.device import DeviceInfo

HOPPER = DeviceInfo(device="cuda", name="H200", arch=90)
BLACKWELL = DeviceInfo(device="cuda", name="B200", arch=100)
FINE = {"torch": "2.13.0+cpu", "triton": "3.7.1", "torchrec": "1.8.0"}
CPU_WHEEL = [("fbgemm-gpu-cpu", "1.8.0")]


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.level for finding in findings}


def test_a_matching_set_is_fine() -> None:
    assert levels(native.check(FINE, CPU_WHEEL, Probe())) == {"fbgemm": "ok", "torchrec": "ok"}


def test_case_A01_both_wheels_are_named_with_which_overwrote_which_and_the_repair() -> None:
    wheels = [("fbgemm-gpu-cpu", "1.8.0"), ("fbgemm-gpu", "1.9.0")]
    (finding, _) = native.check(FINE, wheels, Probe(fbgemm_error="OSError: libtorch_cuda.so: cannot open shared object file"))
    assert finding.level == "broken"
    assert "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.9.0" in finding.so
    assert "fbgemm-gpu overwrote files of fbgemm-gpu-cpu" in finding.so
    steps = finding.do.split("; ")
    assert steps[0] == "python3 -m pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu torchrec"
    assert steps[1] == "python3 -m pip install fbgemm-gpu-cpu==1.8.0"
    assert steps[2] == "python3 -m pip install --no-deps torchrec==1.8.0"


def test_case_A01_the_order_of_installation_is_read_from_the_disk(install) -> None:
    site = install("fbgemm-gpu-cpu", version="8.0")
    install("fbgemm-gpu", version="9.0")
    for name, age in (("fbgemm_gpu_cpu-8.0", 100), ("fbgemm_gpu-9.0", 50)):
        os.utime(site / f"{name}.dist-info" / "METADATA", (age, age))
    assert native.installed_wheels() == [("fbgemm-gpu", "9.0"), ("fbgemm-gpu-cpu", "8.0")]
    os.utime(site / "fbgemm_gpu-9.0.dist-info" / "METADATA", (200, 200))
    assert native.installed_wheels() == [("fbgemm-gpu-cpu", "8.0"), ("fbgemm-gpu", "9.0")]


@pytest.mark.parametrize("version", ["1.7.0", "1.9.0"])
def test_case_A02_a_mismatched_pair_is_broken_and_names_the_matching_release(version: str) -> None:
    (fbgemm, torchrec) = native.check(FINE, [("fbgemm-gpu-cpu", version)], Probe(fbgemm_error="OSError: Could not load this library"))
    assert fbgemm.level == "broken"
    assert f"fbgemm-gpu-cpu {version} does not fit torch 2.13.0+cpu, which wants 1.8.0" == fbgemm.so
    assert "fbgemm-gpu-cpu==1.8.0" in fbgemm.do
    assert torchrec.level == "ok"


@pytest.mark.parametrize("triple", TRIPLES)
def test_case_A02_every_row_of_the_table_passes_and_its_neighbours_do_not(triple: native.Triple) -> None:
    versions = {"torch": f"{triple.torch}.0", "torchrec": triple.torchrec}
    expected = "ok" if triple.tried else "note"
    assert levels(native.check(versions, [("fbgemm-gpu", triple.fbgemm)], Probe(cuda_build="13.0"))) == {"fbgemm": expected, "torchrec": "ok"}
    for other in TRIPLES:
        if other is not triple:
            assert levels(native.check(versions, [("fbgemm-gpu", other.fbgemm)], Probe()))["fbgemm"] == "broken"
            assert levels(native.check({**versions, "torchrec": other.torchrec}, [("fbgemm-gpu", triple.fbgemm)], Probe()))["torchrec"] == "broken"


def test_case_A02_the_cuda_build_is_offered_to_a_cuda_torch() -> None:
    assert "install fbgemm-gpu==1.6.0" in native.repair("2.11.0+cu130", "13.0")
    assert "install fbgemm-gpu-cpu==1.8.0" in native.repair("2.13.0", None)
    assert "No release of fbgemm is known" in native.repair("2.99.0", None)


def test_case_A03_the_misleading_message_never_surfaces() -> None:
    error = "AttributeError: '_OpNamespace' 'fbgemm' object has no attribute 'jagged_2d_to_dense'"
    (finding, _) = native.check(FINE, CPU_WHEEL, Probe(fbgemm_error=error))
    assert finding.level == "broken"
    assert "native library of fbgemm-gpu-cpu 1.8.0 did not load" in finding.so
    assert "_OpNamespace" not in finding.so + finding.do


def test_case_A03_an_undefined_symbol_is_passed_on_in_one_line() -> None:
    (finding, _) = native.check(FINE, CPU_WHEEL, Probe(fbgemm_error="OSError: undefined symbol: _ZN3c105Error\nmore\nmore"))
    assert finding.so.endswith("OSError: undefined symbol: _ZN3c105Error")


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise OSError('undefined symbol: _Z1x')", "OSError: undefined symbol: _Z1x"),
        ("", "it registered no operators"),
    ],
)
def test_case_A03_the_probe_sees_a_library_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str) -> None:
    """A stand-in torch keeps the probe quick; its operator namespace is empty as when the shared library is blocked."""
    (tmp_path / "torch.py").write_text(
        "class version: cuda = None\nclass cuda:\n    is_available = staticmethod(lambda: False)\nclass ops:\n    class fbgemm: pass\n"
    )
    (tmp_path / "fbgemm_gpu.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert native.probe(fbgemm=True) == Probe(fbgemm_error=error)
    assert native.probe(fbgemm=False) == Probe()


def test_a_probe_that_dies_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import os; os._exit(139)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = native.probe(fbgemm=False)
    assert "ended with code 139" in (found.torch_error or "")
    assert levels(checks.check_torch("2.13.0", found, ())) == {"torch": "broken"}


def test_a_crash_is_laid_to_fbgemm_when_torch_alone_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("class version: cuda = None\nclass cuda:\n    is_available = staticmethod(lambda: False)\n")
    (tmp_path / "fbgemm_gpu.py").write_text("import os; os._exit(139)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert native.probe(fbgemm=True) == Probe(fbgemm_error="importing ended with code 139: no output")


def test_without_fbgemm_there_is_only_a_note() -> None:
    assert levels(native.check({**FINE, "torchrec": None}, [], Probe())) == {"fbgemm": "note"}
    assert levels(native.check(FINE, [], Probe())) == {"fbgemm": "note", "torchrec": "broken"}
    assert levels(native.check({**FINE, "torchrec": None}, CPU_WHEEL, Probe())) == {"fbgemm": "ok", "torchrec": "note"}


def test_case_I12_a_known_bad_triton_is_a_warning_on_that_architecture_alone() -> None:
    (finding,) = checks.check_triton("3.6.0", [HOPPER])
    assert finding.level == "warning"
    assert "WGMMA" in finding.so
    assert "kernels.use" in finding.do
    assert levels(checks.check_triton("3.6.0", [BLACKWELL])) == {"triton": "ok"}
    assert levels(checks.check_triton("3.7.1", [HOPPER])) == {"triton": "ok"}
    assert levels(checks.check_triton("3.6.0", [])) == {"triton": "ok"}
    assert levels(checks.check_triton(None, [HOPPER])) == {"triton": "note"}


@pytest.mark.parametrize(
    ("version", "found", "devices", "level"),
    [
        ("2.13.0+cpu", Probe(), [], "ok"),
        ("2.11.0", Probe(cuda_build="13.0", cuda=True), [HOPPER], "ok"),
        (None, Probe(), [], "broken"),
        ("2.10.1", Probe(), [], "broken"),
        ("2.15.0", Probe(), [], "note"),
        ("2.13.0", Probe(torch_error="ImportError: libcudart"), [], "broken"),
        ("2.13.0", Probe(cuda_build="13.0"), [HOPPER], "broken"),
        ("2.13.0", Probe(cuda_build="13.0"), [], "ok"),
        ("2.13.0+cpu", Probe(), [HOPPER], "warning"),
    ],
)
def test_torch(version: str | None, found: Probe, devices: list[DeviceInfo], level: str) -> None:
    (finding,) = checks.check_torch(version, found, devices)
    assert finding.level == level
    assert bool(finding.do) == (level in ("broken", "warning"))


def test_python_and_devices() -> None:
    assert levels(checks.check_python((3, 10, 9))) == {"python": "broken"}
    assert levels(checks.check_python()) == {"python": "ok"}
    assert levels(checks.check_devices([])) == {"devices": "note"}
    assert [f.so for f in checks.check_devices([HOPPER, BLACKWELL])] == ["H200 (sm90)", "B200 (sm100)"]


def test_plugins_that_fail_or_clash_are_broken_and_blocked_ones_a_note(install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("sick-gem", "1 / 0")
    install("one-gem", "", plugin="same")
    install("two-gem", "", plugin="same")
    install("away-gem", "")
    monkeypatch.setenv("GEM_PLUGINS_BLOCK", "away-gem")
    found = levels(checks.check_plugins(host()))
    assert found["plugin sick-gem"] == found["plugin same"] == "broken"
    assert found["plugin away-gem"] == "note"


def test_names_that_two_plugins_declare_are_broken(install) -> None:
    for name in ("one-gem", "two-gem"):
        install(name, "@hookimpl\ndef gem_models():\n    return [ModelSpec(name='twin', summary='', load='m:M', options='m:O')]\n")
    (finding,) = [f for f in checks.check_plugins(host()) if "twin" in f.so]
    assert finding.level == "broken"
    assert "one-gem and two-gem" in finding.so


def test_a_command_that_core_hides_is_a_warning(install) -> None:
    install("acme-gem", "@hookimpl\ndef gem_cli_commands():\n    return [CliCommand(name='train', load='m:app', summary='s')]\n")
    (finding,) = [f for f in checks.check_plugins(host()) if f.what == "command train"]
    assert finding.level == "warning"
    assert "acme-gem 1.0" in finding.so


def test_case_A02_the_command_ends_with_3_beside_a_mismatched_wheel(
    install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("torch", version="2.13.0")
    install("fbgemm-gpu-cpu", version="1.7.0")
    monkeypatch.setattr(native, "probe", lambda fbgemm: Probe(fbgemm_error="OSError: Could not load this library"))
    monkeypatch.setattr(native, "WHEELS", ("fbgemm-gpu-cpu",))
    assert run(["doctor"]) == 3
    out = capsys.readouterr().out
    assert "fbgemm-gpu-cpu 1.7.0 does not fit torch 2.13.0, which wants 1.8.0" in out
    assert re.search(r"^2.13 +1.8.0 +1.8.0 +3.7.1 +yes$", out, flags=re.M)


def test_a_stale_kernel_is_a_warning(install) -> None:
    install(
        "old-gem",
        "@hookimpl\ndef gem_kernel_impls():\n"
        "    return [KernelImpl(op='gdpa', contract=0, backend='old', load='m:f', devices=('cpu',), dtypes=('fp32',))]\n",
    )
    (finding,) = [f for f in checks.check_plugins(host()) if f.what == "kernel gdpa/old"]
    assert finding.level == "warning"
    assert "contract 0 of gdpa" in finding.so


def test_variables_are_noted_and_wrong_ones_broken(clean_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_variables({}) == []
    monkeypatch.setenv("GEM_KERNELS", "gdqa=acme")
    found = checks.check_variables()
    assert [f.level for f in found] == ["note", "broken"]
    assert "Did you mean 'gdpa'" in found[1].do


@pytest.mark.parametrize(("level", "code"), [("ok", 0), ("note", 0), ("warning", 0), ("broken", 3)])
def test_the_command_ends_with_3_only_when_something_is_broken(level, code: int, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    planted = Finding(level=level, what="fbgemm", so="it is so", do="step one; step two")
    monkeypatch.setattr(doctor, "findings", lambda: [planted])
    assert run(["doctor"]) == code
    out = capsys.readouterr().out
    assert re.search(rf"{level}\s+fbgemm\s+it is so", out)
    assert "step one\n  step two" in out
    assert ("Releases that go together" in out) == (code == 3)
    assert run(["doctor", "--json"]) == code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["ok"], shown["findings"][0]["level"]) == (code == 0, level)


def test_every_check_is_asked(clean_host: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "probe", lambda fbgemm: Probe())
    monkeypatch.setattr(native, "installed_wheels", lambda: CPU_WHEEL)
    monkeypatch.setattr(doctor, "installed", FINE.get)
    monkeypatch.setattr(doctor, "cuda_devices", lambda: (BLACKWELL,))
    found = levels(doctor.findings())
    assert {"python", "torch", "cuda:0", "triton", "fbgemm", "torchrec", "plugins"} <= set(found)
