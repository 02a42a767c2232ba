"""One trial: an op's forward and gradients by a kernel, by plain torch in the same dtype, and in float64."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gem_core.ops.checks import FLOAT_NAMES
from gem_core.spec.kernels import KernelImpl, OpSpec, load_object
from gem_core.testing.close import assert_as_accurate
from gem_core.testing.inputs import Call, Inputs
from gem_core.testing.memory import plain_precision, poisoned_memory

TORCH_DTYPES = {name: dtype for dtype, name in FLOAT_NAMES.items()}
Make = Callable[[Inputs], Call]
Kernel = Callable[..., Any]


@dataclass(frozen=True)
class Trial:
    """A case that a backend must pass.

    Args:
        name: readable id.
        make: draws the call.
        impl: the implementation.
        dtype: short dtype name.
        head_dim: width of a head.
        torch_device: where the kernel's tensors lie.
    """

    name: str
    make: Make
    impl: KernelImpl
    dtype: str
    head_dim: int
    torch_device: str

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}-{self.head_dim}"

    def inputs(self, *, exact: bool = False) -> Inputs:
        """The case's inputs in the trial's dtype on its device, or, ``exact``, the same rounded values in float64 on the CPU."""
        rounded = TORCH_DTYPES[self.dtype]
        seed = int.from_bytes(hashlib.sha256(str(self).encode()).digest()[:4], "big")
        dtype, device = (torch.float64, "cpu") if exact else (rounded, self.torch_device)
        return Inputs(seed=seed, head_dim=self.head_dim, rounded=rounded, dtype=dtype, device=device)


def flat_tensors(result: Any) -> list[Tensor]:
    """The tensors of an op's result, in order."""
    return [result] if isinstance(result, Tensor) else [tensor for tensor in result if isinstance(tensor, Tensor)]


def run(function: Kernel, make: Make, inputs: Inputs, *, expanded: bool = False) -> dict[str, Tensor]:
    """Outputs and gradients of a call, by name.

    Args:
        function: the kernel or the reference.
        make: draws the call.
        inputs: where it draws from.
        expanded: the upstream gradient is one number seen everywhere (stride 0), as ``sum().backward()`` gives it.
    """
    arguments, options = make(inputs)
    outputs = flat_tensors(function(*arguments, **options))
    named = {f"output {i}": output.detach() for i, output in enumerate(outputs)}
    heads = [output for output in outputs if output.requires_grad]
    upstream = [inputs.values(1).expand(h.shape) if expanded else inputs.values(*h.shape) for h in heads]
    gradients = torch.autograd.grad(heads, inputs.leaves, upstream)
    return named | {f"gradient of input {i}": gradient for i, gradient in enumerate(gradients)}


def check(trial: Trial, op: OpSpec, *, expanded: bool = False) -> None:
    """Raise AssertionError unless the trial's kernel is as accurate as plain torch, in outputs and gradients, with poisoned memory.

    Plain torch is the op's reference computing in the trial's dtype throughout.
    """
    reference = load_object(op.reference)
    truth = run(reference, trial.make, trial.inputs(exact=True), expanded=expanded)
    with plain_precision():
        plain = run(reference, trial.make, trial.inputs(), expanded=expanded)
    with poisoned_memory():
        actual = run(trial.impl.resolve(), trial.make, trial.inputs(), expanded=expanded)
    if actual.keys() != truth.keys():
        raise AssertionError(f"results are {sorted(actual)}, expected {sorted(truth)}")
    for name, value in actual.items():
        if value.device.type != torch.device(trial.torch_device).type:
            raise AssertionError(f"{name} lies on {value.device}, the inputs on {trial.torch_device}")
        assert_as_accurate(value, plain[name], truth[name], what=f"{op.name} {trial.name}: {name}")


def check_repeats(trial: Trial, op: OpSpec) -> None:
    """Raise AssertionError unless two runs agree to the bit."""
    first, second = (run(trial.impl.resolve(), trial.make, trial.inputs()) for _ in range(2))
    for name, value in first.items():
        if not torch.equal(value.nan_to_num(), second[name].nan_to_num()):
            raise AssertionError(f"{op.name} {trial.name}: {name} differs between two runs of a kernel declared deterministic")
