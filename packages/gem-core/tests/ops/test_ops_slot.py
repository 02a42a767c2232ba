import pytest
import torch
from torch import nn

from gem_core.ops import gdpa
from gem_core.ops.slot import KernelSlot, bind_kernels, check_of, kernel_slots
from gem_core.select.policy import KernelPolicy, policy_scope
from gem_core.spec import KernelImpl, KernelRequest, KernelUnavailable, RequestError
from gem_core.testing import fake_host, fake_module, fake_plugin


class Layer(nn.Module):
    def __init__(self, window=False):
        super().__init__()
        self.attend = KernelSlot("gdpa", head_dim=4, features=("act_gelu", *(("window",) if window else ())))
        self.pool = KernelSlot("pooled_attention", head_dim=4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(window=True)])
        self.again = self.layers[0].attend  # one slot in two places


def sevens(q, *arguments, **options):
    return torch.full_like(q, 7.0)


def acme(features=("act_gelu",)):
    impl = KernelImpl(op="gdpa", contract=1, backend="acme", load="acme_kernels:gdpa", devices=("cpu",), dtypes=("fp64", "fp32"), features=features)
    return fake_plugin("acme-gem", {"gem_kernel_impls": [impl]})


@pytest.fixture
def call(randn, offsets_of):
    q, offsets = randn(5, 2, 4), offsets_of([2, 3])
    return (q, q, q, offsets, offsets), {"max_q": 3, "max_k": 3}


def test_an_unbound_slot_is_the_public_function(call):
    arguments, options = call
    slot = KernelSlot("gdpa", head_dim=4, features=("act_gelu",))
    assert slot.backend is None
    assert torch.equal(slot(*arguments, **options), gdpa(*arguments, **options))


def test_a_bound_slot_calls_what_was_bound(call):
    arguments, options = call
    slot = KernelSlot("gdpa", head_dim=4, features=("act_gelu",))
    slot.bind(sevens, "acme")
    assert slot.backend == "acme"
    assert (slot(*arguments, **options) == 7).all()


def test_a_bound_slot_still_refuses_bad_input(call):
    arguments, options = call
    slot = KernelSlot("gdpa", features=("act_gelu",))
    slot.bind(sevens, "acme")
    with pytest.raises(RequestError, match="longer than the given maximum 2"):
        slot(*arguments, **{**options, "max_q": 2})


def test_a_bound_slot_refuses_features_it_was_not_declared_for(call):
    """The kernel was chosen for the declared features; it may not know the others."""
    arguments, options = call
    slot = KernelSlot("gdpa", features=("act_gelu",))
    slot.bind(sevens, "acme")
    with pytest.raises(RequestError, match="uses act_silu, window"):
        slot(*arguments, **options, activation="silu", window=1)


def test_the_request_of_a_slot(call):
    arguments, options = call
    slot = KernelSlot("gdpa", head_dim=4, features=("act_gelu",))
    assert slot.request(device="cpu", dtype="fp64", arch=None, backward=True) == check_of("gdpa")(*arguments, **options)
    cuda = slot.request(device="cuda", dtype="bf16", arch=90, backward=False, deterministic=True)
    assert cuda == KernelRequest(
        op="gdpa", device="cuda", dtype="bf16", arch=90, head_dim=4, features=frozenset({"act_gelu"}), backward=False, deterministic=True
    )


def test_an_unknown_op_offers_the_nearest():
    with pytest.raises(RequestError, match=r"'gdpaa'.*Did you mean 'gdpa'"):
        KernelSlot("gdpaa")


def test_slots_are_found_in_module_order_and_once():
    model = Model()
    slots = kernel_slots(model)
    assert len(slots) == 4
    assert slots[0] is model.again is model.layers[0].attend
    assert {id(slot) for slot in slots} == {id(s) for layer in model.layers for s in (layer.attend, layer.pool)}
    assert kernel_slots(nn.Linear(2, 2)) == []


def test_binding_chooses_once_for_each_slot():
    model = Model()
    with fake_host():
        chosen = bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
    assert [(choice.request.op, choice.backend) for choice in chosen] == [("gdpa", "reference"), ("pooled_attention", "reference")] * 2
    assert {slot.backend for slot in kernel_slots(model)} == {"reference"}


def test_binding_follows_the_policy_and_names_both_backends_of_one_op():
    model = Model()
    with fake_host(acme()), fake_module("acme_kernels", gdpa=sevens), policy_scope(KernelPolicy(prefer=("acme", "reference"))):
        chosen = bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
    assert [choice.backend for choice in chosen] == ["acme", "reference", "reference", "reference"]
    assert [layer.attend.backend for layer in model.layers] == ["acme", "reference"]


def test_nothing_is_bound_when_one_slot_finds_no_kernel():
    model = Model()
    policy = KernelPolicy(use={"gdpa": "acme"})
    with (
        fake_host(acme()),
        fake_module("acme_kernels", gdpa=sevens),
        policy_scope(policy),
        pytest.raises(KernelUnavailable, match="does not support window"),
    ):
        bind_kernels(model, device="cpu", dtype="fp32", arch=None, backward=True)
    assert all(slot.backend is None for slot in kernel_slots(model))


def test_a_slot_takes_the_backend_it_is_asked_to_take_and_contradictions_are_refused():
    model, where = Model(), {"device": "cpu", "dtype": "fp32", "arch": None, "backward": True}
    first, second = (layer.attend for layer in model.layers)
    first.asked = "acme"
    with fake_host(acme()), fake_module("acme_kernels", gdpa=sevens):
        chosen = bind_kernels(model, **where)
        assert (first.backend, second.backend) == ("acme", "reference")
        assert chosen[0].rule == "the precision recipe"
        with policy_scope(KernelPolicy(use={"gdpa": "acme"})), pytest.raises(KernelUnavailable, match="does not support window"):
            bind_kernels(model, **where)
        with policy_scope(KernelPolicy(use={"gdpa": "reference"})), pytest.raises(RequestError, match="the precision recipe asks for 'acme'"):
            bind_kernels(model, **where)


def test_a_compiled_region_holds_the_direct_call(call, monkeypatch):
    """While compiling, a bound slot skips the checks that read tensors."""
    arguments, options = call
    slot = KernelSlot("gdpa", features=())
    slot.bind(sevens, "acme")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert (slot(*arguments, **{**options, "max_q": 0}) == 7).all()


def test_a_slot_shows_what_it_holds():
    slot = KernelSlot("gdpa", head_dim=4, features=("window",))
    slot.bind(sevens, "acme")
    assert repr(slot) == "KernelSlot('gdpa', head_dim=4, features=['window'], backend='acme')"
