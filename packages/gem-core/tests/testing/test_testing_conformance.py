"""The suite itself: every planted fault turns it red, and what it skips it skips aloud."""

import os
from dataclasses import replace

import pytest
import torch

from gem_core.ops import gdpa, jagged_attention
from gem_core.ops.attend import Rows, per_head, score, weigh
from gem_core.ops.gdpa import reference as gdpa_reference
from gem_core.ops.jagged import pad_reference
from gem_core.ops.jagged_attention import reference as attention_reference
from gem_core.spec import KernelImpl, RequestError
from gem_core.testing import conformance_suite, fake_host, fake_module, fake_plugin
from gem_core.testing.conformance import check_drawn, make_plan, plain_trials
from gem_core.testing.other_cases import OP_CASES
from gem_core.testing.trial import check, check_repeats

WORDS = {
    "gdpa": ("cross", "window", "broadcast_q", "dense_kv", "gqa", "act_gelu"),
    "jagged_attention": ("cross", "causal", "window", "broadcast_q", "gqa"),
    "jagged_pad": (),
}


class Backend:
    """A stand-in backend of one op, registered for the length of a block."""

    def __init__(self, op, function, **fields):
        impl = KernelImpl(
            **{
                "op": op, "contract": 1, "backend": "acme", "load": "acme_kernels:function", "devices": ("cpu",), "dtypes": ("fp32",),
                "features": WORDS[op], **fields,
            }
        )  # fmt: skip
        self.op, self.host = op, fake_host(fake_plugin("acme-gem", {"gem_kernel_impls": [impl]}))
        self.module = fake_module("acme_kernels", function=function)

    def __enter__(self):
        self.host.__enter__()
        self.module.__enter__()
        return make_plan(self.op, backend="acme")

    def __exit__(self, *error):
        self.module.__exit__(*error)
        self.host.__exit__(*error)


def red(op, function, *names, **fields):
    """Names of the cases that fail, of all or of those named, and the first message."""
    failed, message = [], ""
    with Backend(op, function, **fields) as plan:
        trials = [trial for trial in plan.trials if not names or trial.name in names]
        assert trials
        for trial in trials:
            try:
                check(trial, plan.op)
            except (AssertionError, RuntimeError) as error:
                failed.append(trial.name)
                message = message or str(error)
    return failed, message


# ---- faults ---------------------------------------------------------------------------------------------------------------------------


def window_too_wide(q, k, v, q_offsets, k_offsets, *, window=None, **options):
    return gdpa_reference(q, k, v, q_offsets, k_offsets, window=None if window is None else window + 1, **options)


def aligned_at_the_start(q, k, v, q_offsets, k_offsets, *, causal=False, **options):
    """Causal by index, as if queries and keys began together."""
    if not causal or q_offsets is None:
        return attention_reference(q, k, v, q_offsets, k_offsets, causal=causal, **options)
    index = torch.arange(max(options["max_q"], options["max_k"]))
    bias = torch.zeros(options["max_q"], options["max_k"], dtype=q.dtype)
    bias = bias.masked_fill(index[None, : options["max_k"]] > index[: options["max_q"], None], -torch.inf)
    return attention_reference(q, k, v, q_offsets, k_offsets, bias=bias[None, None], **options)


def no_tail_mask(q, k, v, q_offsets, k_offsets, *, max_q, max_k, scale=None, causal=False, window=None, bias=None, return_lse=False):
    """Padded keys score 0 and take part in the softmax."""
    rows = Rows(q, k, v, q_offsets, k_offsets, max_q, max_k)
    scores = score(rows.q * (q.shape[-1] ** -0.5 if scale is None else scale), rows.k)
    if causal or window is not None:
        seen = rows.visible(causal=causal, window=window) | (torch.arange(max_k) >= rows.k_lengths[:, None])[:, None]
        scores = scores.masked_fill(~seen[:, None, None], -1e30)
    return rows.pack(weigh(scores.softmax(-1), rows.v))


