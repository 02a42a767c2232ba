"""The conformance suite of an op: a stranger's backend runs it by naming itself.

    from gem_core.testing import conformance_suite
    TestAcmeGdpa = conformance_suite("gdpa", backend="acme")

Forward and gradients are compared with float64 on declared awkward cases and on lengths that Hypothesis draws. A case that the backend does not
declare itself fit for is skipped with its reasons and counted; a backend that fits no case fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gem_core.ops.dispatch import cuda_arch, device_name
from gem_core.ops.slot import check_of
from gem_core.plugins.nearest import nearest
from gem_core.select.registry import OwnedImpl, registry, why_not
from gem_core.spec.errors import RequestError
from gem_core.spec.kernels import DTYPES, KernelImpl, OpSpec
from gem_core.testing.inputs import Inputs, OpCases
from gem_core.testing.other_cases import OP_CASES
from gem_core.testing.trial import TORCH_DTYPES, Make, Trial, check, check_repeats

HEAD_DIMS = (16, 24)
"""Head sizes tried with backends that take any: one power of two and one that is not."""
EXAMPLES, LONGEST = {"interpreter": 5}, {"interpreter": 33}
"""How many lengths Hypothesis draws and how long they get, by device; Triton's interpreter takes a second for what a CPU does in a millisecond."""


