"""The kernel registry and the reasons why a kernel does not fit."""

import dataclasses
from typing import Any

import pytest

from gem_core.select.registry import OwnedImpl, importable, registry, stale, why_not
from gem_core.spec import KernelImpl, KernelRequest, PluginError, RequestError

KERNEL = """
@hookimpl
def gem_kernel_impls():
    common = dict(load="acme_gem:run", devices=("cpu",), dtypes=("fp32",))
    return [KernelImpl(op="{op}", contract={contract}, backend="{backend}", variant="{variant}", **common)]
"""


def owned(**changes: Any) -> OwnedImpl:
    base: dict[str, Any] = {
        "op": "gdpa",
        "contract": registry().ops["gdpa"].contract,
        "backend": "acme",
        "load": "acme:run",
        "devices": ("cpu", "cuda"),
        "dtypes": ("fp32", "bf16"),
        "features": ("window",),
    }
    return OwnedImpl(impl=KernelImpl(**{**base, **changes}), owner_name="acme-gem", owner_version="1.0")


def request(**changes: Any) -> KernelRequest:
    base: dict[str, Any] = {"op": "gdpa", "device": "cpu", "dtype": "fp32", "head_dim": 64}
    return KernelRequest(**{**base, **changes})


def test_a_kernel_that_fits_has_no_reason(clean_host: None) -> None:
    assert why_not(owned(), request(features=frozenset({"window"}))) == []


@pytest.mark.parametrize(
    ("kernel", "call", "reason"),
    [
        ({"devices": ("cuda",)}, {}, "runs on cuda, not on cpu"),
        ({"dtypes": ("bf16",)}, {}, "takes bf16, not fp32"),
        ({"min_arch": 100}, {"device": "cuda", "arch": 90}, "needs sm100, this is sm90"),
        ({"max_arch": 89}, {"device": "cuda", "arch": 90}, "ends at sm89, this is sm90"),
        ({"head_dims": (32, 64)}, {"head_dim": 96}, "takes head_dim 32/64, not 96"),
        ({}, {"features": frozenset({"window", "cross", "act_silu"})}, "does not support act_silu, cross"),
        ({"backward": False}, {}, "has no backward"),
        ({"deterministic": False}, {"deterministic": True}, "is not deterministic"),
        ({"requires": ("module_that_is_not_there",)}, {}, "needs the module module_that_is_not_there, which is not installed"),
        ({"contract": 0}, {}, "written for contract 0 of gdpa, which is at 1 here"),
        ({"op": "gdpaa"}, {}, "no loaded plugin declares the op 'gdpaa'"),
    ],
)
def test_each_reason(clean_host: None, kernel: dict[str, Any], call: dict[str, Any], reason: str) -> None:
    assert why_not(owned(**kernel), request(**call)) == [reason]


@pytest.mark.parametrize(
    ("kernel", "call"),
    [
        ({"min_arch": 90, "max_arch": 90}, {"device": "cuda", "arch": 90}),
        ({"min_arch": 100}, {}),
        ({"head_dims": (32, 64)}, {"head_dim": None}),
        ({"backward": False}, {"backward": False}),
        ({"deterministic": False}, {}),
        ({"requires": ("json",)}, {}),
        ({}, {"device": "interpreter"}),
        ({"devices": ("interpreter",)}, {"device": "interpreter"}),
    ],
)
def test_what_looks_like_a_reason_and_is_none(clean_host: None, kernel: dict[str, Any], call: dict[str, Any]) -> None:
    assert why_not(owned(**kernel), request(**call)) == []


def test_all_reasons_are_given_at_once(clean_host: None) -> None:
    reasons = why_not(owned(devices=("cuda",), dtypes=("bf16",), backward=False, contract=0), request(head_dim=7, features=frozenset({"gqa"})))
    assert len(reasons) == 5


CHECK = """
def picky(request):
    return [] if request.head_dim == 64 else [f"head_dim {request.head_dim} is odd"]

def broken(request):
    raise KeyError("head")
"""