def nan_where_no_key(q, k, v, q_offsets, k_offsets, *, max_q, max_k, scale=None, causal=False, window=None, bias=None, return_lse=False):
    rows = Rows(q, k, v, q_offsets, k_offsets, max_q, max_k)
    scores = score(rows.q * (q.shape[-1] ** -0.5 if scale is None else scale), rows.k)
    mask = rows.visible(causal=causal, window=window)[:, None, None]
    return rows.pack(weigh(scores.masked_fill(~mask, -torch.inf).softmax(-1), rows.v))


class Scaled(torch.autograd.Function):
    """Identity whose gradient is 1 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def wrong_key_gradient(q, k, v, *arguments, **options):
    return gdpa_reference(q, Scaled.apply(k), v, *arguments, **options)


def no_value_gradient(q, k, v, *arguments, **options):
    return gdpa_reference(q, k, v.detach() + 0 * v, *arguments, **options)


def rows_never_written(q, k, v, q_offsets, k_offsets, **options):
    """A kernel whose grid skips rows without keys and whose output is fresh memory."""
    out = gdpa_reference(q, k, v, q_offsets, k_offsets, **options)
    if q_offsets is None or k_offsets is None:
        return out
    written = torch.repeat_interleave(k_offsets.diff() > 0, q_offsets.diff())
    return torch.where(written[:, None, None], out, torch.empty_like(out))


def reads_past_the_end(q, k, v, *arguments, **options):
    """Loads one token too many and multiplies it by 0."""
    if not k.shape[0] or k.storage_offset() + k.stride(0) * (k.shape[0] + 1) > k.untyped_storage().size() // k.element_size():
        return gdpa_reference(q, k, v, *arguments, **options)
    past = k.as_strided(k.shape, k.stride(), k.storage_offset() + k.stride(0))
    return gdpa_reference(q, k + 0 * past.detach(), v, *arguments, **options)


def takes_everything_as_contiguous(q, k, v, *arguments, **options):
    dense = [t.as_strided(t.shape, torch.empty(t.shape).stride()) for t in (q, k, v)]
    return gdpa_reference(*dense, *arguments, **options)


def other_heads(q, k, v, *arguments, **options):
    """Grouped heads dealt out in the wrong order."""
    group = q.shape[1] // k.shape[-2]
    return gdpa_reference(q, k.repeat_interleave(group, -2).flip(-2), v.repeat_interleave(group, -2), *arguments, **options)


def lost_precision(q, k, v, *arguments, **options):
    return gdpa_reference(q.bfloat16(), k.bfloat16(), v.bfloat16(), *arguments, **options).float()


def wrong_dtype(q, *arguments, **options):
    return gdpa_reference(q, *arguments, **options).double()


def truncates_the_wrong_side(values, offsets, *, max_length, fill=0.0, truncate=None):
    other = {"left": "right", "right": "left", None: None}[truncate]
    return pad_reference(values, offsets, max_length=max_length, fill=fill, truncate=other)


FAULTS = [
    ("gdpa", window_too_wide, "window_3"),
    ("gdpa", wrong_key_gradient, "odd"),
    ("gdpa", no_value_gradient, "odd"),
    ("gdpa", rows_never_written, "cross"),
    ("gdpa", reads_past_the_end, "amid_nan"),
    ("gdpa", takes_everything_as_contiguous, "fused_views"),
    ("gdpa", other_heads, "odd"),
    ("gdpa", lost_precision, "odd"),
    ("gdpa", wrong_dtype, "odd"),
    ("jagged_attention", aligned_at_the_start, "causal_cross"),
    ("jagged_attention", no_tail_mask, "odd"),
    ("jagged_attention", nan_where_no_key, "cross"),
    ("jagged_pad", truncates_the_wrong_side, "truncate_left"),
]


@pytest.mark.parametrize(("op", "fault", "case"), FAULTS, ids=[fault.__name__ for _, fault, _ in FAULTS])
def test_a_planted_fault_turns_the_suite_red(op, fault, case):
    failed, message = red(op, fault, case)
    assert failed == [case]
    assert message


@pytest.mark.parametrize(("op", "right"), [("gdpa", gdpa_reference), ("jagged_attention", attention_reference), ("jagged_pad", pad_reference)])
def test_a_right_backend_stays_green(op, right):
    assert red(op, right) == ([], "")


def test_faults_that_only_one_kind_of_case_shows_are_shown_by_it():
    """Each awkward case earns its place: without it the fault would pass."""
    assert set(red("gdpa", takes_everything_as_contiguous)[0]) <= {"fused_views"}
    assert set(red("gdpa", reads_past_the_end)[0]) == {"amid_nan"}
    assert all("window" in name for name in red("gdpa", window_too_wide)[0])


def test_drawn_lengths_find_a_fault_that_needs_an_empty_row():
    def first_row_only(q, k, v, q_offsets, k_offsets, **options):
        out = gdpa_reference(q, k, v, q_offsets, k_offsets, **options)
        empty_before_full = (q_offsets.diff()[:-1] == 0) & (q_offsets.diff()[1:] > 0)
        return out * 2 if bool(empty_before_full.any()) else out

    with Backend("gdpa", first_row_only, features=("act_gelu",)) as plan, pytest.raises(AssertionError, match=r"drawn \[0, 1\]"):
        check_drawn(plan, OP_CASES["gdpa"]())


def test_a_kernel_that_does_not_repeat_is_told():
    def noisy(q, k, v, *arguments, **options):
        return gdpa_reference(q, k, v, *arguments, **options) + torch.rand(()) * 1e-9

    with Backend("gdpa", noisy, dtypes=("fp64",)) as plan:
        trial = next(trial for trial in plan.trials if trial.name == "odd")
        with pytest.raises(AssertionError, match="differs between two runs"):
            check_repeats(trial, plan.op)


def test_cut_rows_are_checked_against_zeros():
    """What the suite does on CUDA, run on the CPU past the ops' checks."""
    cases = OP_CASES["gdpa"]()

    def cut_trials(plan):
        return [replace(trial, make=cases.cut) for trial in plain_trials(plan, cases, [3])]

    with Backend("gdpa", gdpa_reference) as plan:
        for trial in cut_trials(plan):
            check(trial, plan.op)

    def garbage(q, k, v, q_offsets, k_offsets, *, max_q, **options):
        out = gdpa_reference(q, k, v, q_offsets, k_offsets, max_q=max_q, **options)
        position = torch.arange(q.shape[0]) - torch.repeat_interleave(q_offsets[:-1], q_offsets.diff())
        return torch.where((position < max_q)[:, None, None], out, torch.empty_like(out))

    with Backend("gdpa", garbage) as plan:
        (trial,) = cut_trials(plan)
        with pytest.raises(AssertionError, match="error inf"):
            check(trial, plan.op)


