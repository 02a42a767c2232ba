"""The list of compiler versions that are known to go wrong."""

import pytest

from gem_core.select import known_bad
from gem_core.select.known_bad import KNOWN_BAD, KnownBad, refusals
from gem_core.spec import KernelImpl, KernelRequest

TRITON = KernelImpl(
    op="gdpa", contract=1, backend="triton", load="m:f", devices=("cuda", "interpreter"), dtypes=("fp32", "bf16"), requires=("triton",)
)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch):
    return lambda version: monkeypatch.setattr(known_bad, "installed", lambda name: version if name == "triton" else None)


def request(device: str, dtype: str, arch: int | None = None) -> KernelRequest:
    return KernelRequest(op="gdpa", device=device, dtype=dtype, arch=arch)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_case_I12_bf16_under_the_interpreter_is_refused(triton, version: str) -> None:
    triton(version)
    (reason,) = refusals(TRITON, request("interpreter", "bf16"))
    assert f"triton {version}" in reason
    assert "bf16" in reason


def test_case_I12_other_requests_of_a_listed_version_pass(triton) -> None:
    triton("3.7.1")
    assert refusals(TRITON, request("interpreter", "fp32")) == []
    assert refusals(TRITON, request("cuda", "bf16", 90)) == []


def test_case_I12_a_fault_that_only_warns_refuses_nothing(triton) -> None:
    triton("3.6.0")
    assert refusals(TRITON, request("cuda", "bf16", 90)) == []


@pytest.mark.parametrize("version", ["3.5.9", "4.0.0", None])
def test_case_I12_other_versions_pass(triton, version: str | None) -> None:
    triton(version)
    assert refusals(TRITON, request("interpreter", "bf16")) == []


def test_case_I12_kernels_that_do_not_need_it_pass(triton) -> None:
    triton("3.7.1")
    plain = KernelImpl(op="gdpa", contract=1, backend="plain", load="m:f", devices=("cpu",), dtypes=("bf16",))
    assert refusals(plain, request("interpreter", "bf16")) == []


def test_case_I12_a_listed_architecture_is_refused_alone(triton, monkeypatch: pytest.MonkeyPatch) -> None:
    triton("3.6.0")
    entry = KnownBad(distribution="triton", first=(3, 6, 0), end=(3, 6, 1), device="cuda", arch=90, refuse=True, fault="it crashes")
    monkeypatch.setattr(known_bad, "KNOWN_BAD", (entry,))
    assert refusals(TRITON, request("cuda", "bf16", 90)) == ["triton 3.6.0: it crashes"]
    assert refusals(TRITON, request("cuda", "bf16", 100)) == []


def test_the_list_names_the_first_good_release_after_the_bad_ones() -> None:
    for bad in KNOWN_BAD:
        assert bad.first < bad.end
        assert bad.fault
