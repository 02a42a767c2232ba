"""Seeded inputs of a test case, the same values in every dtype and on every device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of an op."""


class Inputs:
    """Draws the tensors of one case and remembers those that want gradients.

    Args:
        seed: equal seeds draw equal values.
        head_dim: width of a head of q.
        rounded: dtype that values are rounded to when drawn.
        dtype: dtype they are handed out in; float64 gives the truth's view of rounded inputs.
        device: where they lie.
    """

    def __init__(self, *, seed: int, head_dim: int, rounded: torch.dtype, dtype: torch.dtype, device: str) -> None:
        self.head_dim, self.dtype, self.device = head_dim, dtype, device
        self.leaves: list[Tensor] = []
        self._rounded = rounded
        self._generator = torch.Generator().manual_seed(seed)

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values without gradient."""
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale
        return drawn.to(self._rounded).to(self.device, self.dtype)

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values that want gradients."""
        leaf = self.values(*shape, scale=scale).requires_grad_()
        self.leaves.append(leaf)
        return leaf

    def fused(self, tokens: int, heads: int, *dims: int) -> tuple[Tensor, ...]:
        """Strided views ``[tokens, heads, dim]`` of one buffer, as a fused projection leaves them."""
        return torch.split(self.tensor(tokens, heads, sum(dims)), list(dims), dim=-1)

    def amid_nan(self, tokens: int, heads: int, dim: int) -> Tensor:
        """``[tokens, heads, dim]`` from the middle of a buffer that is NaN before and after: reading past its ends shows, even if multiplied by 0."""
        values = torch.full((tokens + 2 * GUARD, heads, dim), float("nan"), dtype=self.dtype, device=self.device)
        values[GUARD : GUARD + tokens] = self.values(tokens, heads, dim)
        self.leaves.append(values.requires_grad_())
        return values[GUARD : GUARD + tokens]

    def angles(self, tokens: int, pairs: int) -> Tensor:
        """Rotation angles without gradient, float32 (float64 for float64)."""
        drawn = torch.randn((tokens, pairs), generator=self._generator, dtype=torch.float32) * 3
        return drawn.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32)

    def counts(self, numbers: Sequence[int]) -> Tensor:
        """``[rows]`` int64."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def offsets(self, lengths: Sequence[int]) -> Tensor:
        """``[rows + 1]`` int64."""
        return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)]).to(self.device)


GUARD = 3
"""Tokens of NaN on each side of an ``amid_nan`` buffer."""


@dataclass(frozen=True)
class Case:
    """One awkward input of an op: a readable name and how to draw it."""

    name: str
    make: Callable[[Inputs], Call]


@dataclass(frozen=True)
class OpCases:
    """The cases of one op, and how to draw its plainest call for any lengths (for Hypothesis)."""

    cases: tuple[Case, ...]
    plain: Callable[[Inputs, list[int]], Call]
    cut: Callable[[Inputs], Call] | None = None
    """A call whose rows are longer than its stated maximum, for devices where that is not an error."""