def test_skips_are_counted_and_carry_reasons():
    with Backend("gdpa", gdpa_reference, features=("act_gelu",), dtypes=("fp32", "fp64"), head_dims=(32, 64)) as plan:
        names = {trial.name for trial in plan.trials}
        assert {"odd", "empty_batch"} <= names
        assert not any(word in name for name in names for word in ("window", "cross", "dense", "silu"))
        assert {trial.head_dim for trial in plan.trials} == {32, 64}
        assert {trial.dtype for trial in plan.trials} == {"fp32", "fp64"}
        assert len(plan.trials) + len(plan.skipped) == 2 * len(OP_CASES["gdpa"]().cases)
        assert {why for name, why in plan.skipped if name.startswith("window_3-")} == {"does not support window"}


def test_a_backend_that_fits_nothing_fails():
    with Backend("gdpa", gdpa_reference, features=()):
        suite = conformance_suite("gdpa", backend="acme")
        with pytest.raises(AssertionError, match="fits none of the"):
            suite().test_fits_some_case(lambda name, value: None)


def test_a_backend_for_a_machine_that_is_not_here_is_skipped_aloud():
    with Backend("gdpa", gdpa_reference, devices=("cuda",)):
        if torch.cuda.is_available():
            pytest.skip("this machine has CUDA")
        suite = conformance_suite("gdpa", backend="acme")
        with pytest.raises(pytest.skip.Exception, match="runs on cuda, which this machine does not have"):
            suite().test_device()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "gdpaa", "backend": "reference"}, "Did you mean 'gdpa'"),
        ({"op": "gdpa", "backend": "referense"}, "Did you mean 'reference'"),
        ({"op": "gdpa", "backend": "reference", "dtypes": ["fp23"]}, "Did you mean 'fp32'"),
        ({"op": "jagged_pad", "backend": "reference", "dtypes": ["int64"]}, "not a floating dtype"),
    ],
)
def test_unknown_names_offer_the_nearest(arguments, message):
    with pytest.raises(RequestError, match=message):
        conformance_suite(**arguments)


