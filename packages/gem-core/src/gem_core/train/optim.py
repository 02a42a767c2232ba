"""The dense optimiser, the learning-rate schedule that dense weights and tables share, and averaged weights for evaluation."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gem_core.spec import RunFailed
from gem_core.train.told import Told


def adamw(module: nn.Module, *, lr: float, betas: Sequence[float], eps: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; weight decay only for matrices, never for norms and biases (parameters with fewer than two dimensions).

    The parameters of each mesh have groups of their own: torch updates a list by the mesh of its first tensor, and would leave all of them alone on a
    rank outside of that mesh, without a word. Whole ones on CUDA are updated by one kernel (``fused``). Sharded ones are updated as lists, on the CPU
    too, where an operation on each by itself costs more than its arithmetic.
    """
    groups: dict[tuple[Any, bool], list[nn.Parameter]] = {}
    for p in module.parameters():
        if p.requires_grad:
            groups.setdefault((p.device_mesh if isinstance(p, DTensor) else None, p.dim() >= 2), []).append(p)
    settings = [
        {"params": members, "weight_decay": weight_decay if matrices else 0.0, **_at_once(members, sharded=mesh is not None)}
        for (mesh, matrices), members in groups.items()
    ]
    return torch.optim.AdamW(settings, lr=lr, betas=(betas[0], betas[1]), eps=eps)


def _at_once(members: Sequence[nn.Parameter], *, sharded: bool) -> dict[str, bool | None]:
    if sharded:
        return {"foreach": True}
    return {"fused": True if all(p.device.type == "cuda" for p in members) else None}


def lr_factor(step: int, *, total: int, schedule: str, warmup: int, final: float) -> float:
    """The factor on all learning rates at a step.

    Rises linearly to 1 over ``warmup`` steps (step 0 has ``1 / (warmup + 1)``), then stays (``constant``) or falls to ``final`` at step
    ``total - 1``, along a line (``linear``) or half a cosine (``cosine``).

    Args:
        step: the optimiser step, from 0.
        total: number of steps of the run.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    falling = 1.0 - done if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return final + (1.0 - final) * falling


def clip_gradients(module: nn.Module, max_norm: float) -> float:
    """Scale the dense gradients so that their global 2-norm is at most ``max_norm`` (0 leaves them); return the norm before.

    Collective where gradients are sharded.

    Raises:
        RunFailed: a gradient is not finite; the parameters that hold it are named.
    """
    named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
    norm = global_norm([grad for _, grad in named])
    value = float(norm)
    if not math.isfinite(value):
        raise _spoilt(_anywhere([name for name, grad in named if not bool(torch.isfinite(_here(grad)).all())]))
    if max_norm > 0 and named:
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()
        torch._foreach_mul_([_here(grad) for _, grad in named], factor)
    return value


def skips_spoilt(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimiser can be told on the device to leave all weights as they are, so that the host need not look at gradients first."""
    return bool(optimizer.param_groups) and all(group.get("fused") for group in optimizer.param_groups)


class LateNorm:
    """The global norm of dense gradients that lie whole on one GPU, without a word to the host.

    ``optimizer`` clips them in its next step, as ``clip_gradients`` does, while it reads them: ``grad_scale`` is what torch's fused ones divide
    gradients by. Where one is not finite it changes nothing: ``found_inf`` is how they are told.
    """

    def __init__(self, module: nn.Module, max_norm: float, optimizer: torch.optim.Optimizer) -> None:
        named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
        self._names = [name for name, _ in named]
        gradients = [grad for _, grad in named]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0)
        norm = torch.linalg.vector_norm(norms)
        finite = torch.isfinite(norm)
        scale = torch.where(finite, torch.clamp((norm + 1e-6) / max_norm, min=1.0), 1.0) if max_norm > 0 else None
        optimizer.grad_scale = scale  # type: ignore[attr-defined]
        optimizer.found_inf = finite.logical_not().float()  # type: ignore[attr-defined]
        self._told = Told(torch.cat([norms, norm[None]]))

    def value(self) -> float:
        """The norm before clipping. Waits for backward.

        Raises:
            RunFailed: as ``clip_gradients``.
        """
        *norms, norm = self._told.value().tolist()
        if not math.isfinite(norm):
            raise _spoilt([name for name, part in zip(self._names, norms, strict=True) if not math.isfinite(part)])
        return float(norm)


def _spoilt(names: Sequence[str]) -> RunFailed:
    so = f"not finite in {len(names)} parameters: {', '.join(names[:5])}" if names else "finite in every parameter, but too large to add up"
    return RunFailed("the gradients", so, "Lower the learning rate, or choose a precision recipe with more high-precision modules.")


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all elements of all gradients, each counted once (0-d).

    Sharded gradients may lie on several meshes, and a rank may hold none of some. So each rank counts what it holds, divided by the number of ranks
    that hold the same, and the ranks add up. Collective if one is sharded.
    """
    if not any(isinstance(grad, DTensor) for grad in gradients):
        return nn.utils.get_total_norm(list(gradients))
    alike: dict[int, list[Tensor]] = {}
    for grad in gradients:
        alike.setdefault(_copies(grad), []).append(_here(grad))
    squares = torch.stack([nn.utils.get_total_norm(parts).double() ** 2 / copies for copies, parts in alike.items()]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same part of a tensor as this one."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    mesh = tensor.device_mesh
    return math.prod(mesh.size(i) for i, placement in enumerate(tensor.placements) if placement.is_replicate())


def _anywhere(names: Sequence[str]) -> list[str]:
    """The names that any rank gives."""
    if not dist.is_initialized():
        return list(names)
    told: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(told, list(names))
    return sorted({name for each in told for name in each})


class AveragedWeights:
    """Exponential moving average of the trainable dense parameters.

    Args:
        module: the dense module; the average starts at its present weights.
        decay: ``average = decay * average + (1 - decay) * weight`` after every step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._live = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._average = {name: p.detach().clone() for name, p in self._live.items()}
        self._decay = decay

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in after a step."""
        average, live = ([_here(t) for t in tensors] for tensors in (self._average.values(), self._live.values()))
        torch._foreach_lerp_(average, live, 1.0 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages in the module's place for a while, then the weights back, to the bit."""
        kept = {name: p.detach().clone() for name, p in self._live.items()}
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(kept)

    def state_dict(self) -> dict[str, Tensor]:
        """``{parameter name: average}``: the averages themselves, to be saved or filled."""
        return dict(self._average)

    @torch.no_grad()
    def _copy(self, source: dict[str, Tensor]) -> None:
        for name, p in self._live.items():
            p.copy_(source[name])
