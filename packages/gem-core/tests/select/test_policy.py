"""Which backend is chosen: the order of names, preferences, refusals, and the loud reference."""

import logging
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gem_core
from gem_core.select.policy import DEFAULT_PREFER, KernelPolicy, choose, explain, policy_scope, preference, use
from gem_core.spec import KernelRequest, KernelUnavailable, RequestError

BACKENDS = """
def kernel(backend, **more):
    base = dict(op="gdpa", contract=1, backend=backend, load="acme_gem:run", devices=("cpu", "cuda"), dtypes=("fp32",), features=("window",))
    return KernelImpl(**{**base, **more})

def run(*args, **keywords):
    return "acme"

@hookimpl
def gem_kernel_impls():
    return [
        kernel("acme"),
        kernel("rival"),
        kernel("gluon", devices=("cuda",), min_arch=100),
        kernel("vary", variant="small", head_dims=(32,)),
        kernel("vary", variant="large", head_dims=(64, 128)),
    ]
"""
REQUEST = KernelRequest(op="gdpa", device="cpu", dtype="fp32", head_dim=64)
CUDA = KernelRequest(op="gdpa", device="cuda", dtype="fp32", arch=90, head_dim=64, features=frozenset({"cross"}))


@pytest.fixture
def acme(install) -> None:
    install("acme-gem", BACKENDS)


def test_an_installed_backend_changes_nothing_until_it_is_named(acme: None) -> None:
    choice = choose(REQUEST)
    assert (choice.backend, choice.rule) == ("reference", "prefer (default)")
    assert choose(REQUEST, "acme").impl.resolve()() == "acme"