@dataclass(frozen=True)
class Plan:
    """What a backend's suite runs and what it skips.

    Args:
        op: the op.
        device: device word of the requests, None where no device of the backend is on this machine.
        trials: cases that the backend declares itself fit for.
        skipped: name of each other case, with the reasons.
        backend: the backend's name.
        dtypes: dtypes that were considered.
        head_dims: head sizes that were considered.
    """

    op: OpSpec
    backend: str
    device: str | None
    dtypes: tuple[str, ...]
    head_dims: tuple[int, ...]
    trials: tuple[Trial, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()

    def candidates(self) -> list[OwnedImpl]:
        return [owned for owned in registry().of(self.op.name) if owned.impl.backend == self.backend]

    def fit(self, make: Make, dtype: str, head_dim: int) -> KernelImpl | list[str]:
        """The backend's implementation for a case, or why it has none."""
        values = TORCH_DTYPES[dtype]
        arguments, options = make(Inputs(seed=0, head_dim=head_dim, rounded=values, dtype=values, device="cpu"))
        request = check_of(self.op.name)(*arguments, **options)
        arch = cuda_arch(torch.cuda.current_device()) if self.device == "cuda" else None
        request = replace(request, device=self.device or "cpu", arch=arch, backward=True, deterministic=False)
        reasons: dict[str, None] = {}
        for owned in self.candidates():
            against = why_not(owned, request)
            if not against:
                return owned.impl
            reasons |= dict.fromkeys(against)
        return list(reasons)

    def trial(self, name: str, make: Make, dtype: str, head_dim: int) -> Trial | list[str]:
        """The trial of a case, or why the backend is not fit for it."""
        impl = self.fit(make, dtype, head_dim)
        return impl if isinstance(impl, list) else Trial(name, make, impl, dtype, head_dim, "cuda" if self.device == "cuda" else "cpu")


def make_plan(op: str, *, backend: str, device: str | None = None, dtypes: Sequence[str] | None = None) -> Plan:
    """Sort the op's cases into those that the backend is fit for and those it is not.

    Raises:
        RequestError: unknown op, backend or dtype; the nearest is offered.
    """
    spec = registry().op(op)
    if op not in OP_CASES:
        raise RequestError(f"conformance suite of {op!r}", "core declares no cases for this op", nearest(op, OP_CASES))
    impls = [owned.impl for owned in registry().of(op)]
    mine = [impl for impl in impls if impl.backend == backend]
    if not mine:
        raise RequestError(f"conformance suite of {op!r} for {backend!r}", "no such backend", nearest(backend, [impl.backend for impl in impls]))
    for name in dtypes or ():
        if name not in TORCH_DTYPES:
            raise RequestError(f"conformance dtype {name!r}", "it is not a floating dtype", nearest(name, TORCH_DTYPES))
    declared = [name for name in DTYPES if name in TORCH_DTYPES and any(name in impl.dtypes for impl in mine)]
    limited = [impl.head_dims for impl in mine if impl.head_dims is not None]
    sizes = sorted({size for dims in limited for size in dims})
    head_dims = tuple(dict.fromkeys((sizes[0], sizes[-1]))) if sizes and len(limited) == len(mine) else HEAD_DIMS
    words = {word for impl in mine for word in impl.devices}
    plan = Plan(spec, backend, device or _device(words), tuple(dtypes or declared), head_dims)
    return plan if plan.device is None else _sorted(plan, OP_CASES[op]())


def _device(words: set[str]) -> str | None:
    if "cuda" in words and torch.cuda.is_available():
        return "cuda"
    here = device_name(torch.device("cpu"))
    return here if words & {here, "cpu"} else None


def _sorted(plan: Plan, cases: OpCases) -> Plan:
    trials: list[Trial] = []
    skipped: list[tuple[str, str]] = []
    for i, case in enumerate(cases.cases):
        for dtype in plan.dtypes:
            head_dim = plan.head_dims[i % len(plan.head_dims)]
            found = plan.trial(case.name, case.make, dtype, head_dim)
            if isinstance(found, Trial):
                trials.append(found)
            else:
                skipped.append((f"{case.name}-{dtype}-{head_dim}", "; ".join(found)))
    return replace(plan, trials=tuple(trials), skipped=tuple(skipped))


def conformance_suite(op: str, *, backend: str, device: str | None = None, dtypes: Sequence[str] | None = None) -> type:
    """A pytest class that holds ``backend`` to the meaning of ``op``.

    Args:
        op: name of an op of ``gem_core.ops``.
        backend: the backend's name, as its plugin declares it.
        device: one of ``gem_core.spec.DEVICES``; by default CUDA where the backend and the machine have it, else the CPU.
        dtypes: short names of floating dtypes; by default those the backend declares.

    Raises:
        RequestError: unknown op, backend or dtype; the nearest is offered.
    """
    import pytest

    plan = make_plan(op, backend=backend, device=device, dtypes=dtypes)
    cases = OP_CASES[op]()
    if plan.device is None:
        return _absent(plan)
    spec, trials, skipped = plan.op, list(plan.trials), list(plan.skipped)
    repeatable = [trial for trial in trials if trial.impl.deterministic]

    class Suite:
        @pytest.mark.parametrize("trial", trials, ids=str)
        def test_forward_and_gradients(self, trial: Trial) -> None:
            check(trial, spec)

        @pytest.mark.parametrize("reasons", [pytest.param(why, id=name) for name, why in skipped])
        def test_declared_unfit(self, reasons: str) -> None:
            pytest.skip(reasons)

        def test_fits_some_case(self, record_property: Any) -> None:
            record_property("cases_run", len(trials))
            record_property("cases_skipped", len(skipped))
            assert trials, f"backend {backend!r} fits none of the {len(skipped)} cases of {op} on {plan.device}: {skipped[0][1] if skipped else ''}"

        @pytest.mark.parametrize("trial", _evenly(trials, 4), ids=str)
        def test_expanded_upstream_gradient(self, trial: Trial) -> None:
            check(trial, spec, expanded=True)

        @pytest.mark.parametrize("trial", _evenly(repeatable, 2), ids=str)
        def test_repeats_to_the_bit(self, trial: Trial) -> None:
            check_repeats(trial, spec)

        def test_drawn_lengths(self) -> None:
            if not plain_trials(plan, cases, [3]):
                pytest.skip("the backend does not take the op's plainest call")
            check_drawn(plan, cases)

        def test_rows_beyond_the_maximum_are_cut(self) -> None:
            if plan.device != "cuda" or cases.cut is None:
                pytest.skip("rows beyond the maximum are an error on the CPU" if cases.cut else "the op takes no maximum")
            for trial in plain_trials(plan, cases, [3]):
                check(replace(trial, name="cut", make=cases.cut), spec)

    Suite.__name__ = Suite.__qualname__ = f"Conformance_{op}_{backend}"
    return Suite


def plain_trials(plan: Plan, cases: OpCases, lengths: list[int]) -> list[Trial]:
    """The op's plainest call over ``lengths``, in every dtype that the backend takes it in."""
    found = [plan.trial(f"drawn {lengths}", lambda inputs: cases.plain(inputs, lengths), dtype, plan.head_dims[0]) for dtype in plan.dtypes]
    return [trial for trial in found if isinstance(trial, Trial)]


def check_drawn(plan: Plan, cases: OpCases) -> None:
    """Hypothesis draws lengths for the plainest call, and shrinks those that fail."""
    from hypothesis import given, settings

    from gem_core.testing.strategies import jagged_lengths

    word = plan.device or "cpu"

    @settings(max_examples=EXAMPLES.get(word, 15), deadline=None, derandomize=True, database=None)
    @given(lengths=jagged_lengths(max_rows=6, max_length=LONGEST.get(word, 70)))
    def holds(lengths: list[int]) -> None:
        for trial in plain_trials(plan, cases, lengths)[:1]:
            check(trial, plan.op)

    holds()


def _evenly(trials: list[Trial], count: int) -> list[Trial]:
    return trials[:: max(len(trials) // count, 1)][:count]


def _absent(plan: Plan) -> type:
    import pytest

    devices = "/".join(sorted({word for owned in plan.candidates() for word in owned.impl.devices}))

    class Suite:
        def test_device(self) -> None:
            pytest.skip(f"{plan.backend} runs on {devices}, which this machine does not have")

    Suite.__name__ = Suite.__qualname__ = f"Conformance_{plan.op.name}_{plan.backend}"
    return Suite