def test_every_op_has_cases_and_a_case_for_every_feature_word():
    """A word without a case would be a feature that backends declare untested."""
    from gem_core.builtin.kernels import OPS
    from gem_core.ops.slot import check_of
    from gem_core.testing.inputs import Inputs

    assert set(OP_CASES) == {op.name for op in OPS}
    for op in OPS:
        used = set()
        for case in OP_CASES[op.name]().cases:
            inputs = Inputs(seed=0, head_dim=8, rounded=torch.float32, dtype=torch.float32, device="cpu")
            arguments, options = case.make(inputs)
            used |= check_of(op.name)(*arguments, **options).features
        assert used == set(op.features), op.name


def test_named_backends_run_through_the_public_function_too():
    """The suite calls kernels directly; the public call of the same backend gives the same."""
    q, offsets = torch.randn(5, 2, 16), torch.tensor([0, 2, 5])
    with Backend("gdpa", lambda *a, **o: gdpa_reference(*a, **o) * 2):
        assert torch.equal(gdpa(q, q, q, offsets, offsets, max_q=3, max_k=3, backend="acme"), 2 * gdpa(q, q, q, offsets, offsets, max_q=3, max_k=3))
    assert per_head(torch.zeros(2, 3, 4, 5)).shape == (2, 5, 12)
    assert jagged_attention(q, q, q, offsets, offsets, max_q=3, max_k=3).shape == q.shape


STRANGER = """
    from gem_core.ops.jagged import pad_reference

    def right(values, offsets, **options):
        return pad_reference(values, offsets, **options)

    def wrong(values, offsets, **options):
        return pad_reference(values, offsets, **options) * 1.5

    @hookimpl
    def gem_kernel_impls():
        shared = {"op": "jagged_pad", "contract": 1, "devices": ("cpu",), "dtypes": ("fp32",)}
        return [KernelImpl(backend=name, load=f"acme_gem:{name}", **shared) for name in ("right", "wrong")]
"""

TWO_LINES = """
from gem_core.testing import conformance_suite
TestRight = conformance_suite("jagged_pad", backend="right")
TestWrong = conformance_suite("jagged_pad", backend="wrong")
"""


class Outcomes:
    """A pytest plugin that remembers how each test of an inner run ended."""

    def __init__(self):
        self.ended, self.counts = {}, {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.skipped:
            self.ended.setdefault(report.nodeid.split("::")[1], []).append(report.outcome)
            self.counts.update(dict(report.user_properties))


def test_a_stranger_writes_two_lines(install, tmp_path):
    """An installed distribution and a test module as the documentation shows it, collected and run by pytest."""
    install("acme-gem", STRANGER)
    module = tmp_path / "test_acme_pad.py"
    module.write_text(TWO_LINES)
    outcomes = Outcomes()
    code = pytest.main(
        ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}", "-c", os.devnull, str(module)], [outcomes]
    )
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "failed" not in outcomes.ended["TestRight"]
    assert outcomes.ended["TestRight"].count("passed") > len(OP_CASES["jagged_pad"]().cases)
    assert outcomes.ended["TestWrong"].count("failed") > len(OP_CASES["jagged_pad"]().cases) // 2
    assert outcomes.counts == {"cases_run": len(OP_CASES["jagged_pad"]().cases), "cases_skipped": 0}