def test_a_check_adds_its_reasons(install) -> None:
    install("acme-gem", CHECK)
    kernel = owned(check="acme_gem:picky")
    assert why_not(kernel, request()) == []
    assert why_not(kernel, request(head_dim=63)) == ["head_dim 63 is odd"]


def test_a_check_that_raises_is_its_owners_bug_and_raised_with_the_owners_name(install) -> None:
    install("acme-gem", CHECK)
    with pytest.raises(PluginError, match=r"acme-gem 1.0 raised KeyError") as caught:
        why_not(owned(check="acme_gem:broken"), request())
    assert "bug of acme-gem" in caught.value.do


def test_a_check_is_not_asked_when_its_premises_fail(install) -> None:
    install("acme-gem", CHECK)
    assert why_not(owned(check="acme_gem:broken", requires=("module_that_is_not_there",)), request()) != []


def test_core_declares_every_op_with_a_reference(clean_host: None) -> None:
    known = registry()
    assert {"jagged_attention", "gdpa", "block_attention", "hstu_attention", "pooled_attention", "norm_linear", "pffn"} <= set(known.ops)
    for name in known.ops:
        assert [o.owner_name for o in known.of(name) if o.impl.backend == "reference"] == ["gem-core"]


def test_an_unknown_op_offers_the_nearest(clean_host: None) -> None:
    with pytest.raises(RequestError, match="Did you mean 'gdpa'"):
        registry().op("gdqa")


def test_a_strangers_kernel_is_found_with_its_owner(install) -> None:
    install("acme-gem", KERNEL.format(op="gdpa", contract=1, backend="acme", variant=""), version="2.5")
    (found,) = [o for o in registry().of("gdpa") if o.impl.backend == "acme"]
    assert found.owner == "acme-gem 2.5"


def test_one_kernel_of_two_plugins_is_an_error_that_names_both(install) -> None:
    for name in ("one-gem", "two-gem"):
        install(name, KERNEL.format(op="gdpa", contract=1, backend="acme", variant=""))
    with pytest.raises(PluginError, match=r"one-gem \(one-gem 1.0\) and two-gem \(two-gem 1.0\)") as caught:
        registry()
    assert "gdpa/acme" in caught.value.asked


def test_two_variants_of_one_backend_are_no_clash(install) -> None:
    install("one-gem", KERNEL.format(op="gdpa", contract=1, backend="acme", variant="a"))
    install("two-gem", KERNEL.format(op="gdpa", contract=1, backend="acme", variant="b"))
    assert [o.impl.variant for o in registry().of("gdpa") if o.impl.backend == "acme"] == ["a", "b"]


def test_one_op_of_two_plugins_is_an_error(install) -> None:
    install(
        "acme-gem",
        "@hookimpl\ndef gem_kernel_ops():\n    return [OpSpec(name='gdpa', contract=9, features=(), reference='a:b', flops='a:c', summary='s')]\n",
    )
    with pytest.raises(PluginError, match=r"op 'gdpa'.*gem-core.*acme-gem"):
        registry()


def test_a_stale_contract_is_listed(install) -> None:
    install("acme-gem", KERNEL.format(op="gdpa", contract=7, backend="acme", variant=""))
    reasons = {o.impl.backend: reason for o, reason in stale() if o.owner_name == "acme-gem"}
    assert reasons == {"acme": "written for contract 7 of gdpa, which is at 1 here"}


def test_the_registry_is_built_once_for_a_host_and_anew_for_the_next(install) -> None:
    first = registry()
    assert registry() is first
    install("acme-gem", KERNEL.format(op="gdpa", contract=1, backend="acme", variant=""))
    assert registry() is not first


def test_declarations_are_frozen(clean_host: None) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        owned().impl.backend = "other"  # type: ignore[misc]


def test_importable_does_not_import(install) -> None:
    install("acme-gem", "raise RuntimeError('imported')")
    assert importable("acme_gem")
    assert not importable("module_that_is_not_there")