def test_the_nearest_name_counts(acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every subset of the four places: the first in the order wins."""
    places = ("backend= of the call", "gem_core.use", "GEM_KERNELS", "kernels.use")
    for on in product((False, True), repeat=4):
        wanted = dict(zip(places, on, strict=True))
        if wanted["GEM_KERNELS"]:
            monkeypatch.setenv("GEM_KERNELS", "gdpa=rival")
        else:
            monkeypatch.delenv("GEM_KERNELS", raising=False)
        policy = KernelPolicy(use={"gdpa": "acme"} if wanted["kernels.use"] else {})
        with policy_scope(policy), use(**({"gdpa": "rival"} if wanted["gem_core.use"] else {})):
            choice = choose(REQUEST, "acme" if wanted["backend= of the call"] else None)
        expected = next((place for place in places if wanted[place]), "prefer (default)")
        assert choice.rule == expected


def test_preference_from_default_configuration_and_environment(acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preference() == (DEFAULT_PREFER, "default")
    configured = KernelPolicy(prefer=("acme", "reference"), prefer_rule="run.toml")
    with policy_scope(configured):
        assert (choose(REQUEST).backend, choose(REQUEST).rule) == ("acme", "prefer (run.toml)")
        monkeypatch.setenv("GEM_KERNELS_PREFER", "rival, reference")
        assert (choose(REQUEST).backend, choose(REQUEST).rule) == ("rival", "prefer (GEM_KERNELS_PREFER)")
    with policy_scope(KernelPolicy(prefer=("acme",), prefer_rule="--set")):
        assert choose(REQUEST).backend == "acme"


def test_the_first_fit_of_the_list_is_taken(acme: None) -> None:
    with policy_scope(KernelPolicy(prefer=("gluon", "nobody", "rival", "acme"))):
        assert choose(REQUEST).backend == "rival"


def test_a_named_backend_that_does_not_fit_is_an_error_with_its_reasons(acme: None) -> None:
    with pytest.raises(KernelUnavailable, match="runs on cuda, not on cpu") as caught:
        choose(REQUEST, "gluon")
    assert "acme-gem 1.0" in caught.value.so
    assert caught.value.exit_code == 2
    with use(gdpa="gluon"), pytest.raises(KernelUnavailable, match=r"gem_core\.use"):
        choose(REQUEST)


def test_a_named_backend_that_does_not_exist_offers_the_nearest(acme: None) -> None:
    with pytest.raises(RequestError, match="Did you mean 'acme'"):
        choose(REQUEST, "amce")


def test_when_nothing_fits_the_request_and_every_candidate_with_reasons_are_listed(acme: None) -> None:
    request = KernelRequest(op="gdpa", device="cuda", dtype="fp16", arch=80, head_dim=64, features=frozenset({"window"}))
    with policy_scope(KernelPolicy(prefer=("gluon", "acme"))), pytest.raises(KernelUnavailable) as caught:
        choose(request)
    text = str(caught.value)
    assert "gdpa on cuda sm80 in fp16 (head_dim 64, window, backward)" in text
    for part in ("acme (acme-gem 1.0): takes fp32, not fp16", "needs sm100, this is sm80", "rival", "not in prefer", "reference (gem-core"):
        assert part in text


def test_variants_of_a_backend_are_tried_in_their_order(acme: None) -> None:
    assert choose(REQUEST, "vary").impl.variant == "large"
    small = KernelRequest(op="gdpa", device="cpu", dtype="fp32", head_dim=32)
    assert choose(small, "vary").impl.variant == "small"
    odd = KernelRequest(op="gdpa", device="cpu", dtype="fp32", head_dim=48)
    with pytest.raises(KernelUnavailable, match=r"(?s)vary/small.*vary/large"):
        choose(odd, "vary")


def test_an_unknown_feature_word_is_refused(acme: None) -> None:
    with pytest.raises(RequestError, match="Did you mean 'window'"):
        choose(KernelRequest(op="gdpa", device="cpu", dtype="fp32", features=frozenset({"windw"})))


def test_an_unknown_op_is_refused_everywhere(acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="Did you mean 'gdpa'"), use(gdpaa="acme"):
        pass
    with pytest.raises(RequestError, match="Did you mean 'gdpa'"), policy_scope(KernelPolicy(use={"gdap": "acme"})):
        pass
    monkeypatch.setenv("GEM_KERNELS", "gdap=acme")
    with pytest.raises(RequestError, match="Did you mean 'gdpa'"):
        choose(REQUEST)


@pytest.mark.parametrize("text", ["gdpa", "gdpa=", "=acme", "gdpa:acme"])
def test_a_malformed_variable_is_refused(acme: None, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GEM_KERNELS", text)
    with pytest.raises(RequestError, match="not OP=BACKEND"):
        choose(REQUEST)


def test_use_nests_and_ends(acme: None) -> None:
    with gem_core.use(gdpa="acme"):
        with gem_core.use(gdpa="rival"):
            assert choose(REQUEST).backend == "rival"
        assert choose(REQUEST).backend == "acme"
    assert choose(REQUEST).backend == "reference"


def test_use_ends_when_the_block_raises(acme: None) -> None:
    with pytest.raises(ZeroDivisionError), gem_core.use(gdpa="acme"):
        raise ZeroDivisionError
    assert choose(REQUEST).backend == "reference"


def test_choices_are_cached_and_follow_the_environment(acme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = choose(REQUEST)
    assert choose(REQUEST) is first
    monkeypatch.setenv("GEM_KERNELS", "gdpa=acme")
    assert choose(REQUEST).backend == "acme"
    monkeypatch.delenv("GEM_KERNELS")
    assert choose(REQUEST) is first


def test_reference_in_cuda_training_is_loud_once(acme: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "gem_core.select"):
        assert choose(CUDA).backend == "reference"
        choose(CUDA)
    assert len(caplog.records) == 1
    assert "slow reference" in caplog.text


@pytest.mark.parametrize(
    "request_",
    [
        KernelRequest(op="gdpa", device="cpu", dtype="fp32"),
        KernelRequest(op="gdpa", device="cuda", dtype="fp32", arch=90, backward=False),
    ],
)
def test_reference_is_quiet_on_a_cpu_and_without_backward(acme: None, request_: KernelRequest, caplog: pytest.LogCaptureFixture) -> None:
    with policy_scope(KernelPolicy(on_reference="error")):
        assert choose(request_).backend == "reference"
    assert caplog.records == []


def test_reference_in_cuda_training_can_be_refused_or_allowed(acme: None, caplog: pytest.LogCaptureFixture) -> None:
    with (
        policy_scope(KernelPolicy(on_reference="error")),
        pytest.raises(KernelUnavailable, match=r"(?s)only the reference fits.*does not support cross"),
    ):
        choose(CUDA)
    with policy_scope(KernelPolicy(on_reference="allow")):
        assert choose(CUDA).backend == "reference"
    with policy_scope(KernelPolicy(on_reference="error", use={"gdpa": "reference"})):
        assert choose(CUDA).backend == "reference"
    assert caplog.records == []


def test_explain_agrees_with_choose_and_logs_nothing(acme: None, caplog: pytest.LogCaptureFixture) -> None:
    candidates, outcome = explain(CUDA)
    assert not isinstance(outcome, KernelUnavailable)
    here = {c.owned.impl.backend: (c.here, c.why_not) for c in candidates}
    assert here["reference"] == ("chosen", [])
    assert here["acme"] == ("no", ["does not support cross", "not in prefer"])
    assert here["gluon"][1] == ["needs sm100, this is sm90", "does not support cross"]
    assert caplog.records == []


def test_explain_shows_what_fits_and_is_not_chosen(acme: None) -> None:
    here = {c.owned.impl.backend: (c.here, c.why_not) for c in explain(REQUEST)[0]}
    assert here["acme"] == ("fits", ["not in prefer"])
    here = {c.owned.impl.backend: (c.here, c.why_not) for c in explain(REQUEST, "acme")[0]}
    assert here["acme"] == ("chosen", [])
    assert here["reference"] == ("fits", ["acme is named"])


def test_explain_gives_the_refusal(acme: None) -> None:
    candidates, outcome = explain(REQUEST, "gluon")
    assert isinstance(outcome, KernelUnavailable)
    assert "chosen" not in {c.here for c in candidates}


@settings(max_examples=40, derandomize=True)
@given(
    prefer=st.lists(st.sampled_from(["gluon", "triton", "acme", "rival", "vary", "reference"]), unique=True), head_dim=st.sampled_from([32, 48, 64])
)
def test_automatic_choice_is_the_first_of_the_list_that_fits(prefer: list[str], head_dim: int) -> None:
    """Against the plain rule, for any list: with core alone only the reference fits a CPU request for cross attention."""
    request = KernelRequest(op="gdpa", device="cpu", dtype="fp64", head_dim=head_dim, features=frozenset({"cross"}))
    with policy_scope(KernelPolicy(prefer=tuple(prefer))):
        if "reference" in prefer:
            assert choose(request).backend == "reference"
        else:
            with pytest.raises(KernelUnavailable):
                choose(request)
