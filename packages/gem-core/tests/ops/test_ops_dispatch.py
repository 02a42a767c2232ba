"""From a call to a kernel: requests, named backends, the declarations of core's ops."""

import inspect
import subprocess
import sys

import pytest
import torch

import gem_core.ops
from gem_core.builtin.kernels import ACTIVATIONS as DECLARED
from gem_core.builtin.kernels import OPS, REFERENCE_KERNELS
from gem_core.ops import gdpa, jagged_attention, jagged_pad
from gem_core.ops.activations import ACTIVATIONS
from gem_core.ops.dispatch import device_name, make_request
from gem_core.ops.slot import check_of
from gem_core.spec import KernelImpl, KernelUnavailable, RequestError, load_object
from gem_core.testing import fake_host, fake_module, fake_plugin


def tiny(randn, offsets_of):
    q, offsets = randn(5, 2, 4), offsets_of([2, 3])
    return (q, q, q, offsets, offsets), {"max_q": 3, "max_k": 3}


def test_every_public_op_is_declared_and_the_other_way_round():
    assert sorted(op.name for op in OPS) == sorted(gem_core.ops.__all__)
    assert list(ACTIVATIONS) == list(DECLARED)
    assert {impl.op for impl in REFERENCE_KERNELS} == {op.name for op in OPS}
    assert all(impl.features == op.features and impl.contract == op.contract for op, impl in zip(OPS, REFERENCE_KERNELS))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_function_check_and_reference_share_one_signature(op):
    public = inspect.signature(getattr(gem_core.ops, op.name)).parameters
    assert list(public)[-1] == "backend"
    assert public["backend"].default is None
    shape = [(p.name, p.kind, p.default) for p in public.values() if p.name != "backend"]
    for function in (check_of(op.name), load_object(op.reference)):
        assert [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()] == shape
    assert callable(load_object(op.flops))
    assert op.summary


def test_declarations_import_no_torch():
    code = "import sys, gem_core.builtin.kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_request_is_made_of_shapes_and_dtypes(randn, offsets_of):
    q, k, offsets = randn(5, 4, 8, dtype=torch.bfloat16), randn(2, 6, 2, 8, dtype=torch.bfloat16), offsets_of([2, 3])
    request = check_of("gdpa")(q, k, k, offsets, None, max_q=3, max_k=6, activation="silu", scale_position="after", window=2)
    assert (request.op, request.device, request.dtype, request.arch, request.head_dim) == ("gdpa", "cpu", "bf16", None, 8)
    assert request.features == {"act_silu", "scale_after", "dense_kv", "gqa", "window"}
    assert request.backward
    assert not request.deterministic


@pytest.mark.parametrize(
    ("keys", "words"),
    [("same", set()), ("other", {"cross"}), ("shared", {"broadcast_q"})],
)
def test_self_attention_is_told_by_one_offsets_tensor(randn, offsets_of, keys, words):
    q, offsets = randn(5, 2, 4), offsets_of([2, 3])
    q_offsets = {"same": offsets, "other": offsets.clone(), "shared": None}[keys]
    request = check_of("jagged_attention")(q, q, q, q_offsets, offsets, max_q=5, max_k=3)
    assert request.features == words


def test_backward_is_wanted_only_where_gradients_flow(randn):
    x, frozen = randn(3), randn(3, grad=False)
    assert make_request("op", x, (), (x,)).backward
    assert not make_request("op", x, (), (frozen, None)).backward
    with torch.no_grad():
        assert not make_request("op", x, (), (x,)).backward


def test_deterministic_follows_torch(randn):
    torch.set_deterministic_debug_mode("warn")
    try:
        assert make_request("op", randn(3), (), ()).deterministic
    finally:
        torch.set_deterministic_debug_mode("default")


def test_the_interpreter_is_the_cpu_with_a_variable(monkeypatch):
    assert device_name(torch.device("cpu")) == device_name(torch.device("meta")) == "cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert device_name(torch.device("cpu")) == "interpreter"
    assert device_name(torch.device("cuda")) == "cuda"


def acme(**changes):
    """A stranger's gdpa that answers with sevens."""
    fields = {
        "op": "gdpa", "contract": 1, "backend": "acme", "load": "acme_kernels:gdpa", "devices": ("cpu",), "dtypes": ("fp64", "fp32"),
        "features": ("act_gelu",),
    }  # fmt: skip
    return fake_plugin("acme-gem", {"gem_kernel_impls": [KernelImpl(**{**fields, **changes})]})


def sevens(q, *arguments, **options):
    return torch.full_like(q, 7.0)


def test_a_strangers_backend_is_used_when_named_and_only_then(randn, offsets_of):
    arguments, options = tiny(randn, offsets_of)
    with fake_host(acme()), fake_module("acme_kernels", gdpa=sevens):
        automatic = gdpa(*arguments, **options)
        named = gdpa(*arguments, **options, backend="acme")
        with gem_core.use(gdpa="acme"):
            used = gdpa(*arguments, **options)
        again = gdpa(*arguments, **options)
    assert not (automatic == 7).any()
    assert (named == 7).all()
    assert (used == 7).all()
    assert torch.equal(again, automatic)


def test_a_named_backend_that_does_not_fit_is_an_error_with_reasons(randn, offsets_of):
    arguments, options = tiny(randn, offsets_of)
    with fake_host(acme()), fake_module("acme_kernels", gdpa=sevens):
        with pytest.raises(KernelUnavailable, match="does not support window"):
            gdpa(*arguments, **options, window=1, backend="acme")
        with pytest.raises(RequestError, match="no loaded plugin declares it"):
            gdpa(*arguments, **options, backend="acne")
    with fake_host(acme(contract=99)), pytest.raises(KernelUnavailable, match="written for contract 99"):
        gdpa(*arguments, **options, backend="acme")


def test_bad_input_is_refused_before_a_kernel_is_chosen(randn, offsets_of):
    arguments, options = tiny(randn, offsets_of)
    with fake_host(acme()), fake_module("acme_kernels", gdpa=sevens), pytest.raises(RequestError, match="longer than the given maximum"):
        gdpa(*arguments, **{**options, "max_q": 1}, backend="acme")


def test_integers_are_moved_by_the_reference_and_computed_by_nobody(offsets_of):
    ids, offsets = torch.arange(5), offsets_of([2, 3])
    assert jagged_pad(ids, offsets, max_length=3).tolist() == [[0, 1, 0], [2, 3, 4]]
    heads = ids.view(5, 1, 1)
    with pytest.raises(RequestError, match=r"torch\.int64 is not one of"):
        jagged_attention(heads, heads, heads, offsets, offsets, max_q=3, max_k=3)
